"""Small disks for tests: a file system of a few megabytes where one can be mounted, else a store that refuses alike."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from semel.store.objects import BucketObjects, open_objects
from tests.store.stores import TIMEOUT_S

DISK_BYTES = 8 << 20


@contextmanager
def mounted_disk(folder: Path, nbytes: int = DISK_BYTES) -> Iterator[str]:
    """A file system of so many bytes in a folder; why not, if nothing can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        yield str(error)
        return
    if mounted.returncode:
        yield mounted.stderr.strip() or "it cannot"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=30, check=True)


class SmallDisk(MemoryStore):
    """As obstore over a disk of so many bytes: what does not fit is refused with the same words."""

    def __init__(self, nbytes: int = DISK_BYTES) -> None:
        self.nbytes = nbytes
        self.sizes: dict[str, int] = {}

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:  # type: ignore[override]
        if sum(self.sizes.values()) - self.sizes.get(path, 0) + len(data) > self.nbytes:
            raise GenericError("Unable to copy data to file: No space left on device (os error 28)\n\nDebug source:")
        self.sizes[path] = len(data)
        return await super().put_async(path, data, **options)

    async def delete_async(self, path: str) -> None:  # type: ignore[override]
        self.sizes.pop(path, None)
        await super().delete_async(path)


@contextmanager
def small_disk(folder: Path) -> Iterator[BucketObjects]:
    """A small disk, real if that can be."""
    with mounted_disk(folder) as fault:
        yield BucketObjects(SmallDisk(), TIMEOUT_S) if fault else open_objects(str(folder / "media"), TIMEOUT_S)
