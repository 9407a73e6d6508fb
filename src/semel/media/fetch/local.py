"""Files of a folder by their `file:///` URLs: regular ones in it, wherever a link leads. Needs no HTTP client."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from semel.errors import MediaTooLarge, MediaUnavailable
from semel.media.fetch.policy import Folder
from semel.media.fetch.url import FileUrl

__all__ = ["read_file"]

_CHUNK_BYTES: Final = 1 << 20


async def read_file(url: FileUrl, folder: Folder, *, max_bytes: int, spend: Callable[[int], None]) -> bytes:
    """Read a file. Calls `spend` with the number of bytes before reading them."""
    try:
        # Each thread opens and closes its own descriptor: a cancelled caller leaves nothing open.
        size = await asyncio.to_thread(_size, url.path, folder.real)
        if size > max_bytes:
            raise MediaTooLarge(f"the file has over {max_bytes:,} bytes; raise the limit with --max-media-bytes")
        spend(size)
        return await asyncio.to_thread(_read, url.path, folder.real, size)
    except (OSError, ValueError):
        # The same error for every cause: a client must not learn whether a file exists elsewhere.
        raise MediaUnavailable("there is no such file in the folder of --allowed-local-media-path") from None


def _size(path: str, folder: Path) -> int:
    with _found(path, folder) as place:
        return os.fstat(place).st_size


def _read(path: str, folder: Path, size: int) -> bytes:
    """Read this many bytes of a file, and no more if it has grown."""
    parts = []
    with _found(path, folder) as place, Path(f"/proc/self/fd/{place}").open("rb", buffering=0) as file:
        while size > 0 and (part := file.read(min(size, _CHUNK_BYTES))):
            parts.append(part)
            size -= len(part)
    return b"".join(parts)


@contextmanager
def _found(path: str, folder: Path) -> Iterator[int]:
    """Open a regular file in the folder, not yet for reading."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        real = Path(f"/proc/self/fd/{place}").readlink()
        if not stat.S_ISREG(os.fstat(place).st_mode) or not real.is_relative_to(folder):
            raise PermissionError(path)
        yield place
    finally:
        os.close(place)
