"""Tests that follow one another in one process: those of a file, and those that share an engine or a model's libraries.

A start of an engine takes half a minute, and CI has a budget of them (`tests/budget.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling

FAMILIES: Final = ("tests/engine/test_families.py", "tests/engine/test_hostile_features.py")
LIBRARIES: Final = (
    *("tests/processing/test_audio_copies.py", "tests/processing/test_hf.py", "tests/processing/test_lay_out.py"),
    *("tests/processing/test_quick.py", "tests/render/test_parity.py", "tests/render/test_pipeline.py"),
    *("tests/render/test_warmup.py", "tests/security/test_s14_special_tokens.py", "tests/security/test_s7_words.py"),
    *("tests/security/test_s8_degenerate.py", "tests/testing/test_families.py", "tests/testing/test_models.py"),
)
"""Files whose fast tests load transformers and build tiny models: ten seconds of CPU in each process that does."""

SHARED: Final[Mapping[str, str]] = {
    **dict.fromkeys(LIBRARIES, "transformers"),
    "tests/engine/test_qwen2_vl.py": "qwen2-vl",
    "tests/engine/test_transcriptions.py": "whisper",
    "tests/engine/test_torn_bytes.py": "vLLM's processor",
    "tests/engine/test_vllm_processor.py": "vLLM's processor",
    "tests/serve/test_engine_metrics.py": "openai",
    "tests/serve/test_examples.py": "openai",
    "tests/serve/test_openai.py": "openai",
    "tests/serve/test_serve.py": "qwen2-vl",
}
"""Files that share an engine with others; the rows of `FAMILIES` are groups by their families."""


def group_of(test: str) -> str:
    """The group of a test, by pytest's name for it."""
    file, _, name = test.partition("::")
    if file.startswith("tests/vllm_plugin/test_server"):
        return "the door's server"
    if file not in FAMILIES:
        return SHARED.get(file, file)
    family = name.partition("[")[2].rstrip("]")
    return family.partition(":")[0].partition(" ")[0] or file


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put groups together, each where its first test stands, also if one process runs all.

    With `--no-loadscope-reorder`, those that may take longest come first: none of them is left when others are done.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    ordered = list(groups.values())
    if not config.getoption("loadscopereorder", default=True):
        ordered.sort(key=lambda group: (-max(map(_timeout_s, group)), -len(group)))
    items[:] = chain.from_iterable(ordered)


def _timeout_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else 0.0


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    """One process runs all tests of a group."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """For `--dist loadfile`."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
