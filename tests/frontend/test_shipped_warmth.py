"""E3, E4: what `semel frontend` composes is warm before it serves. Counted by what its pool was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.compose import frontend as assembly
from semel.frontend.service import FrontendState, ServedModel
from semel.render import Pipeline, warm_up
from tests.frontend.shipped import DrawnPool, shipped
from tests.render.conftest import folder
from tests.render.drawn import chat

__all__ = ["folder"]

PROCESSES = 3


async def check_the_served_pipeline_is_warm(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths have been through every process before it is ready, and the first request asks for no more."""
    pool, ready_after = DrawnPool(PROCESSES), []
    begin = FrontendState.begin

    def begun(self: FrontendState, serving: ServedModel) -> None:
        ready_after.append(Counter(kind for kind, _ in pool.calls))
        begin(self, serving)

    monkeypatch.setattr(FrontendState, "begin", begun)
    async with shipped(home, model, pool) as world:
        (frontend,) = world.frontends
        kinds = ready_after[0]
        assert min(kinds["process"], kinds["apart"]) >= PROCESSES, kinds
        assert kinds["lay out"] >= 1
        assert (len(frontend.parts.cache), len(frontend.parts.layouts), pool.processed) == (0, 0, 0)
        for number in range(3):
            before = len(pool.calls)
            reply = await frontend.client.post(
                "/v1/chat/completions/render", json={"messages": list(chat(number).messages)}
            )
            assert reply.status_code == 200, reply.text
            assert pool.calls[before:] == [("lay out", number)]
        assert frontend.metric("semel_mm_cache_queries_total") == 0


async def test_both_paths_of_what_is_served_are_warm_before_it_is_E3_E4(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_the_served_pipeline_is_warm(tmp_path, folder, monkeypatch)


async def not_at_all(pipeline: Pipeline, *_: Any, **__: Any) -> None:
    pass


async def another_pipeline(pipeline: Pipeline, *limits: Any, **options: Any) -> None:
    """One that makes features in this process, as a library does."""
    await warm_up(replace(pipeline, process=DrawnPool().process, process_apart=None, lay_out=None), *limits, **options)


async def one_process(pipeline: Pipeline, *limits: Any, **options: Any) -> None:
    await warm_up(pipeline, *limits, **options | {"processes": 1})


async def only_to_execute(pipeline: Pipeline, *limits: Any, **options: Any) -> None:
    """The path of inspections is another one: as it was before there was a way to layouts without features."""
    await warm_up(replace(pipeline, process_apart=None, lay_out=None), *limits, **options)


MUTANTS = {mutant.__name__: mutant for mutant in (not_at_all, another_pipeline, one_process, only_to_execute)}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_a_mutant_that_warms_up_something_else_is_found_E4(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    monkeypatch.setattr(assembly, "warm_up", mutant)
    with pytest.raises(AssertionError):
        await check_the_served_pipeline_is_warm(tmp_path, folder, monkeypatch)
