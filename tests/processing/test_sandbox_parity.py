"""Inside the sandbox decoders and processors make what they make outside: every probe, bit by bit (S23)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from semel.core import Target
from semel.processing import HfProcessor
from semel.processing.pool.pool import Pool
from semel.processing.probes import run_probes
from semel.processing.probes.catalogue import probe_names
from semel.processing.sandbox import LAYERS, kernel_sandbox

Folder = Callable[[str], Path]
TARGET = Target("float32", "engine")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2-audio"])
async def test_every_probe_has_the_same_result_inside_the_sandbox_S23(family: str, tiny: Folder) -> None:
    """Files of every format, mode and codec, and features of images, clips and videos."""
    pool = await Pool.start(tiny(family), TARGET, spares=0, probes=True)
    try:
        inside = pool.description.probes
        assert {layer for layer, processes in pool.sandboxed.items() if processes} == set(LAYERS if _is_whole() else ())
    finally:
        await pool.close()
    outside = run_probes(HfProcessor.load(tiny(family), TARGET))
    assert inside is not None
    assert len(probe_names()) > 400
    assert inside == outside


def _is_whole() -> bool:
    return kernel_sandbox().is_whole
