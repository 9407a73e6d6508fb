"""Flags that the shipped assembly is seen to pass on without a process: what they need is slow, or not ours."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from semel.cache import NoCache
from semel.cli import serve
from semel.compose import frontend as assembly
from semel.key_files import ProcessKeys
from semel.processing import Pool
from semel.processing.pool.fork_server import ForkServer
from semel.settings.frontend import DiscoverySettings, FrontendSettings, PreprocessingSettings, ServingSettings
from semel.settings.serve import ServeSettings
from tests.frontend.rig import CONTRACT, KEY

KEYS = ProcessKeys.of_fleet_key(KEY, "frontend")


def test_names_are_looked_up_as_often_as_the_flag_says() -> None:
    (source,) = assembly._address_sources(DiscoverySettings(workers_dns=("workers.example:7000",), workers_dns_s=7))
    assert source.every_s == 7


async def test_the_pool_is_started_with_the_processor_of_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = ServingSettings(preprocessing=PreprocessingSettings(processes=1, processor="vllm"))
    parts = assembly._Parts(FrontendSettings("m", serving=serving), KEYS, NoCache())
    started: list[object] = []

    async def start(*_: object, **options: object) -> Pool:
        started.append(options["processor"])
        raise _EnoughError

    monkeypatch.setattr(Pool, "start", start)
    with pytest.raises(_EnoughError):
        async with AsyncExitStack() as stack:
            await parts._start_pool(stack, tmp_path, CONTRACT, ForkServer(tmp_path), [])
    assert started == ["vllm"]


@pytest.mark.parametrize("verbose", [False, True])
async def test_serve_shows_everything_at_a_terminal_if_it_is_verbose(
    verbose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def output(*_: object, is_visible: bool, **__: object) -> None:
        seen.append(is_visible)
        raise _EnoughError

    monkeypatch.setattr(serve, "console", SimpleNamespace(is_terminal=True))
    monkeypatch.setattr(serve, "Output", output)
    with pytest.raises(_EnoughError):
        await serve._supervise(serve.ServeOptions(ServeSettings("m", verbose=verbose), (), ()), tmp_path)
    assert seen == [verbose]


class _EnoughError(Exception):
    """All was seen."""
