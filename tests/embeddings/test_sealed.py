"""What a worker gets from the store of encoder outputs, over memory and over a real Redis (issue's step 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from semel.core import Digest, Key
from semel.core.embedding import Form
from semel.embeddings import sealed as sealed_module
from semel.embeddings.nodes import Node, Nodes
from semel.embeddings.protocol import BlobStore, StoreFull, StoreLate
from semel.embeddings.seal import MANIFEST_BYTES, Seal, manifest_key, probe_key, probe_name
from semel.embeddings.sealed import Fetched, PublishOutcome, SealedStore, Stage
from semel.lab.testing.embedding_store import MemoryBlobs
from tests.embeddings.redis import running_redis, soon
from tests.embeddings.stores import IDENTITY, KEY, TTL_S, Staging, content, digest_of, open_store, pieces, sealed

FORM: Form = (1_369, 640, "torch.float32")
NBYTES = 1_369 * 640 * 4


@pytest.fixture(scope="module", params=["memory", "tcp", "tls"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BlobStore, Callable[[], BlobStore]]]:
    with open_store(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def digest(request: pytest.FixtureRequest) -> Digest:
    """One that no other test uses."""
    return digest_of(hash(request.node.name) & 0xFFFF_FFFF)


def publish(store: SealedStore, digest: Digest, data: bytearray, form: Form = FORM) -> str:
    return store.publish(digest, form, pieces(data, [100_000, 5]), lambda: True, soon())


def test_what_one_worker_publishes_another_fetches(
    opened: tuple[BlobStore, Callable[[], BlobStore]], digest: Digest
) -> None:
    first, second, staging = sealed(opened[0]), sealed(opened[1]()), Staging()
    data = content(NBYTES)
    assert publish(first, digest, data) == "published"
    other = digest_of(77)
    found = second.fetch({other: 3, digest: FORM[0]}, staging, soon())
    assert [(one.digest, one.outcome, one.form, one.is_staged) for one in found] == [
        (other, "miss", None, False),
        (digest, "hit", FORM, True),
    ]
    assert staging.data == {digest: data}
    assert publish(second, digest, data) == "already_there"


def test_another_encoder_and_another_fleet_have_other_names(
    opened: tuple[BlobStore, Callable[[], BlobStore]], digest: Digest
) -> None:
    assert publish(sealed(opened[0]), digest, content(NBYTES)) == "published"
    for other in (sealed(opened[0], identity=b"other weights"), sealed(opened[0], key=Key(bytes(32)))):
        (found,) = other.fetch({digest: FORM[0]}, Staging(), soon())
        assert found.outcome == "miss"


@pytest.mark.parametrize(("rows", "width"), [(1_370, None), (1_369, (641, FORM[2])), (1_369, (640, "torch.bfloat16"))])
def test_another_shape_than_the_layout_and_the_engine_have_is_refused_and_deleted(
    opened: tuple[BlobStore, Callable[[], BlobStore]], digest: Digest, rows: int, width: tuple[int, str] | None
) -> None:
    store, staging = sealed(opened[0]), Staging()
    assert publish(store, digest, content(NBYTES)) == "published"
    (found,) = store.fetch({digest: rows}, staging, soon(), width=width)
    assert (found.outcome, found.is_staged, staging.data) == ("shape_wrong", False, {})
    (found,) = store.fetch({digest: FORM[0]}, staging, soon(), width=FORM[1:])
    assert found.outcome == "miss"


def test_without_room_nothing_is_read_and_the_entry_stays(
    opened: tuple[BlobStore, Callable[[], BlobStore]], digest: Digest
) -> None:
    store = sealed(opened[0])
    assert publish(store, digest, content(NBYTES)) == "published"
    (found,) = store.fetch({digest: FORM[0]}, Staging(room=NBYTES - 1), soon())
    assert (found.outcome, found.is_staged) == ("no_room", False)
    (found,) = store.fetch({digest: FORM[0]}, Staging(room=NBYTES), soon(), width=FORM[1:])
    assert found.outcome == "hit"


def test_the_fleet_has_the_probe_of_its_first_worker(opened: tuple[BlobStore, Callable[[], BlobStore]]) -> None:
    first, second = sealed(opened[0]), sealed(opened[1]())
    assert first.compare_probe(b"one hash", soon()) == b"one hash"
    assert second.compare_probe(b"one hash", soon()) == b"one hash"
    assert second.compare_probe(b"another", soon()) == b"one hash"
    assert sealed(opened[0], identity=b"another encoder").compare_probe(b"another", soon()) == b"another"


def test_of_two_workers_that_start_at_once_the_quicker_ones_probe_is_the_fleets() -> None:
    blobs = MemoryBlobs()
    first, second, put_new = sealed(blobs), sealed(blobs), blobs.put_new

    def overtaken(*arguments: Any) -> bool:
        setattr(blobs, "put_new", put_new)  # noqa: B010
        assert second.compare_probe(b"quicker", soon()) == b"quicker"
        return put_new(*arguments)

    setattr(blobs, "put_new", overtaken)  # noqa: B010
    assert first.compare_probe(b"slower", soon()) == b"quicker"


def put_first(store: SealedStore, probe: bytes) -> bytes:
    """A mutant: what a worker does that writes before it reads."""
    name = probe_name(KEY, IDENTITY)
    with store._nodes.choose(name).attempt() as blobs:
        return probe if blobs.put_new(probe_key(name), probe, None, soon()) else b""


def test_a_restarted_worker_reads_from_a_full_redis_that_does_not_evict(tmp_path: Path) -> None:
    """Control: a worker that writes its probe first cannot use the store at all."""
    options = ("--maxmemory", "16mb", "--maxmemory-policy", "noeviction")
    data = content(NBYTES)
    with running_redis(tmp_path, options=options) as redis, closing(redis.store()) as blobs:
        first = sealed(blobs)
        assert first.compare_probe(b"fleet's", soon()) == b"fleet's"
        assert publish(first, digest_of(1), data) == "published"
        outcomes = [publish(first, digest_of(number), data) for number in range(2, 12)]
        assert outcomes[-1] == "full"
        redis.ask("CONFIG", "SET", "maxmemory", "1mb")  # not even a small value has room
        with closing(redis.store()) as others:
            restarted = sealed(others)
            with pytest.raises(StoreFull):
                put_first(restarted, b"fleet's")
            assert restarted.compare_probe(b"fleet's", soon()) == b"fleet's"
            assert restarted.compare_probe(b"another", soon()) == b"fleet's", "it is compared, too"
            (found,) = restarted.fetch({digest_of(1): FORM[0]}, Staging(), soon())
            assert found.outcome == "hit"
            new = sealed(others, identity=b"another encoder")
            assert new.compare_probe(b"ours", soon()) == b"ours"
            assert new.is_up


def overtaken() -> tuple[MemoryBlobs, str]:
    """A writer finds, when it wants to write the manifest, that another one was quicker; what a reader gets then."""
    blobs = MemoryBlobs()
    first, second = sealed(blobs), sealed(blobs)
    data, staging = content(NBYTES, 2), Staging()

    def overtake() -> bool:
        assert publish(second, digest_of(1), data) == "published"
        return True

    assert first.publish(digest_of(1), FORM, [memoryview(content(NBYTES, 1))], overtake, soon()) == "already_there"
    (found,) = first.fetch({digest_of(1): FORM[0]}, staging, soon())
    assert found.outcome != "hit" or staging.data[digest_of(1)] == data
    return blobs, found.outcome


def test_of_two_writers_the_first_manifest_stays_and_the_others_chunks_are_deleted() -> None:
    blobs, outcome = overtaken()
    assert outcome == "hit"
    assert len(blobs.values) == 1 + 4, "one manifest and the chunks that it names"


def test_without_a_nonce_writers_would_destroy_each_others_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", bytes)
    assert overtaken()[1] != "hit"


def test_a_full_store_refuses_and_keeps_nothing_of_it_and_is_not_taken_to_be_down() -> None:
    blobs = MemoryBlobs()
    blobs.capacity_bytes = NBYTES // 2
    store = sealed(blobs)
    assert [publish(store, digest_of(one), content(NBYTES)) for one in range(5)] == ["full"] * 5
    assert not blobs.values
    assert store.is_up


def with_three_published(blobs: MemoryBlobs) -> tuple[SealedStore, list[Digest]]:
    store, digests = sealed(blobs), [digest_of(one) for one in range(3)]
    for digest in digests:
        assert publish(store, digest, content(NBYTES)) == "published"
    return store, digests


def test_with_several_nodes_entries_are_spread_and_a_lost_node_is_misses_for_its_own() -> None:
    blobs = [MemoryBlobs() for _ in range(3)]
    store = sealed(*blobs)
    digests = [digest_of(one) for one in range(60)]
    for digest in digests:
        assert publish(store, digest, content(64), (1, 16, "torch.float32")) == "published"
    held = [sum(b":" not in key[9:] for key in one.values) for one in blobs]
    assert sum(held) == 60
    assert min(held) > 5
    blobs[0].is_down = True
    found = [store.fetch({digest: 1}, Staging(), soon())[0].outcome for digest in digests]
    assert found.count("down") == held[0]
    assert found.count("hit") == held[1] + held[2]
    assert store.is_up


def test_a_node_that_is_late_leaves_time_for_the_others() -> None:
    blobs = [MemoryBlobs() for _ in range(2)]
    store = sealed(*blobs)
    digests = [digest_of(one) for one in range(20)]
    for digest in digests:
        assert publish(store, digest, content(64), (1, 16, "torch.float32")) == "published"
    held = sum(b":" not in key[9:] for key in blobs[0].values)
    blobs[0].delay_s = 60
    found = [one.outcome for one in store.fetch(dict.fromkeys(digests, 1), Staging(), soon(4))]
    assert found.count("late") == held
    assert found.count("hit") == 20 - held


class _EveryLateCallCounts(SealedStore):
    """Asks a node also when there is no time left, and takes any late answer for a failure of the node."""

    def _fetch_from(self, node: Node, group: Any, stage: Stage, deadline: float) -> list[Fetched]:
        try:
            with node.attempt() as blobs:
                raws = blobs.get_many([manifest_key(one.name) for one in group], MANIFEST_BYTES, deadline)
                for one, raw in zip(group, raws, strict=True):
                    self._receive(blobs, one, raw, stage, deadline)
        except StoreLate:
            pass
        return [Fetched(one.digest, "late") for one in group]

    def _publish(self, blobs: BlobStore, entry: Any, _: Callable[[], bool], deadline: float) -> PublishOutcome:
        blobs.put(entry.keys, entry.chunks(Seal(KEY, entry.name, entry.header)), 1, deadline)
        return "late"


def late(*_: object) -> Any:
    raise StoreLate("there was no time for so many bytes")


def is_up_after(make: type[SealedStore], case: str) -> bool:
    """Whether a node that answers is taken to be up after three calls that were late."""
    blobs = MemoryBlobs()
    nodes = Nodes([Node("one", blobs)])
    assert publish(SealedStore(KEY, IDENTITY, nodes, TTL_S), digest_of(1), content(NBYTES)) == "published"
    store = make(KEY, IDENTITY, nodes, TTL_S)
    if case in ("get_into", "put"):
        setattr(blobs, case, late)
    for _ in range(3):
        if case == "put":
            assert publish(store, digest_of(2), content(NBYTES)) == "late"
        else:
            until = soon(-1) if case == "queue" else soon()
            (found,) = store.fetch({digest_of(1): FORM[0]}, Staging(), until)
            assert found.outcome == "late"
    return store.is_up


@pytest.mark.parametrize("case", ["queue", "get_into", "put"])
def test_a_node_that_answers_is_up_however_long_a_call_has_waited_and_however_large_an_output_is(case: str) -> None:
    """Control: if every late call counted, the node would be taken to be down."""
    assert is_up_after(SealedStore, case)
    assert not is_up_after(_EveryLateCallCounts, case)


@pytest.mark.parametrize("outcome", ["down", "late"])
def test_a_failure_on_the_way_leaves_what_has_come_and_says_which_memory_to_free(outcome: str) -> None:
    blobs, staging = MemoryBlobs(), Staging()
    store, digests = with_three_published(blobs)

    def stage(digest: Digest, form: Form) -> list[memoryview] | None:
        if digest == digests[1]:
            blobs.is_down = outcome == "down"
            setattr(blobs, "get_into", late if outcome == "late" else blobs.get_into)  # noqa: B010
        return staging(digest, form)

    found = store.fetch(dict.fromkeys(digests, FORM[0]), stage, soon())
    assert [(one.outcome, one.is_staged) for one in found] == [("hit", True), (outcome, True), (outcome, False)]


def test_a_node_that_does_not_answer_in_time_is_left_alone_after_three_calls() -> None:
    blobs = MemoryBlobs()
    store = sealed(blobs)
    setattr(blobs, "get_many", late)  # noqa: B010
    assert [store.fetch({digest_of(1): 1}, Staging(), soon())[0].outcome for _ in range(3)] == ["late"] * 3
    assert not store.is_up


def full(*_: object) -> Any:
    raise StoreFull("there is no memory, not even for reading")


@pytest.mark.parametrize("operation", ["get_many", "get_into"])
def test_a_store_that_is_too_full_to_be_read_from_is_down(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: what says that a store can be read from gets out of a fetch, which never raises."""
    for is_mutant in (False, True):
        blobs = MemoryBlobs()
        store = sealed(blobs)
        assert publish(store, digest_of(1), content(NBYTES)) == "published"
        setattr(blobs, operation, full)
        if is_mutant:
            monkeypatch.setattr(sealed_module, "_reading", nullcontext)
            with pytest.raises(StoreFull):
                store.fetch({digest_of(1): FORM[0]}, Staging(), soon())
            continue
        found = [store.fetch({digest_of(1): FORM[0]}, Staging(), soon())[0] for _ in range(4)]
        assert [one.outcome for one in found] == ["down"] * 4
        assert [one.is_staged for one in found] == [operation == "get_into"] * 3 + [False]
        assert not store.is_up


def test_a_form_that_the_store_does_not_know_is_not_published() -> None:
    blobs = MemoryBlobs()
    for form in (
        (0, 4, "torch.float32"),
        (4, 4, "torch.int7"),
        (-1, 4, "torch.float32"),
        (1, 1 << 40, "torch.float32"),
    ):
        assert sealed(blobs).publish(digest_of(1), form, [], lambda: True, soon()) == "unsupported"
    assert not blobs.calls
