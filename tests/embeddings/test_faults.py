"""A store that fails: every call ends by its deadline, with a typed failure, and the next one works again.

Against a real Redis, with something between that cuts, delays, resets and lies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from semel.embeddings import connection as connection_module
from semel.embeddings.address import StoreAddress
from semel.embeddings.connection import Connection
from semel.embeddings.protocol import BlobStore, StoreDown, StoreError, StoreFull, StoreLate
from semel.embeddings.replies import command
from semel.embeddings.resp import RespStore
from tests.embeddings.certificates import Authority
from tests.embeddings.proxy import (
    Answer,
    Proxy,
    constant,
    cut_after,
    honest,
    replaced,
    reset_after,
    running_proxy,
    silent,
    trickle,
)
from tests.embeddings.redis import Redis, running_redis, soon
from tests.embeddings.stores import content

KEYS = [b"semel:fault:%d" % index for index in range(12)]
SIZE = 300_000
TTL_MS = 3_600_000
DEADLINE_S = 0.5
PATIENCE_S = 10.0
"""What a call may take beyond its deadline on a machine that is busy: much less than if nothing bounded it."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        with closing(running.store()) as store:
            chunks = [[memoryview(content(SIZE, index))] for index in range(len(KEYS))]
            store.put(KEYS, chunks, TTL_MS, soon())
        yield running


@pytest.fixture
def proxy(redis: Redis) -> Iterator[Proxy]:
    with running_proxy(redis.address) as running:
        yield running


@pytest.fixture
def store(proxy: Proxy) -> Iterator[RespStore]:
    with closing(RespStore(proxy.address)) as opened:
        yield opened


def read(store: BlobStore, deadline: float) -> str:
    chunks = [[memoryview(bytearray(SIZE))] for _ in KEYS]
    return store.get_into(KEYS, chunks, lambda _: None, deadline)


CALLS: dict[str, Callable[[BlobStore, float], object]] = {
    "get_many": lambda store, deadline: store.get_many(KEYS, 100, deadline),
    "get_into": read,
    "put": lambda store, deadline: store.put([b"other"], [[memoryview(content(SIZE))]], TTL_MS, deadline),
    "put_new": lambda store, deadline: store.put_new(b"new", b"value", TTL_MS, deadline),
    "delete": lambda store, deadline: store.delete([b"other"], deadline),
    "ping": lambda store, deadline: store.ping(deadline),
}
each_call = pytest.mark.parametrize("call", CALLS)


def failure(store: BlobStore, call: str, seconds: float = DEADLINE_S) -> StoreError:
    """How a call fails, which it must, and in time."""
    began = time.monotonic()
    with pytest.raises(StoreError) as raised:
        CALLS[call](store, began + seconds)
    assert time.monotonic() - began < seconds + PATIENCE_S
    return raised.value


@each_call
def test_silence_is_late_and_afterwards_the_store_works_again(store: RespStore, proxy: Proxy, call: str) -> None:
    store.ping(soon())
    proxy.answer = silent
    assert isinstance(failure(store, call), StoreLate)
    proxy.answer = honest
    assert read(store, soon()) == "whole"


@each_call
@pytest.mark.parametrize("end", [cut_after, reset_after])
def test_a_connection_that_ends_at_once_is_down_and_the_next_one_works(
    store: RespStore, proxy: Proxy, call: str, end: Callable[[int], Answer]
) -> None:
    store.ping(soon())
    proxy.answer = end(0)
    found = failure(store, call, 30)
    assert isinstance(found, StoreDown)
    assert not isinstance(found, StoreLate)
    proxy.answer = honest
    assert read(store, soon()) == "whole"


@pytest.mark.parametrize("end", [cut_after, reset_after])
@pytest.mark.parametrize("nbytes", [1, 5, 9, 10, 4_096, SIZE, SIZE + 10, SIZE + 12, 2 * SIZE, 11 * SIZE + 200])
def test_a_connection_that_ends_after_n_bytes_is_down(
    store: RespStore, proxy: Proxy, nbytes: int, end: Callable[[int], Answer]
) -> None:
    store.ping(soon())
    proxy.answer = end(nbytes)
    assert not isinstance(failure(store, "get_into", 30), StoreLate)
    proxy.answer = honest
    assert read(store, soon()) == "whole"


@each_call
def test_a_byte_each_50_ms_is_late(store: RespStore, proxy: Proxy, call: str) -> None:
    """Each byte comes well before the deadline: a timeout per read would wait for hours."""
    store.ping(soon())
    proxy.answer = trickle
    assert isinstance(failure(store, call, 0.1), StoreLate)


LIES = [
    b"$300001\r\n",
    b"$536870913\r\n",
    b"$99999999999999999999\r\n",
    b"$-2\r\n",
    b"$+5\r\n",
    b"$ 5\r\n",
    b"$05\r\n",
    b"$\r\n",
    b"\r\n",
    b"*1\r\n$1\r\nx\r\n",
    b"*1073741824\r\n" + b"*1\r\n" * 1_000,
    b"%1\r\n",
    b"_\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"+" + b"x" * 5_000,
    b"-" + b"E" * 100_000,
    b":1\n",
    b"\0" * 1_000,
]


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
@pytest.mark.parametrize("call", ["get_many", "put", "put_new", "delete", "ping"])
def test_an_answer_that_is_none_is_down_and_costs_the_connection(redis: Redis, call: str, lie: bytes) -> None:
    with running_proxy(redis.address) as proxy, closing(RespStore(proxy.address)) as store:
        store.ping(soon())
        proxy.answer = constant(lie) if call != "ping" else replaced(b"+PONG\r\n", lie)
        assert isinstance(failure(store, call, 0.3), StoreDown)
        proxy.answer = honest
        store.ping(soon())
        assert proxy.connections >= 2


@pytest.mark.parametrize("lie", [b"$299999\r\n", b"$300001\r\n", b"$1\r\n", b"$536870912\r\n"])
def test_another_length_than_was_expected_is_not_read(store: RespStore, proxy: Proxy, lie: bytes) -> None:
    store.ping(soon())
    proxy.answer = replaced(b"$300000\r\n", lie)
    assert read(store, soon()) == "wrong_size"


def test_a_value_that_is_longer_than_it_says_is_down(store: RespStore, proxy: Proxy) -> None:
    store.ping(soon())
    proxy.answer = replaced(b"\r\n$300000\r\n", b"!\r\n$300000\r\n")
    assert "longer" in str(failure(store, "get_into", 30))


def test_what_comes_without_being_asked_for_costs_the_connection(store: RespStore, proxy: Proxy) -> None:
    store.ping(soon())
    proxy.sockets[0].sendall(b"+OK\r\n")  # would be taken for the answer to the next command
    until = time.monotonic() + 30
    while proxy.connections < 2 and time.monotonic() < until:
        with suppress(StoreDown):
            assert store.get_many([b"none"], 10, soon()) == [None]
        time.sleep(0.01)
    assert proxy.connections == 2


def test_connections_that_the_store_has_closed_are_opened_again_without_a_failure(redis: Redis) -> None:
    with closing(redis.store()) as store:
        store.ping(soon())
        assert redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(0.1)
        store.ping(soon())


def test_a_redis_that_is_not_there_is_down_and_comes_back(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        store = redis.store()
        store.ping(soon())
    with closing(store):
        for call in CALLS:
            found = failure(store, call, 30)
            assert not isinstance(found, StoreLate)
            assert "cannot be reached" in str(found)
        with running_redis(tmp_path, port=redis.address.port):
            store.ping(soon())


def test_a_full_redis_refuses_values_and_can_be_read_from(tmp_path: Path) -> None:
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with running_redis(tmp_path, options=options) as redis, closing(redis.store()) as store:
        store.put([b"small"], [[memoryview(b"value")]], TTL_MS, soon())
        with pytest.raises(StoreFull, match="maxmemory-policy"):
            for _ in range(2):
                keys = [b"%d" % index for index in range(20)]
                store.put(keys, [[memoryview(content(1 << 20))]] * 20, TTL_MS, soon())
        assert store.get_many([b"small"], 10, soon()) == [b"value"]


def test_a_wrong_password_and_none_are_down_and_say_what_to_do(tmp_path: Path) -> None:
    with running_redis(tmp_path, password="right") as redis:
        for password, text in ((None, "wants a password"), ("wrong", "does not know this user and password")):
            with closing(RespStore(redis.address, password=password)) as store, pytest.raises(StoreDown) as raised:
                store.ping(soon())
            assert text in str(raised.value)
            assert "right" not in str(raised.value)
            assert "wrong" not in str(raised.value)


def greet_with_the_servers_words(connection: Connection, _: str | None, password: str | None, deadline: float) -> None:
    """A mutant: what the server says about a login is passed on."""
    login = command(b"AUTH", (password or "").encode())
    connection.exchange([[login]], lambda: connection.replies.simple(b"OK"), window=1, deadline=deadline)


def login_failures(home: Path, password: str) -> Iterator[str]:
    """What is said of a Redis that repeats the arguments of an unknown command, and of one that answers with them."""
    with running_redis(home, options=("--rename-command", "AUTH", "")) as redis:
        with closing(RespStore(redis.address, password=password)) as store:
            yield str(failure(store, "ping", 30))
        lie = replaced(b"-ERR unknown command", b"+" + password.encode() + b"\r\n-ERR")
        with running_proxy(redis.address, lie) as proxy, closing(RespStore(proxy.address, password=password)) as store:
            yield str(failure(store, "ping", 30))
        lie = replaced(b"-ERR unknown command", b"-SECRET")
        with running_proxy(redis.address, lie) as proxy, closing(RespStore(proxy.address, password="SECRET")) as store:
            yield str(failure(store, "ping", 30))


def test_what_a_server_says_about_a_login_is_not_repeated_for_it_may_be_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S26. The control repeats it: a Redis without AUTH answers with the arguments."""
    for text in login_failures(tmp_path, "very secret"):
        assert "secret" not in text.lower()
        assert "login" in text
    monkeypatch.setattr(connection_module, "_greet", greet_with_the_servers_words)
    assert all("secret" in text.lower() for text in login_failures(tmp_path, "very secret"))


def test_a_user_of_an_access_list_is_let_in_and_may_only_do_what_is_listed(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        rules = ("on", ">secret", "~semel:*", "+get", "+set", "+unlink", "+ping")
        redis.ask("ACL", "SETUSER", "worker", *rules)
        address = StoreAddress(host="127.0.0.1", port=redis.address.port, user="worker")
        with closing(RespStore(address, password="secret")) as store:
            assert store.put_new(b"semel:a", b"value", TTL_MS, soon())
            store.delete([b"semel:a"], soon())
            with pytest.raises(StoreDown, match="may not do this"):
                store.put_new(b"foreign", b"value", TTL_MS, soon())


def test_a_certificate_of_another_authority_is_refused_and_so_is_plain_text(tmp_path: Path) -> None:
    authority, other = (Authority.create(tmp_path / name) for name in ("one", "other"))
    with running_redis(tmp_path, authority=authority) as redis:
        with closing(RespStore(redis.address, tls=other.client_context())) as store:
            assert "certificate is not valid" in str(failure(store, "ping", 30))
        with closing(RespStore(StoreAddress(host="127.0.0.1", port=redis.address.port))) as plain:
            assert isinstance(failure(plain, "ping", 1), StoreDown)


def test_a_plain_server_where_tls_is_expected_is_down(redis: Redis, tmp_path: Path) -> None:
    address = StoreAddress(host="127.0.0.1", port=redis.address.port, is_encrypted=True)
    with closing(RespStore(address, tls=Authority.create(tmp_path).client_context())) as store:
        assert isinstance(failure(store, "ping", 1), StoreDown)


def test_a_server_in_cluster_mode_is_refused_with_a_reason(store: RespStore, proxy: Proxy) -> None:
    store.ping(soon())
    proxy.answer = constant(b"-MOVED 3999 127.0.0.1:6381\r\n")
    assert "cluster mode" in str(failure(store, "put_new", 30))


@pytest.mark.parametrize("reply", [b"-LOADING Redis is loading the dataset in memory\r\n", b"-READONLY a replica\r\n"])
def test_an_error_reply_is_down_with_its_text(store: RespStore, proxy: Proxy, reply: bytes) -> None:
    store.ping(soon())
    proxy.answer = constant(reply)
    assert reply[1:-2].decode() in str(failure(store, "put_new", 30))
