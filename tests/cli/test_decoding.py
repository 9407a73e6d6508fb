"""The flags that bound decoding: every limit has one, with its own default, and it arrives. S5, S6."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import semel.compose
from semel.core.flag import flags_of
from semel.media import DecodeLimits
from semel.media.decode.limits import ProcessingLimits
from semel.processing.pool.pool import MAX_MEMORY_BYTES, TIMEOUT_S
from semel.settings import FrontendSettings, create_key
from tests.commands import invoke

LIMITS = [field.name for field in fields(DecodeLimits)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FrontendSettings]:
    """What frontends were started with, none of which really were."""
    options: list[FrontendSettings] = []

    async def run(given: FrontendSettings) -> None:
        options.append(given)

    monkeypatch.setattr(semel.compose, "run_frontend", run)
    return options


def start(tmp_path: Path, *flags: str) -> int:
    create_key(tmp_path / "key")
    command = [
        "frontend",
        "model",
        "--worker",
        "ipc:///w",
        "--fleet-key-file",
        str(tmp_path / "key"),
        *flags,
        "--skip-checks",
    ]
    return invoke(*command).exit_code


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_a_flag_with_its_own_default(name: str) -> None:
    (found,) = [one for one in flags_of(FrontendSettings) if one.path == ("serving", "decode", name)]
    assert found.key == name
    assert found.default == getattr(DecodeLimits(), name)


def test_without_flags_a_frontend_has_the_defaults_of_the_pool(tmp_path: Path, started: list[FrontendSettings]) -> None:
    assert start(tmp_path) == 0
    (options,) = started
    assert options.serving.decode == DecodeLimits()
    assert options.serving.preprocessing.limits == ProcessingLimits(TIMEOUT_S, MAX_MEMORY_BYTES)


def test_every_flag_arrives(tmp_path: Path, started: list[FrontendSettings]) -> None:
    flags = [f"--{name.replace('_', '-')}={number}" for number, name in enumerate(LIMITS, 100)]
    assert start(tmp_path, *flags, "--max-processing-s=7", "--max-processing-memory-gb=0.5") == 0
    (options,) = started
    assert [getattr(options.serving.decode, name) for name in LIMITS] == list(range(100, 100 + len(LIMITS)))
    assert options.serving.preprocessing.limits == ProcessingLimits(7.0, 512 << 20)


def test_a_limit_that_cannot_be_is_refused(tmp_path: Path, started: list[FrontendSettings]) -> None:
    assert start(tmp_path, "--max-image-pixels=0") == 2
    assert not started
