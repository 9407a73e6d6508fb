"""vLLM's own worker for copies between a GPU and the host, over a device whose copies take their time.

Everything but the device is vLLM's: its memory, which bytes a copy has, when it is reported. A copy is begun when vLLM
submits it, goes on when vLLM is asked for what has ended, in halves and in any order, and is over some polls later.
What is loaded is there at once, as it is for whatever a GPU runs after the load; it is read again when the copy is
over, and must be the same: a GPU would have read it then.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.ec_transfer.ec_connector.cpu import worker as vllm_worker

SHARE = 0.3
"""The copies that go on at a poll, of those that are under way."""


class LateStream(torch.cpu.Stream):  # type: ignore[misc]
    """Keeps the tensors that are registered with it."""

    kept: tuple[torch.Tensor, ...] = ()


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    if isinstance(stream, LateStream):
        stream.kept += (tensor,)


@dataclass
class Copy:
    """A batch of copies: from, to, bytes."""

    spans: list[tuple[int, int, int]]
    is_load: bool
    read: list[bytes] = field(default_factory=list)
    halves: int = 0
    is_torn: bool = False
    """True if somebody wrote what a load had yet to read."""

    def begin(self) -> None:
        if self.is_load:
            self.read = [ctypes.string_at(source, size) for source, _, size in self.spans]
            for _, target, size, content in zip(*zip(*self.spans, strict=True), self.read, strict=True):
                ctypes.memmove(target, content, size)

    def go_on(self) -> None:
        self.halves += 1
        if not self.is_load:
            for source, target, size in self.spans:
                half = size // 2
                start, count = (0, half) if self.halves == 1 else (half, size - half)
                ctypes.memmove(target + start, source + start, count)
        elif self.halves == 2:
            self.is_torn = self.read != [ctypes.string_at(source, size) for source, _, size in self.spans]


class LateEvent:
    """An event of a stream: it has happened when the copy before it is over."""

    def __init__(self, worker: LateWorker) -> None:
        self._worker = worker
        self._copy: Copy | None = None

    def record(self, stream: Any) -> None:  # noqa: ARG002
        self._copy = self._worker.submitted

    def query(self) -> bool:
        return self._copy is None or self._copy.halves == 2

    def elapsed_time(self, end: LateEvent) -> float:  # noqa: ARG002
        return 0.0

    def synchronize(self) -> None:
        while not self.query():
            self._worker.poll()


class LateWorker(vllm_worker.ECCPUWorker):  # type: ignore[misc]
    """vLLM's worker; with `is_late=False` over a device whose copies are over at once."""

    def __init__(self, vllm_config: Any, *, is_late: bool = True, seed: int = 0) -> None:
        torch.Tensor.record_stream = _record_stream
        self.submitted: Copy | None = None
        self.is_torn = False
        self._is_late = is_late
        self._random = random.Random(seed)
        self._under_way: list[Copy] = []
        super().__init__(vllm_config)

    def _acquire_stream(self) -> LateStream:
        return LateStream()

    def _acquire_event(self) -> LateEvent:
        return LateEvent(self)

    def _submit_transfer(self, bufs: Any, count: int, direction: Any) -> None:
        spans = [tuple(part[:count].tolist()) for part in (bufs.src_ptrs, bufs.dst_ptrs, bufs.sizes)]
        is_load = direction is vllm_worker.ECCPUTransferDirection.HOST_TO_DEVICE
        self.submitted = copy = Copy(list(zip(*spans, strict=True)), is_load)
        copy.begin()
        self._under_way.append(copy)
        if not self._is_late:
            self.poll(1.0)
            self.poll(1.0)

    def poll(self, share: float = SHARE) -> None:
        """Let some of the copies go on."""
        self._random.shuffle(self._under_way)
        for copy in self._under_way:
            if self._random.random() < share:
                copy.go_on()
        self.is_torn |= any(copy.is_torn for copy in self._under_way)
        self._under_way = [copy for copy in self._under_way if copy.halves < 2]

    def build_connector_worker_meta(self) -> Any:
        """Report what has ended, in any order."""
        self.poll()
        if self.is_torn:
            raise RuntimeError("somebody wrote what a load had yet to read")
        for inflight in (self._inflight_saves, self._inflight_loads):
            self._random.shuffle(inflight)
        return super().build_connector_worker_meta()


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """No process group is needed to know the rank."""
    group = SimpleNamespace(rank_in_group=0)
    with (
        patch.object(vllm_worker, "get_tensor_model_parallel_rank", lambda: rank),
        patch.object(vllm_worker, "get_pcp_group", lambda: group),
    ):
        yield
