"""A process of the pool is warm before it gets its first item, also one that takes another's place (E3)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import cast

import pytest

from semel.core import Feature, Layout, Media, Modality, Target
from semel.errors import MediaUndecodable
from semel.media.decode.warmup_media import sample_clip
from semel.processing import Pool
from semel.processing.pool.child import warm_up
from semel.processing.processor import Processor
from tests.processing.test_pool import LOADING_S
from tests.waiting import until

Folder = Callable[[str], Path]

TARGET = Target("float32")
MOST = 1.5
TRIES = 3
"""A neighbour that empties the caches of the processor can spoil one."""


pytestmark = [pytest.mark.slow, pytest.mark.alone]


class Recorder:
    """A processor that remembers what it was given, and refuses one modality."""

    def __init__(self, modalities: tuple[Modality, ...], refused: Modality | None = None) -> None:
        self.modalities = modalities
        self.refused = refused
        self.given: list[Modality] = []
        self.read: list[Modality] = []

    def lay_out_header(self, media: Media) -> None:
        self.read.append(media.modality)

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        assert options is None
        self.given.append(media.modality)
        if media.modality == self.refused:
            raise MediaUndecodable("no such luck")
        return Feature(media.modality, {}, Layout((1,)))


def test_every_modality_is_warmed_E3() -> None:
    recorder = Recorder(("audio", "image", "video"))
    warm_up(cast("Processor", recorder))
    assert recorder.read == recorder.given == ["audio", "image", "video"]


def test_a_modality_that_cannot_be_warmed_is_a_warning_and_the_others_are_warmed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder(("audio", "image"), refused="audio")
    with caplog.at_level(logging.WARNING):
        warm_up(cast("Processor", recorder))
    assert recorder.given == ["audio", "image"]
    assert "warming up audio failed: no such luck" in caplog.text


def processor_s(pid: int) -> float:
    """The time that a process with one thread has run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def times_of(pool: Pool, pid: int) -> list[float]:
    spent_s = [processor_s(pid)]
    for number in range(11):
        await pool.process(sample_clip(number))
        spent_s.append(processor_s(pid))
    return [after - before for before, after in pairwise(spent_s)]


@pytest.mark.timeout(300)
async def test_the_first_item_of_a_process_that_takes_another_s_place_costs_what_a_later_one_costs(
    tiny: Folder,
) -> None:
    pool = await Pool.start(tiny("qwen2-audio"), TARGET, processes=1, spares=1)
    try:
        ratios: list[float] = []
        while len(ratios) < TRIES and min(ratios, default=9.0) > MOST:
            await until(lambda: bool(pool.spare_pids), within_s=LOADING_S)
            victim, spare = pool.pids[0], pool.spare_pids[0]
            os.kill(victim, signal.SIGKILL)
            await until(lambda: spare in pool.pids)  # noqa: B023
            first, *later = await times_of(pool, spare)
            ratios.append(first / median(later))
        assert min(ratios) <= MOST, ratios
    finally:
        await pool.close()


UNWARMED = """
import sys
from pathlib import Path
from statistics import median
from time import process_time
import torch
from semel.core import Target
from semel.media.decode.warmup_media import sample_clip
from semel.processing import HfProcessor
torch.set_num_threads(1)
processor, spent_s = HfProcessor.load(Path(sys.argv[1]), Target("float32")), []
for number in range(11):
    begin_s = process_time()
    processor.process(sample_clip(number))
    spent_s.append(process_time() - begin_s)
print(spent_s[0] / median(spent_s[1:]))
"""


@pytest.mark.timeout(300)
def test_the_first_item_of_a_process_that_was_not_warmed_costs_more(tiny: Folder) -> None:
    """The control: a process that only loads its processor."""
    command = [sys.executable, "-c", UNWARMED, str(tiny("qwen2-audio"))]
    ratio = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LOADING_S).stdout
    assert float(ratio) > MOST
