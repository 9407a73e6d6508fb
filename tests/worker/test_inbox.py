"""The inbox against the obvious: a submission is complete when all it announced has arrived."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, Feature, Layout, Prompt, Timeline
from semel.errors import ProtocolError
from semel.worker.inbox import Announced, Inbox

DIGESTS = [Digest(bytes([n]) * 32) for n in range(4)]
FEATURE = Feature("image", {}, Layout((1,)))
PROMPT = Prompt([1], Timeline.decoder([]), ())

announcements = st.tuples(st.just("announce"), st.integers(0, 5), st.frozensets(st.sampled_from(DIGESTS)))
arrivals = st.tuples(st.just("arrive"), st.sampled_from(DIGESTS), st.none())
aborts = st.tuples(st.just("abort"), st.integers(0, 5), st.none())


def announced(number: int, payloads: frozenset[Digest]) -> Announced:
    return Announced(str(number), PROMPT, {}, None, payloads)


@given(st.lists(st.one_of(announcements, arrivals, aborts), max_size=40))
def test_a_submission_is_complete_exactly_when_all_it_announced_has_arrived(
    steps: list[tuple[str, object, object]],
) -> None:
    inbox = Inbox()
    missing: dict[str, set[Digest]] = {}
    for kind, what, payloads in steps:
        done: set[str] = set()
        if kind == "announce" and str(what) not in missing:
            submission = inbox.announce(announced(what, payloads))  # type: ignore[arg-type]
            missing[str(what)] = set(payloads)  # type: ignore[call-overload]
            done = {submission.request_id} if submission else set()
        elif kind == "arrive":
            done = {submission.request_id for submission in inbox.arrive(what, FEATURE)}  # type: ignore[arg-type]
            for wanted in missing.values():
                wanted.discard(what)
        elif kind == "abort":
            assert inbox.abort(str(what)) == (missing.pop(str(what), None) is not None)
        assert done == {request for request, wanted in missing.items() if not wanted}
        missing = {request: wanted for request, wanted in missing.items() if wanted}
        assert len(inbox) == len(missing)
    for request in list(missing):
        inbox.abort(request)
    assert not inbox._waiting
    assert not inbox._wanted


def test_a_request_id_is_taken_once() -> None:
    inbox = Inbox()
    inbox.announce(announced(1, frozenset(DIGESTS)))
    with pytest.raises(ProtocolError, match="submitted twice"):
        inbox.announce(announced(1, frozenset()))


def test_a_feature_that_nobody_waits_for_is_not_kept() -> None:
    inbox = Inbox()
    assert inbox.arrive(DIGESTS[0], FEATURE) == []
    assert inbox.announce(announced(1, frozenset(DIGESTS[:1]))) is None
