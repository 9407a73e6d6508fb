"""A disk that is really full: a file system of a megabyte, where one can be mounted. `test_faults` has a fake one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.errors import MediaStoreUnavailable
from semel.store.objects import open_objects
from tests.store.stores import TIMEOUT_S, all_of, store_over, upload_of

DISK_BYTES = 1 << 20
FILE_BYTES = 240_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=30, check=True)


def data(number: int) -> bytes:
    return bytes([number]) * FILE_BYTES


def half_written(folder: Path) -> list[Path]:
    return list(folder.rglob("*#*"))


async def test_a_disk_that_fills_up_refuses_what_it_has_no_room_for_and_keeps_the_rest(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await store_over(open_objects(str(disk / "media"), TIMEOUT_S))
    files = [await store.put("acme", upload_of(data(number))) for number in range(4)]
    for number in range(4, 8):
        with pytest.raises(MediaStoreUnavailable, match="the media store failed"):
            await store.put("acme", upload_of(data(number)))
        with pytest.raises(MediaStoreUnavailable):
            await store.put("acme", upload_of(data(0), "renamed.png"))
    assert "No space left on device" in caplog.text
    for one in (store, await store_over(open_objects(str(disk / "media"), TIMEOUT_S))):
        assert sorted(file.id for file in await all_of(one)) == sorted(file.id for file in files)
        for number, file in enumerate(files):
            found = await one.read("acme", file.id, lambda _: None)
            assert found is not None
            assert (found[0], bytes(found[1])) == (file, data(number))
    assert await store.delete("acme", files[0].id)
    await store.put("acme", upload_of(data(9)))  # nothing of what failed takes room
    assert half_written(disk) == []
