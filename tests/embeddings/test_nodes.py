"""What a node of the store says in the log about itself."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest

from semel.embeddings.nodes import Node
from semel.embeddings.protocol import StoreDown
from semel.lab.testing.embedding_store import MemoryBlobs
from tests.embeddings.redis import soon


class _Silent(Node):
    def _report(self, was_up: bool, is_up: bool, failure: BaseException | None) -> None:
        """Say nothing."""


class _Talkative(Node):
    def _report(self, was_up: bool, is_up: bool, failure: BaseException | None) -> None:  # noqa: ARG002
        super()._report(failure is not None, failure is None, failure)


def lines_of(make: type[Node], caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What a node says that works, fails, fails again when it is tried, and is back."""
    now = 100.0
    blobs = MemoryBlobs()
    node = make("store.example:6380", blobs, clock=lambda: now)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for is_down in (False, True, False, True, True, True, True, True, False, False):
            blobs.is_down = is_down
            now += 10 if len(caplog.records) else 0
            with suppress(StoreDown), node.attempt() as opened:
                opened.ping(soon())
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_node_that_goes_down_says_so_once_with_the_reason_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The controls say nothing, and something after every call."""
    expected = [
        (
            "WARNING",
            "the embedding store's node store.example:6380 is down, and is tried again: this store was set to be down",
        ),
        ("INFO", "the embedding store's node store.example:6380 answers again"),
    ]
    assert lines_of(Node, caplog) == expected
    for mutant in (_Silent, _Talkative):
        assert lines_of(mutant, caplog) != expected


def test_of_a_failure_that_is_no_error_of_a_store_only_the_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    node = Node("one", MemoryBlobs())
    for _ in range(3):
        with suppress(ValueError), node.attempt():
            raise ValueError("something that is nobody's business")
    assert "ValueError" in caplog.text
    assert "business" not in caplog.text
