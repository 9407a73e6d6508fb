"""Which generations of transport keys are made, accepted and tried, whichever file is replaced first."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Key
from semel.errors import ConfigError
from semel.wire.keys import DERIVED, MAX_GENERATIONS, Generation, TransportKeys
from semel.wire.zmq.address import public_key, transport_keys
from semel.wire.zmq.key_pairs import KeyPairs, decode_keys, encode_keys
from tests.wire.examples import KEY

FIRST = KeyPairs.make(1_000)
STEPS = st.lists(st.sampled_from(["rotate", "retire"]), max_size=6)


def history(steps: list[str]) -> list[KeyPairs]:
    """What the operator's folder has had in it."""
    found = [FIRST]
    for now_s, step in enumerate(steps, 2_000):
        found.append(found[-1].rotate(now_s) if step == "rotate" else found[-1].retire())
    return found


def numbers(keys: TransportKeys) -> list[int]:
    return [one.number for one in keys.generations]


def meeting(frontend: TransportKeys, worker: TransportKeys) -> Generation | None:
    """The generation that a frontend gets in with, if it tries long enough for every way round."""
    for failures in range(2 * MAX_GENERATIONS):
        tried = frontend.attempt(failures)
        found = worker.get(tried.link.id)
        if found is not None and found.peer == public_key(tried.secret):
            return tried
    return None


def stubborn(frontend: TransportKeys, worker: TransportKeys) -> Generation | None:
    """The naive way: always the newest."""
    tried = frontend.newest
    return tried if worker.get(tried.link.id) is not None else None


@given(STEPS, st.data())
def test_ends_meet_if_and_only_if_their_files_have_a_generation_in_common(
    steps: list[str], data: st.DataObject
) -> None:
    files = history(steps)
    frontend = data.draw(st.sampled_from(files)).frontend
    worker = data.draw(st.sampled_from(files)).worker
    common = set(numbers(frontend)) & set(numbers(worker))
    met = meeting(frontend, worker)
    assert (met is None) == (not common)
    if met is not None:
        assert met.number == max(common, key=lambda one: (one == frontend.newest.number, one))
        assert frontend.accepts(met)


@given(STEPS, st.booleans())
def test_ends_meet_at_every_step_while_only_one_of_the_two_files_is_replaced(
    steps: list[str], frontend_first: bool
) -> None:
    files = history(steps)
    for before, after in pairwise(files):
        ahead, behind = (after, before) if frontend_first else (before, after)
        assert meeting(ahead.frontend, behind.worker) is not None


def test_mutant_a_frontend_that_insists_on_its_newest_keys_is_locked_out_until_workers_have_them() -> None:
    after = FIRST.rotate(2_000)
    assert stubborn(after.frontend, FIRST.worker) is None
    assert meeting(after.frontend, FIRST.worker) == FIRST.frontend.newest


@given(STEPS)
def test_a_rotation_adds_one_and_keeps_one_and_no_number_or_secret_comes_twice(steps: list[str]) -> None:
    made: dict[int, tuple[bytes, bytes]] = {}
    files = history(steps)
    for step, before, after in zip(steps, files, files[1:], strict=False):
        last = before.worker.newest.number
        assert numbers(after.worker) == ([last, last + 1] if step == "rotate" else [last])
        assert numbers(after.frontend) == numbers(after.worker)
        for ours, theirs in zip(after.frontend.generations, after.worker.generations, strict=True):
            assert made.setdefault(ours.number, (ours.secret, theirs.secret)) == (ours.secret, theirs.secret)
    secrets = [secret for pair in made.values() for secret in pair]
    assert len(set(secrets)) == len(secrets)


@given(STEPS)
def test_a_file_is_read_as_it_was_written_and_has_no_secret_of_the_other_role(steps: list[str]) -> None:
    pairs = history(steps)[-1]
    for ours, theirs in ((pairs.frontend, pairs.worker), (pairs.worker, pairs.frontend)):
        text = encode_keys(ours)
        assert decode_keys(text) == ours
        assert not any(one.secret.hex() in text for one in theirs.generations)


@given(st.text(max_size=200) | st.binary(max_size=80).map(lambda raw: raw.decode("latin-1")))
def test_any_other_text_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r"^it has no transport keys$"):
        decode_keys(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"role": "worker"', '"role": "admin"'),
        ('"generation": 1', '"generation": -1'),
        ('"secret": "', '"secret": "00'),
    ],
)
def test_a_file_with_a_wrong_value_is_refused(before: str, after: str) -> None:
    text = encode_keys(FIRST.worker)
    assert before in text
    with pytest.raises(ValueError, match="it has no transport keys"):
        decode_keys(text.replace(before, after))


def test_generations_are_in_order_and_differ() -> None:
    old, new = FIRST.rotate(2_000).worker.generations
    for wrong in ((), (new, old), (old, old), (old, replace(new, link=old.link)), (old, new, replace(new, number=9))):
        with pytest.raises(ValueError, match="generation"):
            TransportKeys("worker", wrong)


def test_keys_are_never_shown() -> None:
    for pairs in (FIRST, FIRST.rotate(2_000)):
        shown = repr(pairs)
        for one in (*pairs.frontend.generations, *pairs.worker.generations):
            assert one.secret.hex() not in shown
            assert repr(one.secret) not in shown


def test_files_of_different_folders_are_no_pair() -> None:
    with pytest.raises(ValueError, match="different generations"):
        KeyPairs(FIRST.frontend, KeyPairs.make(1_000).worker)
    with pytest.raises(ValueError, match="different generations"):
        KeyPairs(FIRST.frontend, FIRST.rotate(2_000).worker)
    (theirs,) = KeyPairs.make(1_000).worker.generations
    mixed = TransportKeys("worker", (replace(theirs, link=FIRST.worker.newest.link),))
    with pytest.raises(ValueError, match="generation 1 of frontends is not that of workers"):
        KeyPairs(FIRST.frontend, mixed)


def test_a_fleet_key_stands_for_both_roles_and_one_generation() -> None:
    frontend, worker = transport_keys(KEY, "frontend"), transport_keys(KEY, "worker")
    assert numbers(frontend) == numbers(worker) == [DERIVED]
    assert meeting(frontend, worker) is not None
    assert meeting(frontend, transport_keys(Key(b"o" * 32), "worker")) is None


def test_a_role_does_not_take_the_keys_of_the_other() -> None:
    with pytest.raises(ConfigError, match="transport keys of a frontend, and this is a worker"):
        transport_keys(FIRST.frontend, "worker")
