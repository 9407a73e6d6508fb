"""Lending between two ends of one connection, both in this process, on the event loops we run on."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from semel.cache import Borrower, Lease, Lender, SharedCache, borrowed_feature, tensor_heads
from semel.cache.shared.channel import encode_hello
from semel.errors import ConfigError, ProtocolError
from tests.cache.examples import assert_equal, digest_of, feature_of
from tests.waiting import until

ITEM = 640


@pytest.fixture
def cache() -> SharedCache:
    return SharedCache.create(ITEM * 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def lend(lender: Lender, cache: SharedCache, number: int, *sizes: int) -> Lease:
    cache.put(digest_of(number), feature_of(number, *sizes))
    lease = lender.lend(digest_of(number))
    assert lease is not None
    return lease


async def there_and_back(path: Path) -> None:
    cache = SharedCache.create(ITEM * 8)
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        leases = [lend(lender, cache, number, 500, 30) for number in range(5)]
        heads, layout = tensor_heads(feature_of(0, 500, 30)), feature_of(0, 500, 30).layout
        feature = borrowed_feature(borrowers.borrow(leases[0]), "image", heads, layout)
        assert_equal(feature, 0, (500, 30))
        views = [borrowers.borrow(lease) for lease in leases[1:]]
        assert (lender.leases, cache.leases, len(borrowers)) == (5, 5, 1)
        del feature, views
        await until(lambda: lender.leases == 0)
        assert cache.leases == 0
        lender.close()
        await lender.wait_closed()
        await until(lambda: len(borrowers) == 0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_what_is_lent_is_read_where_it_lies_and_comes_back_D4(run: Callable[..., None], path: Path) -> None:
    run(there_and_back(path))
    assert not path.exists()


async def test_views_may_be_let_go_of_in_any_thread_D4(path: Path) -> None:
    cache = SharedCache.create(64 * 1_000)
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        views = [borrowers.borrow(lend(lender, cache, number, 64)) for number in range(1_000)]
        threads = [threading.Thread(target=lambda: [views.pop() for _ in range(250)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        await until(lambda: lender.leases == 0)
        for thread in threads:
            thread.join(10)
        lender.close()


async def test_returns_that_find_the_socket_full_are_sent_later_D4(cache: SharedCache, path: Path) -> None:
    cache.put(digest_of(1), feature_of(1, 64))
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        leases = [lender.lend(digest_of(1)) for _ in range(60_000)]
        loop = asyncio.get_running_loop()
        sock = lender._channel._sock
        loop.remove_reader(sock)
        for lease in leases:
            assert lease is not None
            borrowers.borrow(lease)
            if not lease.id % 50:
                await asyncio.sleep(0)  # so that returns go in many small packets
        (connection,) = borrowers._lenders.values()
        await until(lambda: connection.idle)
        assert connection._channel._pending, "the socket was never full"
        assert lender.leases == 60_000
        loop.add_reader(sock, lender._channel.read)
        await until(lambda: lender.leases == 0)
        lender.close()


async def test_closing_the_lenders_end_leaves_leases_out_until_the_views_are_gone_D4(
    cache: SharedCache, path: Path
) -> None:
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        view: memoryview | None = borrowers.borrow(lend(lender, cache, 1, ITEM))
        lender.close()
        assert lender.closed
        assert lender.lend(digest_of(1)) is None
        await until(lambda: len(borrowers) == 0)
        again = await Lender.connect(path, cache)
        assert cache.leases == 1
        for number in range(2, 40):
            cache.put(digest_of(number), feature_of(number, ITEM))
        assert view == feature_of(1, ITEM).tensors["field0"].data
        view = None
        async with asyncio.timeout(10):
            await lender.wait_closed()
        assert cache.leases == 0
        again.close()


async def test_the_borrowers_end_stays_open_for_views_that_outlive_it_D4(cache: SharedCache, path: Path) -> None:
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        idle = await Lender.connect(path, other := SharedCache.create(64))
        view: memoryview | None = borrowers.borrow(lend(lender, cache, 1, ITEM))
    async with asyncio.timeout(10):
        await idle.wait_closed()
    assert other.leases == 0
    assert (cache.leases, lender.closed) == (1, False)
    assert view == feature_of(1, ITEM).tensors["field0"].data
    view = None
    async with asyncio.timeout(10):
        await lender.wait_closed()
    assert (cache.leases, lender.closed) == (0, True)


def test_views_that_outlive_the_event_loop_do_no_harm_D4(cache: SharedCache, path: Path) -> None:
    async def borrow() -> tuple[memoryview, memoryview]:
        borrowers = Borrower(path)
        async with borrowers:
            lender = await Lender.connect(path, cache)
            return borrowers.borrow(lend(lender, cache, 1, 10)), borrowers.borrow(lend(lender, cache, 2, 10))

    gc.collect()  # what earlier tests left
    before = open_files()
    views: tuple[memoryview, ...] = asyncio.run(borrow())
    assert views[0][:10] == feature_of(1, 10).tensors["field0"].data
    views = ()
    gc.collect()
    assert open_files() == before


async def test_a_lease_whose_message_got_lost_is_back_after_the_connection_is_closed_D3(
    cache: SharedCache, path: Path
) -> None:
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        lost = lend(lender, cache, 1, ITEM)
        lender.close()
        async with asyncio.timeout(10):
            await lender.wait_closed()
        assert (lender.leases, cache.leases) == (0, 0)
        with pytest.raises(ProtocolError):
            borrowers.borrow(lost)


async def test_ids_that_a_frontend_tells_return_nothing_and_forbid_nothing_D4(cache: SharedCache, path: Path) -> None:
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        lease = lend(lender, cache, 1, ITEM)
        lender._channel.send([lease.id, 12_345])
        (connection,) = borrowers._lenders.values()
        connection.catch_up()
        assert lender.leases == 1
        assert borrowers.borrow(lease)[:ITEM] == feature_of(1, ITEM).tensors["field0"].data
        await until(lambda: lender.leases == 0)
        lender.close()


async def test_a_lease_that_is_not_good_is_refused_D4(cache: SharedCache, path: Path) -> None:
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        lease = lend(lender, cache, 1, ITEM)
        view = borrowers.borrow(lease)
        for bad in (
            lease,
            Lease(99, bytes(16), 0, 64),
            Lease(99, lease.segment, ITEM * 8, 64),
            Lease(99, lease.segment, -64, 64),
            Lease(99, lease.segment, 0, 1 << 40),
            Lease(99, lease.segment, 0, 0),
        ):
            with pytest.raises(ProtocolError):
                borrowers.borrow(bad)
        del view
        await until(lambda: lender.leases == 0)
        lender.close()


async def test_nobody_there_is_an_os_error_and_a_silent_one_a_timeout_D4(cache: SharedCache, path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await Lender.connect(path, cache)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(path))
        silent.listen(1)
        with pytest.raises(TimeoutError):
            await Lender.connect(path, cache, timeout_s=0.05)


async def test_a_segment_is_lent_over_one_connection_at_a_time_D4(cache: SharedCache, path: Path) -> None:
    async with Borrower(path) as borrowers:
        first = await Lender.connect(path, cache)
        with pytest.raises((ProtocolError, ConnectionError)):
            await Lender.connect(path, cache)
        first.close()
        second = await Lender.connect(path, cache)
        assert len(borrowers) == 1
        second.close()


@pytest.mark.parametrize("wrong", ["no descriptor", "two descriptors", "pipe", "size", "magic", "long"])
async def test_who_introduces_no_segment_is_refused_and_leaves_nothing_open_D4(
    cache: SharedCache, path: Path, wrong: str
) -> None:
    hello = encode_hello(cache.segment.id, cache.segment.size + (wrong == "size"))
    hello = {"magic": b"x" + hello[1:], "long": hello + b"x"}.get(wrong, hello)
    read_end, write_end = os.pipe()
    fds = {"no descriptor": [], "two descriptors": [cache.segment.fileno()] * 2, "pipe": [read_end]}.get(
        wrong, [cache.segment.fileno()]
    )
    async with Borrower(path) as borrowers:
        before = len(open_files())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.setblocking(False)
            peer.connect(str(path))
            socket.send_fds(peer, [hello], fds)
            async with asyncio.timeout(10):
                assert await asyncio.get_running_loop().sock_recv(peer, 10) == b""
        assert len(open_files()) == before
        assert len(borrowers) == 0
    os.close(read_end)
    os.close(write_end)


async def test_packets_that_are_no_leases_return_nothing_D4(cache: SharedCache, path: Path) -> None:
    async with Borrower(path) as borrowers:
        lender = await Lender.connect(path, cache)
        lease = lend(lender, cache, 1, ITEM)
        (connection,) = borrowers._lenders.values()
        connection._channel._sock.send(b"nonsense?")
        connection._channel.send([12_345, lease.id])
        await until(lambda: lender.leases == 0)
        assert not lender.closed
        lender.close()


async def listen(path: Path) -> int:
    async with Borrower(path):
        return stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116


async def test_a_live_socket_is_not_taken_over_D4(path: Path) -> None:
    async with Borrower(path) as borrowers:
        with pytest.raises(ConfigError):
            await listen(path)
        lender = await Lender.connect(path, SharedCache.create(64))
        assert len(borrowers) == 1
        lender.close()


def test_the_socket_is_ours_alone_and_replaces_a_stale_one_but_no_other_file_D4(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    assert asyncio.run(listen(path)) == 0o600
    assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(OSError, match="in use"):
        asyncio.run(listen(path))
    assert path.read_text() == "not a socket"
