"""One context for all links of a frontend: its threads do not grow with its workers."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import zmq

from semel.cache import NoCache
from semel.compose.frontend import _Parts
from semel.core import Key
from semel.errors import ConfigError
from semel.key_files import ProcessKeys
from semel.settings.frontend import DiscoverySettings, FrontendSettings
from semel.wire.zmq import Backoff, FrontendLink, link_context

KEY = Key(b"k" * 32)
LINKS = 100
MANY = 400
"""More than ZeroMQ's own number of sockets has room for."""

NEVER = Backoff(first_s=60.0, max_s=60.0)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def opened(stack: AsyncExitStack, folder: Path, context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
    """One more link, to nobody."""
    address = f"ipc://{folder}/nobody.sock"
    await stack.enter_async_context(FrontendLink(address, key=KEY, frontend_id="f", backoff=NEVER, context=context))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for sockets, in a process that may open enough of them."""
    tmp_path.chmod(0o700)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max(soft, hard) < 4_096:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4_096), hard))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_many_links_take_one_io_thread_and_three_descriptors_each(folder: Path) -> None:
    """Control: links with contexts of their own take two threads and eight descriptors each."""
    before = threads(), descriptors()
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(link_context())
        for _ in range(LINKS):
            await opened(stack, folder, context)
        assert context.get(zmq.MAX_SOCKETS) >= 3 * MANY
        assert threads() - before[0] <= 2
        assert descriptors() - before[1] <= 3 * LINKS + 16
    async with AsyncExitStack() as stack:
        before = threads(), descriptors()
        for _ in range(3):
            await opened(stack, folder, None)
        assert threads() - before[0] == 6
        assert descriptors() - before[1] >= 18


async def test_control_zmq_s_own_number_of_sockets_is_too_small_for_as_many(folder: Path) -> None:
    with zmq.Context() as context:
        async with AsyncExitStack() as stack:
            with pytest.raises(ConfigError, match="Too many open files"):
                for _ in range(MANY):
                    await opened(stack, folder, context)


async def test_a_frontend_s_links_share_a_context(folder: Path) -> None:
    workers = tuple(f"ipc://{folder}/{number}.sock" for number in range(12))
    keys = ProcessKeys.of_fleet_key(KEY, "frontend")
    parts = _Parts(FrontendSettings("model", discovery=DiscoverySettings(workers)), keys, NoCache())
    before = threads()
    async with AsyncExitStack() as stack:
        fleet, _ = await parts.link(stack)
        assert len(fleet.workers) == 12
        assert threads() - before <= 2 + 1  # and what looks for their addresses
