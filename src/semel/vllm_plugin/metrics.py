"""The door's counters and the encoder's totals in vLLM's own `/metrics`.

They are read on each scrape, from the registry that vLLM's server shows. With several API servers vLLM shows files of
numbers instead, which no collector reaches: there is nothing of semel then. `vllm.stat_logger_plugins` is not used, as
vLLM records statistics for every user who has such a plug-in installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from prometheus_client import REGISTRY

from semel.engine.vllm.plugins.encoder_metrics import EncoderPage
from semel.telemetry import metrics
from semel.telemetry.meter import Meter, Sample
from semel.vllm_plugin.counters import COUNTS

__all__ = ["add_encoder_page", "is_ray_up", "show_metrics"]

_PAGES: Final[list[EncoderPage]] = []
_SEVERAL_PROCESSES: Final = "PROMETHEUS_MULTIPROC_DIR"


@cache
def show_metrics() -> None:
    """Let vLLM's `/metrics` show what is counted in this process, once."""
    meter = Meter()
    meter.watch(_samples)
    REGISTRY.register(meter.registry)


def add_encoder_page(arguments: Any) -> dict[str, str]:
    """Return the setting of the encoder cache by which `/metrics` shows its totals.

    There is none with several API servers, nor under Ray.
    """
    if arguments._api_process_count > 1 or _SEVERAL_PROCESSES in os.environ or is_ray_up():
        return {}
    _PAGES.append(EncoderPage.create())
    return {"metrics": _PAGES[-1].path}


def is_ray_up() -> bool:
    """Return whether this process belongs to Ray, which may start the engine on another machine, or after its end."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _samples() -> Iterator[Sample]:
    for event, total in list(COUNTS.items()):
        yield metrics.DOOR_EVENTS, total, (event,)
    for page in reversed(_PAGES):  # a configuration that no engine was started with has an empty one
        if samples := list(page.samples()):
            yield from samples
            return
