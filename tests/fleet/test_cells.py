"""A frontend leaves out workers of another cell, before anything else of theirs counts. Over real links."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from semel.core import Contract
from semel.fleet.compatibility import cell_difference, contract_id
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from tests.fleet.test_retry_policy import Linking
from tests.waiting import until
from tests.wire.examples import CONTRACT


@pytest.fixture
async def linking(tmp_path: Path) -> AsyncIterator[Linking]:
    async with AsyncExitStack() as stack:
        yield Linking(tmp_path, stack, {})


async def connected(linking: Linking, contract: Contract) -> RemoteWorker:
    worker = await linking.link(contract)
    await until(lambda: worker.is_connected)
    return worker


@pytest.mark.parametrize(
    ("ours", "its", "is_used"),
    [("a", "a", True), ("a", "b", False), (None, "b", True), ("a", UNSET, True), (None, UNSET, True)],
)
async def test_a_worker_of_another_cell_is_refused_by_name(
    linking: Linking, ours: str | None, its: str | UnsetType, is_used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever names no cell is used, so that names can be added to a fleet that runs."""
    worker = await connected(linking, replace(CONTRACT, cell=its))
    fleet = Fleet([worker], cell=ours)
    assert fleet.serving == ([worker] if is_used else [])
    assert fleet.refusals == ({} if is_used else {worker: "cell"})
    assert ("it belongs to cell 'b', this frontend to 'a'" in caplog.text) == (not is_used)


async def test_a_stranger_that_comes_first_does_not_settle_what_is_served(linking: Linking) -> None:
    """Control: without a cell the first worker's contract is the fleet's, and the other one is refused."""
    stranger = await connected(linking, replace(CONTRACT, model="another", cell="b"))
    own = await connected(linking, replace(CONTRACT, cell="a"))
    assert Fleet([stranger, own], cell="a").serving == [own]
    assert Fleet([stranger, own]).serving == [stranger]


def test_the_cell_changes_no_answer_and_no_frame_of_those_who_name_none() -> None:
    named = replace(CONTRACT, cell="a")
    assert cell_difference("a", named) is None
    assert contract_id(named) == contract_id(CONTRACT)
    assert b"cell" not in msgspec.msgpack.encode(CONTRACT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(named), type=Contract) == named
