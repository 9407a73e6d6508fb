"""Entries that somebody has changed who can write to the store: none is accepted, and each is counted (threats S26).

Against a real Redis, in which they are planted with SET, SETRANGE, APPEND, COPY and DEL. Beside it the control: the
same store without seals, which accepts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from random import Random

import pytest

from semel.core import Digest, Key
from semel.core.embedding import Form
from semel.embeddings import sealed as sealed_module
from semel.embeddings.seal import (
    CHUNK_BYTES,
    MANIFEST_BYTES,
    Header,
    Manifest,
    Seal,
    chunk_keys,
    embedding_name,
    manifest_key,
    probe_key,
    probe_name,
    seal_key,
    seal_probe,
)
from semel.embeddings.sealed import SealedStore
from tests.effort import examples
from tests.embeddings.redis import Redis, running_redis, soon
from tests.embeddings.stores import IDENTITY, KEY, Staging, content, digest_of, sealed

ENTRIES = examples(1_000)
CONTROLS = examples(150)
SMALL: Form = (16, 32, "torch.float32")
LARGE: Form = (1_025, 640, "torch.float32")
OTHER_KEY = Key(b"k" * 32)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with running_redis(tmp_path_factory.mktemp("redis"), is_unix=True) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(redis: Redis) -> None:
    redis.ask("FLUSHALL", "SYNC")


@dataclass(frozen=True)
class Entry:
    """One that was published, and the keys that it has in the store."""

    redis: Redis
    name: Digest
    form: Form

    @property
    def manifest(self) -> bytes:
        return manifest_key(self.name)

    @property
    def chunks(self) -> list[bytes]:
        raw = self.redis.ask("GET", self.manifest)
        assert isinstance(raw, bytes)
        header = Header.unpack(raw[: MANIFEST_BYTES - 64])
        assert header is not None
        return list(chunk_keys(self.name, header.nonce, header.chunk_count))


Mutation = Callable[[Entry, Entry, Random], None]
"""Changes the first entry, perhaps by means of the second, which is whole and of another item."""


def _flip(entry: Entry, key: bytes, random: Random) -> None:
    size = entry.redis.ask("STRLEN", key)
    assert isinstance(size, int)
    at = random.randrange(size)
    byte = entry.redis.ask("GETRANGE", key, at, at)
    assert isinstance(byte, bytes)
    entry.redis.ask("SETRANGE", key, at, bytes([byte[0] ^ random.randint(1, 255)]))


def changed_manifest(entry: Entry, _: Entry, random: Random) -> None:
    _flip(entry, entry.manifest, random)


def changed_chunk(entry: Entry, _: Entry, random: Random) -> None:
    _flip(entry, random.choice(entry.chunks), random)


def _cut(entry: Entry, key: bytes, random: Random) -> None:
    raw = entry.redis.ask("GET", key)
    assert isinstance(raw, bytes)
    entry.redis.ask("SET", key, raw[: random.randrange(len(raw))])


def cut_manifest(entry: Entry, _: Entry, random: Random) -> None:
    _cut(entry, entry.manifest, random)


def cut_chunk(entry: Entry, _: Entry, random: Random) -> None:
    _cut(entry, random.choice(entry.chunks), random)


def longer_manifest(entry: Entry, _: Entry, random: Random) -> None:
    entry.redis.ask("APPEND", entry.manifest, random.randbytes(random.choice([1, 100, 5_000])))


def longer_chunk(entry: Entry, _: Entry, random: Random) -> None:
    entry.redis.ask("APPEND", random.choice(entry.chunks), random.randbytes(random.choice([1, 100, 5_000])))


def missing_chunk(entry: Entry, _: Entry, random: Random) -> None:
    entry.redis.ask("DEL", random.choice(entry.chunks))


def manifest_of_another(entry: Entry, other: Entry, _: Random) -> None:
    entry.redis.ask("COPY", other.manifest, entry.manifest, "REPLACE")


def chunk_of_another(entry: Entry, other: Entry, random: Random) -> None:
    index = random.randrange(len(entry.chunks))
    entry.redis.ask("COPY", other.chunks[index], entry.chunks[index], "REPLACE")


def whole_entry_of_another(entry: Entry, other: Entry, _: Random) -> None:
    chunks = other.chunks
    entry.redis.ask("COPY", other.manifest, entry.manifest, "REPLACE")
    for mine, theirs in zip(entry.chunks, chunks, strict=True):  # of the manifest that is there now
        entry.redis.ask("COPY", theirs, mine, "REPLACE")


def chunks_in_another_order(entry: Entry, other: Entry, random: Random) -> None:
    keys = entry.chunks
    if len(keys) < 3:
        return changed_chunk(entry, other, random)
    first, second = (entry.redis.ask("GET", key) for key in keys[:2])
    assert isinstance(first, bytes)
    assert isinstance(second, bytes)
    entry.redis.ask("SET", keys[0], second)
    entry.redis.ask("SET", keys[1], first)
    return None


def foreign_fleet(entry: Entry, _: Entry, random: Random) -> None:
    """Sealed as it should be, but with a key that is not ours."""
    header = Header.new(entry.form)
    data = content(header.nbytes, random.randrange(1 << 30))
    key = seal_key(OTHER_KEY)
    seal = Seal(key, entry.name, header)
    seal.add([memoryview(data)])
    entry.redis.ask("SET", entry.manifest, Manifest(header, seal.digest()).pack(key, entry.name))
    for index, chunk in enumerate(chunk_keys(entry.name, header.nonce, header.chunk_count)):
        entry.redis.ask("SET", chunk, bytes(data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]))


def other_form(entry: Entry, _: Entry, __: Random) -> None:
    """As many bytes, in rows of another length."""
    raw = entry.redis.ask("GET", entry.manifest)
    assert isinstance(raw, bytes)
    header = Header.unpack(raw[: MANIFEST_BYTES - 64])
    assert header is not None
    rows, columns, _dtype = header.form
    forged = Header((rows, 2 * columns, "torch.bfloat16"), header.nonce)
    entry.redis.ask("SET", entry.manifest, forged.pack() + raw[-64:])


def noise(entry: Entry, _: Entry, random: Random) -> None:
    entry.redis.ask("SET", entry.manifest, random.randbytes(random.choice([0, 1, MANIFEST_BYTES, 100_000])))


def list_as_manifest(entry: Entry, _: Entry, random: Random) -> None:
    entry.redis.ask("DEL", entry.manifest)
    entry.redis.ask("RPUSH", entry.manifest, random.randbytes(10))


def list_as_chunk(entry: Entry, _: Entry, random: Random) -> None:
    key = random.choice(entry.chunks)
    entry.redis.ask("DEL", key)
    entry.redis.ask("RPUSH", key, random.randbytes(10))


MUTATIONS: tuple[Mutation, ...] = (
    *(changed_manifest, changed_chunk, cut_manifest, cut_chunk, longer_manifest, longer_chunk, missing_chunk),
    *(manifest_of_another, chunk_of_another, whole_entry_of_another, chunks_in_another_order),
    *(foreign_fleet, other_form, noise, list_as_manifest, list_as_chunk),
)


def attempts(redis: Redis, store: SealedStore, count: int) -> Iterator[tuple[str, str, bool]]:
    """Publish an entry, change it, fetch it: which mutation, what became of it, and whether its bytes are right."""
    random = Random(26)
    other_digest = digest_of(0xFFFF)
    for number in range(count):
        form = LARGE if number % 39 == 0 else SMALL
        digest = digest_of(number)
        data = content(form[0] * form[1] * 4, number)
        entry, other = (Entry(redis, embedding_name(KEY, IDENTITY, one), form) for one in (digest, other_digest))
        store.publish(other_digest, form, [memoryview(content(len(data), 1_000_000))], lambda: True, soon())
        assert store.publish(digest, form, [memoryview(data)], lambda: True, soon()) == "published"
        mutation = MUTATIONS[number % len(MUTATIONS)]
        mutation(entry, other, random)
        staging = Staging()
        (found,) = store.fetch({digest: form[0]}, staging, soon())
        yield mutation.__name__, found.outcome, staging.data.get(digest) == data
        redis.ask("FLUSHALL", "SYNC")


def test_of_1000_changed_swapped_cut_or_foreign_entries_none_is_accepted_and_each_is_counted_S26(
    redis: Redis, record_property: Callable[[str, object], None]
) -> None:
    with closing(redis.store()) as blobs:
        found = list(attempts(redis, sealed(blobs), ENTRIES))
    outcomes = Counter(outcome for _, outcome, _ in found)
    record_property("outcomes", dict(outcomes))
    assert outcomes["hit"] == 0
    assert outcomes.total() == ENTRIES
    assert outcomes.keys() == {"sealed_wrong", "miss"}
    expected = sum(MUTATIONS[number % len(MUTATIONS)] is missing_chunk for number in range(ENTRIES))
    assert outcomes["miss"] == expected, "only what is missing is a miss"


def test_what_was_refused_is_deleted_and_can_be_published_again_S26(redis: Redis) -> None:
    random = Random(1)
    with closing(redis.store()) as blobs:
        store = sealed(blobs)
        for number, mutation in enumerate(MUTATIONS):
            digest, other_digest = digest_of(number), digest_of(0xFFFF)
            data = content(2_048, number)
            entry, other = (Entry(redis, embedding_name(KEY, IDENTITY, one), SMALL) for one in (digest, other_digest))
            store.publish(other_digest, SMALL, [memoryview(content(2_048, 1_000_000))], lambda: True, soon())
            store.publish(digest, SMALL, [memoryview(data)], lambda: True, soon())
            mutation(entry, other, random)
            (found,) = store.fetch({digest: SMALL[0]}, Staging(), soon())
            assert found.outcome != "hit"
            assert redis.ask("EXISTS", entry.manifest) == 0
            assert store.publish(digest, SMALL, [memoryview(data)], lambda: True, soon()) == "published"
            (found,) = store.fetch({digest: SMALL[0]}, staging := Staging(), soon())
            assert (found.outcome, staging.data[digest]) == ("hit", data)
            assert store.is_up, "a poisoned entry is no reason to leave the store alone"


def test_without_seals_they_are_accepted_with_the_wrong_bytes(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is told apart above is told apart by the seals alone."""

    def believe(raw: bytes, _: Key, __: Digest) -> Manifest | None:
        header = Header.unpack(raw[: MANIFEST_BYTES - 64])
        return None if header is None else Manifest(header, raw[-64:-32])

    monkeypatch.setattr(Manifest, "unpack", believe)
    monkeypatch.setattr(Manifest, "holds", lambda *_: True)
    with closing(redis.store()) as blobs:
        found = list(attempts(redis, sealed(blobs), CONTROLS))
    fooled = {mutation for mutation, outcome, is_right in found if outcome == "hit" and not is_right}
    expected = {changed_chunk, chunk_of_another, whole_entry_of_another, chunks_in_another_order, foreign_fleet}
    assert fooled >= {mutation.__name__ for mutation in expected}


def test_keys_in_the_store_say_nothing_about_what_they_are_of(redis: Redis) -> None:
    with closing(redis.store()) as blobs:
        sealed(blobs).publish(digest_of(5), SMALL, [memoryview(content(2_048))], lambda: True, soon())
    for key in redis.all_keys():
        assert digest_of(5).hex().encode() not in key
        assert IDENTITY.hex().encode() not in key
        assert KEY.secret.hex().encode() not in key


OURS = b"what our encoder makes"
PROBE_NAME = probe_name(KEY, IDENTITY)
PROBE_SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "written by somebody": lambda _: b"what another encoder makes",
    "another hash under the same seal": lambda raw: b"x" * len(OURS) + raw[len(OURS) :],
    "another seal": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "without a seal": lambda raw: raw[: len(OURS)],
    "cut": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"x",
    "much longer": lambda raw: raw * 1_000,
    "empty": lambda _: b"",
    "of another encoder": lambda _: seal_probe(seal_key(KEY), probe_name(KEY, b"another"), b"theirs"),
    "of another fleet": lambda _: seal_probe(seal_key(OTHER_KEY), PROBE_NAME, b"theirs"),
}


def probes_after(redis: Redis, spoil: Callable[[bytes], bytes]) -> tuple[bytes, bytes]:
    """What a worker takes for the fleet's probe after it was changed, and what one with another does later."""
    key = probe_key(PROBE_NAME)
    with closing(redis.store()) as blobs:
        assert sealed(blobs).compare_probe(OURS, soon()) == OURS
        raw = redis.ask("GET", key)
        assert isinstance(raw, bytes)
        redis.ask("SET", key, spoil(raw))
        return sealed(blobs).compare_probe(OURS, soon()), sealed(blobs).compare_probe(b"another", soon())


@pytest.mark.parametrize("spoil", PROBE_SPOILS)
def test_a_probe_that_nobody_of_the_fleet_has_written_keeps_no_worker_from_the_store(
    redis: Redis, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without a seal the worker would take it for the fleet's, and leave the store alone for good."""
    assert probes_after(redis, PROBE_SPOILS[spoil]) == (OURS, OURS)
    redis.ask("FLUSHALL", "SYNC")
    monkeypatch.setattr(sealed_module, "seal_probe", lambda _, __, probe: probe)
    monkeypatch.setattr(sealed_module, "open_probe", lambda _, __, raw: raw)
    assert probes_after(redis, lambda _: b"what another encoder makes")[0] != OURS


def test_a_probe_that_is_a_list_is_replaced(redis: Redis) -> None:
    redis.ask("LPUSH", probe_key(PROBE_NAME), "x")
    with closing(redis.store()) as blobs:
        assert sealed(blobs).compare_probe(OURS, soon()) == OURS
        assert sealed(blobs).compare_probe(b"another", soon()) == OURS
