"""Discovery of workers: a fixed list, a file that is watched, names in DNS, and other sources; all of them together.

A source that cannot be read keeps what it last said: a broken file or a resolver that fails takes no worker away. Links
are none of this module's business (`members`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, Self

from semel.errors import ConfigError

__all__ = ["AddressSource", "DnsSource", "FileSource", "WorkerDirectory", "addresses_in", "check_address", "sources_of"]

_TICK_S: Final = 1
_RESOLVE_S: Final = 5.0
_MAX_FILE_BYTES: Final = 1024**2
_MAX_PORT: Final = 65_535

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""The IP addresses of a name; an `OSError` if there are none."""


class AddressSource(Protocol):
    """Something that names workers."""

    @property
    def every_s(self) -> int:
        """The seconds after which it is asked again."""

    async def read(self) -> Sequence[str]:
        """Return the addresses that it names now; a `ConfigError` or `OSError` if it does not say."""

    async def watch(self) -> None:
        """Keep what it reads up to date, until cancelled; returns at once if every reading is a new one."""


def check_address(address: str) -> str:
    """Return an address that workers can listen at, or raise a `ConfigError`."""
    scheme, _, place = address.partition("://")
    if scheme == "ipc" and place.startswith("/"):
        return address
    host, _, port = place.rpartition(":")
    if scheme == "tcp" and host and _is_port(port):
        return address
    raise ConfigError(f"a worker listens at ipc:///DIRECTORY/NAME or tcp://HOST:PORT, not at {address!r}")


def addresses_in(text: str) -> tuple[str, ...]:
    """Return the addresses in a file: one in a line; what follows a # is not read."""
    found: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if address := line.partition("#")[0].strip():
            try:
                found[check_address(address)] = None
            except ConfigError as error:
                raise ConfigError(f"line {number}: {error}") from None
    if not found:
        raise ConfigError("it names no worker")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file of addresses. Replace it in one step (`mv`): one that is half written may name half the fleet."""

    path: Path
    every_s: int = 1

    async def read(self) -> Sequence[str]:
        """Return the addresses in the file as it is now."""
        try:
            return addresses_in(await asyncio.to_thread(self._text))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--worker-file {self.path} cannot be used: {why}") from error

    async def watch(self) -> None:
        """Return at once: every reading is a new one."""

    def _text(self) -> str:
        with self.path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"it has more than {_MAX_FILE_BYTES:,} bytes")
        return content.decode()


async def _resolve(name: str, port: int) -> Iterable[str]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_RESOLVE_S):
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return (str(address[0]) for *_, address in found)


@dataclass(frozen=True, slots=True)
class DnsSource:
    """A worker at every address that a name has, A and AAAA, at one port."""

    name: str
    port: int
    every_s: int = 10
    resolve: Resolve = field(default=_resolve, repr=False)

    @classmethod
    def parse(cls, text: str, every_s: int = 10) -> Self:
        """Parse NAME:PORT."""
        name, _, port = text.rpartition(":")
        if not name or not _is_port(port):
            raise ConfigError(f"--worker-dns takes NAME:PORT, not {text!r}")
        return cls(name, int(port), every_s)

    async def read(self) -> Sequence[str]:
        """Return the addresses that the name has now."""
        try:
            found = set(await self.resolve(self.name, self.port))
        except UnicodeError as error:
            raise ConfigError(f"--worker-dns {self.name}:{self.port} is no name that DNS knows: {error}") from error
        except OSError as error:  # a timeout is one as well
            raise OSError(f"--worker-dns {self.name}:{self.port} cannot be resolved: {error}") from error
        return sorted(f"tcp://[{one}]:{self.port}" if ":" in one else f"tcp://{one}:{self.port}" for one in found)

    async def watch(self) -> None:
        """Return at once: every reading is a new one."""


def sources_of(file: Path | None, names: Iterable[str], every_s: int) -> tuple[AddressSource, ...]:
    """Return the sources that the flags name: a file, and names in DNS."""
    files = () if file is None else (FileSource(file),)
    return (*files, *(DnsSource.parse(name, every_s) for name in names))


class WorkerDirectory:
    """The workers that all sources name together."""

    def __init__(
        self,
        fixed: Iterable[str],
        sources: Sequence[AddressSource] = (),
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fixed = tuple(map(check_address, fixed))
        self._sources = sources
        self._sleep = sleep
        self._last: dict[int, tuple[str, ...]] = {}
        self._faults: dict[int, str] = {}

    async def open(self) -> tuple[str, ...]:
        """Return the first list. A file must be readable by now; names may appear later."""
        if not self._fixed and not self._sources:
            raise ConfigError(
                "no worker is named: give --worker, --worker-file, --worker-dns or --worker-endpoint-slices"
            )
        for number, source in enumerate(self._sources):
            try:
                self._last[number] = tuple(await source.read())
            except OSError as error:
                self._complain(number, error)
        return self._all()

    async def watch(self) -> None:
        """Let sources that watch for changes do so, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(source.watch())

    async def lists(self) -> AsyncIterator[tuple[str, ...]]:
        """Yield each list that follows the first one and differs from the one before; none without sources."""
        current = self._all()
        ticks = 0
        while self._sources:
            await self._sleep(_TICK_S)
            ticks += 1
            for number, source in enumerate(self._sources):
                if ticks % source.every_s == 0:
                    await self._ask(number, source)
            if (now := self._all()) != current:
                current = now
                yield now

    async def _ask(self, number: int, source: AddressSource) -> None:
        try:
            self._last[number] = tuple(await source.read())
            self._faults.pop(number, None)
        except (ConfigError, OSError) as error:
            self._complain(number, error)

    def _complain(self, number: int, error: Exception) -> None:
        """Say once what is wrong, not every second."""
        if self._faults.get(number) != str(error):
            self._faults[number] = str(error)
            logger.error("%s; the workers that it named before are kept", error)

    def _all(self) -> tuple[str, ...]:
        found = dict.fromkeys(self._fixed)
        for number in range(len(self._sources)):
            found |= dict.fromkeys(self._last.get(number, ()))
        return tuple(found)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) <= _MAX_PORT
