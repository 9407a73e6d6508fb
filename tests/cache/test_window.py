"""Segments and windows: what may be mapped, and when a borrowed view is over."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from semel.cache import Lease, SharedCache, Window
from semel.cache.shared.segment import Segment
from semel.core import Tensor
from semel.errors import ProtocolError
from semel.processing import to_torch
from tests.cache.examples import content


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment(4_096)
    segment.memory[:] = content(1, 0, 4_096)
    yield segment
    segment.close()


def lease(segment: Segment, offset: int = 64, nbytes: int = 640) -> Lease:
    return Lease(7, segment.id, offset, nbytes)


def test_a_segment_has_no_name_and_is_sealed_D4(segment: Segment) -> None:
    assert str(Path(f"/proc/self/fd/{segment.fileno()}").readlink()) == "/memfd:semel (deleted)"
    for size in (1, 8_192):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(segment.fileno())


def test_a_file_that_could_shrink_under_its_reader_is_refused_D4(tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    read_end, write_end = os.pipe()
    for fd in (unsealed, plain, read_end, write_end):
        os.truncate(fd, 4_096) if fd in (unsealed, plain) else None
        with pytest.raises(ProtocolError):
            Window.attach(fd)
        os.close(fd)


def test_an_empty_segment_is_refused_D4() -> None:
    fd = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(ProtocolError):
        Window.attach(fd)
    os.close(fd)


def test_a_reader_cannot_write_D4(segment: Segment) -> None:
    fd = segment.open_to_read()
    window = Window.attach(fd)
    assert window.view(0, 10).readonly
    assert window.borrow(lease(segment), print).readonly
    with pytest.raises(ProtocolError):
        Window.attach(fd, writable=True)
    os.close(fd)


def test_a_writer_writes_what_the_owner_reads_D4(segment: Segment) -> None:
    window = Window.attach(segment.fileno(), writable=True)
    window.view(128, 4)[:] = b"semel"[:4]
    assert segment.memory[128:132] == b"seme"


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (4_096, 1), (0, 4_097), (1 << 63, 1), (1, 1 << 63)])
def test_nothing_outside_a_segment_is_shown_D4(segment: Segment, offset: int, nbytes: int) -> None:
    window = Window.attach(segment.fileno())
    with pytest.raises(ProtocolError):
        window.view(offset, nbytes)
    with pytest.raises(ProtocolError):
        window.borrow(lease(segment, offset, nbytes), print)
    assert window.view(4_096, 0).nbytes == 0


def test_a_lease_is_released_once_when_the_last_buffer_over_it_is_gone_D4(segment: Segment) -> None:
    released: list[int] = []
    window = Window.attach(segment.fileno())
    view = window.borrow(lease(segment), released.append)
    whole = content(1, 0, 4_096)[64:704]
    assert view == whole
    array = np.frombuffer(view, np.uint8)[10:20].reshape(2, 5)
    cast = view[64:128].cast("d")
    tensor = to_torch(Tensor("float32", (16,), view[128:192]))[3:5]
    del view, window
    assert array.tobytes() == whole[10:20]
    del array
    assert cast.tobytes() == whole[64:128]
    del cast
    assert not released
    assert tensor.numpy().tobytes() == whole[140:148]
    del tensor
    assert released == [7]


def test_views_outlive_their_window_and_their_segment_D4() -> None:
    cache = SharedCache.create(4_096)
    window = Window.attach(cache.segment.fileno())
    view = window.view(0, 8)
    window.close()
    cache.close()
    assert view == bytes(8)
