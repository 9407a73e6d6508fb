"""vLLM's `AsyncLLM` without its engine core: what is done in the worker's process is real, what is behind it is not.

Requests are encoded as vLLM's client encodes them, and counted; every one of them gets tokens at a steady pace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.arguments import parse_engine_flags
from semel.engine.vllm.engine import VllmEngine

__all__ = ["Core", "coreless", "without_core"]

_FLAGS = ("--enforce-eager", "--dtype", "float32", "--seed", "0")


class Core:
    """Stands for vLLM's client of an engine core."""

    def __init__(self, config: Any) -> None:
        from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache
        from vllm.v1.serial_utils import MsgpackEncoder

        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.encoder = MsgpackEncoder()
        self.received = LruKeyReplicatedReceiverCache(config.model_config)
        self.messages: list[int] = []
        """The bytes of every request that was added."""

        self.pace_s = 0.02
        self._running: dict[str, int] = {}
        self._ended: list[tuple[str, list[str]]] = []
        self.missed: list[str] = []
        """Names of items that requests referred to and that were not there."""

        self.ended_with: list[int] = []
        """At each shutdown, the requests that ran."""

    async def add_request_async(self, request: Any) -> None:
        message = self.encoder.encode(request)
        self.messages.append(sum(memoryview(part).nbytes for part in message))
        if request.mm_features and (missed := self._take(request.mm_features)):
            self.missed += missed
            self._ended.append((request.request_id, missed))
        elif not request.abort_immediately:
            self._running[request.request_id] = request.sampling_params.max_tokens

    def _take(self, features: Any) -> list[str]:
        """Cache the items of a request; returns those that are not there, as the engine core reports them."""
        from vllm.multimodal.cache.base import MultiModalCacheMissError

        copies: Any = [SimpleNamespace(mm_hash=one.mm_hash, data=one.data) for one in features]
        try:
            self.received.get_and_update_features(copies)
        except MultiModalCacheMissError as error:
            return list(error.mm_hashes)
        return []

    def is_running(self, request_id: str) -> bool:
        """Whether it generates for that request, by the client's name for it."""
        return any(name.startswith(request_id) for name in self._running)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        await asyncio.sleep(self.pace_s)
        outputs = [
            EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, mm_cache_miss_hashes=missed)
            for name, missed in self._ended
        ]
        self._ended.clear()
        for name, left in list(self._running.items()):
            self._running[name] = left - 1
            if left == 1:
                del self._running[name]
            outputs.append(EngineCoreOutput(name, [5], finish_reason=FinishReason.LENGTH if left == 1 else None))
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self._running.pop(name, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        self.received.clear_cache()

    async def reset_encoder_cache_async(self) -> None: ...

    async def reset_prefix_cache_async(self, *_: Any, **__: Any) -> bool:
        return True

    def shutdown(self, **_: Any) -> None:
        self.ended_with.append(len(self._running))


@contextmanager
def without_core() -> Iterator[list[Core]]:
    """Have vLLM's engines made without their cores; yields what stands for these."""
    from vllm.v1.engine.core_client import EngineCoreClient

    cores: list[Core] = []

    def make(vllm_config: Any, **_: Any) -> Core:
        cores.append(Core(vllm_config))
        return cores[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCoreClient, "make_async_mp_client", staticmethod(make))
        yield cores


@asynccontextmanager
async def coreless(folder: Path, *flags: str) -> AsyncIterator[tuple[VllmEngine, Core]]:
    """The engine of a worker, on a core that generates nothing of its own."""
    with without_core() as cores:
        engine = VllmEngine.start(parse_engine_flags(str(folder), [*_FLAGS, *flags]))
    try:
        yield engine, cores[0]
    finally:
        await engine.close()
