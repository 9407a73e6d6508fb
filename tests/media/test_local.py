"""Files that requests may name: those in the folder, and nothing else (S1)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from semel.errors import MediaTooLarge, MediaUnavailable
from tests.media.origin import LIMITS, fetcher, get

SECRET = b"secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_bytes(SECRET)
    made = tmp_path / "media"
    (made / "below").mkdir(parents=True)
    (made / "a b.png").write_bytes(b"abc")
    (made / "below" / "link.png").symlink_to("../a b.png")
    (made / "escape").symlink_to(tmp_path / "outside")
    (made / "up").symlink_to("..")
    (made / "loop").symlink_to("loop")
    (made / "zero").symlink_to("/dev/zero")
    (made / "process").symlink_to("/proc/self/environ")
    os.mkfifo(made / "fifo")
    (made / "empty").touch()
    (made / "large").write_bytes(b"x" * (LIMITS.max_bytes + 1))
    return made


@pytest.mark.parametrize("name", ["a%20b.png", "below/link.png", "./a%20b.png", "/a%20b.png"])
async def test_a_file_in_the_folder_is_read_through_links_that_stay_in_it(folder: Path, name: str) -> None:
    spent: list[int] = []
    async with fetcher(local_path=folder) as fetching:
        assert await get(fetching, f"file://{folder}/{name}", spend=spent.append) == b"abc"
    assert spent == [3]


@pytest.mark.parametrize(
    "name", ["escape", "up/outside", "loop", "zero", "process", "fifo", "below", "none", "a%20b.png/x", "x" * 300]
)
async def test_what_is_not_a_file_of_the_folder_is_refused_with_one_answer_and_nothing_blocks_S1(
    folder: Path, name: str
) -> None:
    async with fetcher(local_path=folder) as fetching:
        with pytest.raises(
            MediaUnavailable, match=r"^there is no such file in the folder of --allowed-local-media-path$"
        ):
            await get(fetching, f"file://{folder}/{name}")


def test_control_checking_the_name_alone_reads_through_links_S1(folder: Path) -> None:
    """What is naive: the name is in the folder, so the file is read."""
    for name in ("escape", "up/outside"):
        path = folder / name
        assert Path(os.path.normpath(path)).is_relative_to(folder)
        assert path.read_bytes() == SECRET


async def test_a_file_has_the_limits_of_what_is_fetched_S4(folder: Path) -> None:
    spent: list[int] = []
    async with fetcher(local_path=folder) as fetching:
        with pytest.raises(MediaTooLarge, match="--max-media-bytes"):
            await get(fetching, f"file://{folder}/large", spend=spent.append)
        with pytest.raises(MediaUnavailable, match="empty"):
            await get(fetching, f"file://{folder}/empty")
    assert spent == []


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_reading_files_leaves_nothing_open(folder: Path) -> None:
    async with fetcher(local_path=folder) as fetching:
        before = open_files()
        for name in ("a%20b.png", "fifo", "escape", "none"):
            with contextlib.suppress(MediaUnavailable):
                await get(fetching, f"file://{folder}/{name}")
        assert open_files() == before
