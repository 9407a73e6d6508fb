"""What every `BlobStore` does: in memory, and over a real Redis by TCP, a Unix socket, with a password and with TLS."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from semel.embeddings.protocol import BlobStore, Chunk, StoreDown, StoreLate
from tests.embeddings.redis import soon
from tests.embeddings.stores import KINDS, content, open_store, pieces

MIB = 1 << 20
TTL_MS = 3_600_000
Opened = tuple[BlobStore, Callable[[], BlobStore]]


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with open_store(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def store(opened: Opened) -> BlobStore:
    return opened[0]


@pytest.fixture
def another(opened: Opened) -> Callable[[], BlobStore]:
    return opened[1]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> bytes:
    """A prefix of keys that no other test uses."""
    return str(request.node.name).encode()


def read(
    store: BlobStore, keys: Sequence[bytes], sizes: Sequence[int], cuts: Sequence[int] = ()
) -> tuple[str, list[bytes]]:
    """What `get_into` returns, and what was received."""
    chunks = [pieces(bytearray(size), cuts) for size in sizes]
    received: list[bytes] = []

    def receive(chunk: Chunk) -> None:
        received.append(b"".join(chunk))

    return store.get_into(keys, chunks, receive, soon()), received


def test_chunks_come_back_in_order_whatever_buffers_they_lie_in(store: BlobStore, name: bytes) -> None:
    sizes = [MIB] * 19 + [12_345, 1]
    data = [content(size, seed) for seed, size in enumerate(sizes)]
    keys = [name + b"%d" % index for index in range(len(sizes))]
    store.put(
        keys, [pieces(one, [size // 3, size // 5]) for one, size in zip(data, sizes, strict=True)], TTL_MS, soon()
    )
    whole, received = read(store, keys, sizes, cuts=[0])
    assert whole == "whole"
    assert received == data
    assert [bytes(one) for one in data] == store.get_many(keys, MIB, soon())


def test_an_empty_buffer_and_an_empty_value_are_no_error(store: BlobStore, name: bytes) -> None:
    store.put([name], [[memoryview(b"")]], TTL_MS, soon())
    assert store.get_many([name, name + b"!"], 10, soon()) == [b"", None]
    assert read(store, [name], [0]) == ("whole", [b""])
    assert store.get_many([], 10, soon()) == []
    store.delete([], soon())


@pytest.mark.parametrize("lost", [0, 3, 18])
def test_a_chunk_that_is_missing_is_said_to_be_and_the_connection_goes_on(
    store: BlobStore, name: bytes, lost: int
) -> None:
    keys = [name + b"%d" % index for index in range(19)]
    store.put(keys, [[memoryview(content(1_000, index))] for index in range(19)], TTL_MS, soon())
    store.delete([keys[lost]], soon())
    missing, received = read(store, keys, [1_000] * 19)
    assert missing == "missing"
    assert len(received) == lost
    assert read(store, keys[:lost], [1_000] * lost)[0] == "whole"


@pytest.mark.parametrize("size", [999, 1_001, 3 * MIB])
def test_a_chunk_of_another_size_is_said_to_be_and_nothing_else_suffers(
    store: BlobStore, name: bytes, size: int
) -> None:
    keys = [name + b"a", name + b"b"]
    store.put(keys, [[memoryview(content(1_000))], [memoryview(content(size))]], TTL_MS, soon())
    assert read(store, keys, [1_000, 1_000]) == ("wrong_size", [bytes(content(1_000))])
    assert read(store, keys, [1_000, size]) == ("whole", [bytes(content(1_000)), bytes(content(size))])


@pytest.mark.parametrize("size", [11, 5_000, MIB, 3 * MIB])
def test_of_a_long_value_a_byte_more_is_returned_than_was_asked_for(store: BlobStore, name: bytes, size: int) -> None:
    keys = [name + b"a", name + b"b", name + b"c"]
    store.put(keys, [[memoryview(content(one))] for one in (10, size, 10)], TTL_MS, soon())
    first, second, _ = store.get_many(keys, 10, soon())  # after one of over 1 MiB the rest may be missing
    assert (first, second) == (bytes(content(10)), bytes(content(size)[:11]))
    assert store.get_many(keys[2:], 10, soon()) == [bytes(content(10))]


def test_of_two_that_store_a_new_value_the_first_one_does(
    store: BlobStore, another: Callable[[], BlobStore], name: bytes
) -> None:
    assert store.put_new(name, b"first", TTL_MS, soon())
    assert not another().put_new(name, b"second", TTL_MS, soon())
    assert another().get_many([name], 100, soon()) == [b"first"]
    store.delete([name], soon())
    assert another().put_new(name, b"second", None, soon())


def test_of_many_that_store_a_new_value_at_once_one_does(another: Callable[[], BlobStore], name: bytes) -> None:
    stores = [another() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        puts = [threads.submit(one.put_new, name, b"%d" % index, TTL_MS, soon()) for index, one in enumerate(stores)]
        outcomes = [put.result(60) for put in puts]
    assert sum(outcomes) == 1
    assert stores[0].get_many([name], 10, soon()) == [b"%d" % outcomes.index(True)]


def test_a_value_expires(store: BlobStore, name: bytes) -> None:
    store.put([name + b"chunk"], [[memoryview(b"chunk")]], 50, soon())
    assert store.put_new(name, b"value", 50, soon())
    until = time.monotonic() + 30
    while store.get_many([name, name + b"chunk"], 10, soon()) != [None, None]:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_is_deleted_is_gone_and_what_is_not_there_is_no_error(store: BlobStore, name: bytes) -> None:
    keys = [name + b"%d" % index for index in range(3)]
    store.put(keys, [[memoryview(b"x")]] * 3, TTL_MS, soon())
    store.delete([*keys[:2], name + b"none"], soon())
    assert store.get_many(keys, 10, soon()) == [None, None, b"x"]


def test_a_deadline_that_has_passed_is_a_store_that_is_late(store: BlobStore, name: bytes) -> None:
    store.ping(soon())
    for call in (
        lambda: store.ping(soon(-1)),
        lambda: store.get_many([name], 10, soon(-1)),
        lambda: store.put([name], [[memoryview(b"x")]], TTL_MS, soon(-1)),
        lambda: read_by(store, name, soon(-1)),
    ):
        with pytest.raises(StoreLate):
            call()
    store.ping(soon())


def read_by(store: BlobStore, key: bytes, deadline: float) -> None:
    store.get_into([key], [[memoryview(bytearray(1))]], lambda _: None, deadline)


def test_many_threads_use_one_store(store: BlobStore, name: bytes) -> None:
    def work(number: int) -> None:
        data = content(700_000, number)
        key = name + b"%d" % number
        for _ in range(3):
            store.put([key], [[memoryview(data)]], TTL_MS, soon())
            assert read(store, [key], [len(data)]) == ("whole", [bytes(data)])

    with ThreadPoolExecutor(10) as threads:
        assert list(threads.map(work, range(10), timeout=120)) == [None] * 10


def test_what_the_receiver_raises_reaches_the_caller_and_the_store_goes_on(store: BlobStore, name: bytes) -> None:
    store.put([name], [[memoryview(b"x")]], TTL_MS, soon())

    def fail(_: Chunk) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.get_into([name], [[memoryview(bytearray(1))]], fail, soon())
    assert store.get_many([name], 10, soon()) == [b"x"]


def test_a_closed_store_is_down(tmp_path_factory: pytest.TempPathFactory, opened: Opened) -> None:
    with open_store("memory", tmp_path_factory.mktemp("closed")) as (memory, _):
        stores = [memory, *([opened[1]()] if opened[1]() is not opened[0] else [])]
        for store in stores:
            store.ping(soon())
            store.close()
            with pytest.raises(StoreDown):
                store.ping(soon())
