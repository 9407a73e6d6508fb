"""Objects on a disk or in a bucket, through obstore: whole objects by name, with a deadline on every call.

obstore works in threads of its own, and nothing stops a thread. An operation that took too long, or whose client has
gone, is given up, but what it holds stays on its tenant's account and is counted until it has really ended (threats
S18). Each tenant has bounds: of the operations that it has at once (S30), of the bytes that they hold, and of what was
given up. Over the first two it waits, over the last it is refused. All tenants together have a bound of operations,
since each takes a connection or a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from semel.errors import ConfigError, MediaStoreUnavailable
from semel.fairness.limits import KeyedLimit
from semel.store.upload import FRONTEND, Payer
from semel.telemetry.logs import SampledLog

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["BucketObjects", "DiskFull", "OnEnd", "open_objects"]

_MAX_ABANDONED: Final = 64
_MAX_BYTES: Final = 256 * 1024 * 1024
_MAX_TENANT_OPERATIONS: Final = 16
_MAX_OPERATIONS: Final = 64
_PAGE: Final = 250
_LEFTOVER_S: Final = 3_600.0
_UNBOUNDED: Final = 1 << 62
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_SPACE_TEXT: Final = re.compile(rf"\(os error ({'|'.join(map(str, _NO_SPACE))})\)")
"""obstore has no error of its own for a full disk: its text has the system's number."""

_SCHEMES: Final = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

OnEnd = Callable[[bool], None]
_End = Callable[[], None]


class DiskFull(Exception):
    """An object was not written, since the disk has no space for it, or its user no quota."""


class BucketObjects:
    """Objects by name in a store of obstore's; `folder` is where, if that is a disk.

    Every call raises `MediaStoreUnavailable` if the store cannot do it in time. The `payer` is whose request it is for,
    not whose object it is; without one it is the frontend's own work.
    """

    def __init__(self, store: ObjectStore, timeout_s: float, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder
        self._timeout_s = timeout_s
        self._operations: KeyedLimit[str] = KeyedLimit(_MAX_TENANT_OPERATIONS)
        self._all_operations = asyncio.Semaphore(_MAX_OPERATIONS)
        self._bytes: KeyedLimit[str] = KeyedLimit(_MAX_BYTES)
        """Held by the operations of each owner, of those too that were given up."""
        self._abandoned: dict[str, dict[asyncio.Future[Any], int]] = {}
        """By owner: what was given up and has not ended yet."""
        self._errors = 0
        self._failures = SampledLog(logger, logging.WARNING)

    @property
    def errors(self) -> int:
        """Operations that failed or took too long."""
        return self._errors

    def __repr__(self) -> str:
        return f"BucketObjects({self._store!r})"

    async def put(
        self, path: str, data: bytes | bytearray, on_end: OnEnd = lambda _: None, *, payer: Payer = FRONTEND
    ) -> None:
        """Write an object, at once or not at all. Raises `DiskFull` if there is no space.

        `on_end` is called once with whether it is there: when the writing has ended, also if nobody waits for it.
        """
        is_written = False

        async def write() -> None:
            nonlocal is_written
            try:
                # In one piece: what is written in parts and never ended would stay in a bucket, unseen.
                await self._store.put_async(path, data, use_multipart=False)
                is_written = True
            except Exception as error:
                if self._folder is not None:
                    await asyncio.to_thread(_remove_empty_folders, self._folder / path)
                if _is_disk_full(error):
                    raise DiskFull(str(error).partition("\n")[0]) from None
                raise
            finally:
                on_end(is_written)

        try:
            end = await self._admit(payer, len(data))
        except BaseException:
            on_end(is_written)
            raise
        await self._run(write(), end, payer.owner, len(data))

    async def create(self, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        """Write an object unless there is one of this name. Returns whether it was written."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        async def write() -> bool:
            try:
                await self._store.put_async(path, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        end = await self._admit(payer, len(data))
        return await self._run(write(), end, payer.owner, len(data))

    async def get(self, path: str, nbytes: int, *, start: int = 0, payer: Payer = FRONTEND) -> memoryview | None:
        """Read so many bytes of an object from `start` on, if it is there."""

        async def read() -> memoryview:
            if not nbytes:  # a range has bytes
                await self._store.head_async(path)
                return memoryview(b"")
            return memoryview(await self._store.get_range_async(path, start=start, length=nbytes))

        end = await self._admit(payer, nbytes)
        try:
            return await self._run(read(), end, payer.owner, nbytes)
        except FileNotFoundError:
            return None

    async def delete(self, paths: Iterable[str], *, payer: Payer = FRONTEND) -> None:
        """Delete objects one by one: a store may end a common deletion at the first that is not there."""
        for path in paths:
            end = await self._admit(payer)
            try:
                await self._run(self._store.delete_async(path), end, payer.owner)
            except FileNotFoundError:
                continue

    async def list(self, prefix: str, *, payer: Payer = FRONTEND) -> AsyncIterator[Sequence[tuple[str, int]]]:
        """Yield the names and sizes of all objects in a folder and the folders in it, some at a time."""
        pages = aiter(self._store.list(prefix, chunk_size=_PAGE))
        while True:
            end = await self._admit(payer)
            if (page := await self._run(anext(pages, None), end, payer.owner)) is None:
                return
            yield [(one["path"], one["size"]) for one in page]

    async def free_bytes(self) -> int:
        """Return the bytes that can still be written; a bucket has no limit of its own."""
        if self._folder is None:
            return _UNBOUNDED
        end = await self._admit(FRONTEND)
        disk = await self._run(asyncio.to_thread(os.statvfs, self._folder), end, FRONTEND.owner)
        return disk.f_bavail * disk.f_frsize

    async def _admit(self, payer: Payer, nbytes: int = 0) -> _End:
        """Let an operation begin that holds so much. The caller must run it, or call what is returned."""
        self._check_abandoned(payer.owner, nbytes)
        with contextlib.ExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._bytes.take(payer.owner, nbytes)
                    stack.callback(self._bytes.release, payer.owner, nbytes)
                    await self._operations.take(payer.owner, 1)
                    stack.callback(self._operations.release, payer.owner, 1)
                    await self._all_operations.acquire()
                    stack.callback(self._all_operations.release)
            except TimeoutError:
                raise MediaStoreUnavailable(
                    "the media store took too long to store and read other files of this tenant "
                    f"({self._operations[payer.owner]} operations, {self._bytes[payer.owner]:,} bytes); the limit is "
                    f"{_MAX_TENANT_OPERATIONS} operations and {_MAX_BYTES:,} bytes at once: try again in a moment"
                ) from None
            if nbytes:
                stack.callback(payer.pin(nbytes))
            return stack.pop_all().close

    def _check_abandoned(self, owner: str, nbytes: int) -> None:
        """Refuse to hold so much more in addition to what was given up for the same owner."""
        if not (abandoned := self._abandoned.get(owner)):
            return
        abandoned_bytes = sum(abandoned.values())
        if len(abandoned) >= _MAX_ABANDONED or (nbytes and abandoned_bytes and abandoned_bytes + nbytes > _MAX_BYTES):
            raise MediaStoreUnavailable(
                "the media store still works for earlier requests of this tenant that took too long or whose clients "
                f"have gone (operations: {len(abandoned):,}, bytes: {abandoned_bytes:,}); the limit is "
                f"{_MAX_ABANDONED} operations and {_MAX_BYTES:,} bytes: try again in a moment"
            )

    async def _run(self, operation: Coroutine[Any, Any, _T], end: _End, owner: str, nbytes: int = 0) -> _T:
        working = asyncio.ensure_future(operation)
        working.add_done_callback(lambda _: end())
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(working)
        except FileNotFoundError:
            raise
        except DiskFull as error:
            self._errors += 1
            self._failures.log("the media store failed: %s", error)
            raise
        except TimeoutError:
            self._errors += 1
            self._failures.log("the media store took longer than %g s (--media-store-timeout-s)", self._timeout_s)
            raise MediaStoreUnavailable("the media store took too long; try again in a moment") from None
        except Exception as error:  # noqa: BLE001 - obstore raises errors of its own, of the system and of Python
            self._errors += 1
            self._failures.log("the media store failed: %s", str(error).partition("\n")[0])
            raise MediaStoreUnavailable("the media store failed; its frontend's log says why") from None
        finally:
            if not working.done():
                self._abandoned.setdefault(owner, {})[working] = nbytes
                working.add_done_callback(partial(self._forget, owner))

    def _forget(self, owner: str, working: asyncio.Future[Any]) -> None:
        if (abandoned := self._abandoned.get(owner)) is not None:
            abandoned.pop(working, None)
            if not abandoned:
                del self._abandoned[owner]
        if not working.cancelled():
            working.exception()  # nobody waits for it


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_SPACE
    return _NO_SPACE_TEXT.search(str(error)) is not None


def _remove_empty_folders(path: Path) -> None:
    """Remove the folders that were made for an object, which take space too, if it is not there and nothing else is."""
    with contextlib.suppress(OSError):
        path.parent.rmdir()
        path.parent.parent.rmdir()


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing: obstore writes to NAME#NUMBER, and renames it when it is complete.

    Others may be writing to the same folder, so only what is an hour old goes.
    """
    since_s = time.time() - _LEFTOVER_S
    for path in folder.rglob("*#*"):
        if path.name.rpartition("#")[2].isdecimal() and path.is_file() and path.stat().st_mtime < since_s:
            path.unlink(missing_ok=True)


def open_objects(location: str, timeout_s: float) -> BucketObjects:
    """Open the objects in a folder, which is created, or in a bucket. Errors name the flag."""
    from obstore.store import LocalStore, from_url

    scheme, colon, _ = location.partition("://")
    if colon and scheme not in _SCHEMES:
        raise ConfigError(f"--media-store {location}: must be a folder, or a URL with s3://, gs:// or az://")
    try:
        if not colon:
            folder = Path(location).absolute()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_leftovers(folder)
            return BucketObjects(LocalStore(folder, automatic_cleanup=True), timeout_s, folder)
        timeout = timedelta(seconds=timeout_s)
        store = from_url(
            location,
            # Plain HTTP only if the operator's endpoint is: a bucket's own address is always https.
            client_options={
                "timeout": timeout,
                "connect_timeout": timeout,
                "allow_http": True,
                "pool_max_idle_per_host": str(_MAX_TENANT_OPERATIONS),
            },
            retry_config={"max_retries": 2, "retry_timeout": timeout},
        )
    except OSError as error:
        raise ConfigError(f"--media-store {location}: {error.strerror or 'cannot be opened'}") from error
    except Exception as error:
        raise ConfigError(f"--media-store {location}: {str(error).partition(chr(10))[0]}") from error
    return BucketObjects(store, timeout_s)
