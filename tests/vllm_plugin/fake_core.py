"""Stands for vLLM's engine core behind its real clients: it has vLLM's own item cache, and answers with one token."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

__all__ = ["FakeCore", "SyncFakeCore", "fake_cores"]

ARGUMENTS = {"enforce_eager": True, "dtype": "float32", "seed": 0, "disable_log_stats": True, "max_model_len": 2_048}


class FakeCore:
    """vLLM's client of an engine core, and the core."""

    def __init__(self, config: Any) -> None:
        from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.items = LruKeyReplicatedReceiverCache(config.model_config)
        self.sent: list[Any] = []
        """The requests as they came through vLLM's wire, with their items as they were sent."""
        self.lose: Callable[[Any], list[str]] = lambda _: []
        """The items that are lost when a request comes."""
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        self._outputs: Any = asyncio.Queue()

    def take(self, request: Any) -> None:
        """Answer a request."""
        from vllm.multimodal.cache.base import MultiModalCacheMissError
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        came = self._decoder.decode(self._encoder.encode(request))
        self.sent.append(came)
        for name in self.lose(came):
            self.items._cache.pop(name, None)
        features = [SimpleNamespace(mm_hash=one.mm_hash, data=one.data) for one in came.mm_features or ()]
        output = EngineCoreOutput(request.request_id, [5], finish_reason=FinishReason.LENGTH)
        try:
            self.items.get_and_update_features(features)
        except MultiModalCacheMissError as error:
            lost = {"finish_reason": FinishReason.ERROR, "mm_cache_miss_hashes": error.mm_hashes}
            output = EngineCoreOutput(request.request_id, [], **lost)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output], timestamp=0.0))

    async def add_request_async(self, request: Any) -> None:
        self.take(request)

    async def get_output_async(self) -> Any:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None: ...

    async def sleep_async(self, level: int, mode: str) -> None: ...

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, timeout: float | None = None) -> None: ...


class SyncFakeCore(FakeCore):
    """The same for `LLM`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._outputs = queue.Queue()

    def add_request(self, request: Any) -> None:
        self.take(request)

    def get_output(self) -> Any:
        """All that there is, as of one step."""
        step = self._outputs.get_nowait()
        while not self._outputs.empty():
            step.outputs += self._outputs.get_nowait().outputs
        return step

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def reset_mm_cache(self) -> None: ...

    def dp_engines_running(self) -> bool:
        return False


@contextmanager
def fake_cores() -> Iterator[list[FakeCore]]:
    """Let clients that are made meanwhile have a fake core; it is in the list."""
    from vllm.v1.engine.core_client import EngineCoreClient

    cores: list[FakeCore] = []

    def make(kind: type[FakeCore]) -> Any:
        def core(vllm_config: Any, **_: Any) -> FakeCore:
            cores.append(kind(vllm_config))
            return cores[-1]

        return staticmethod(core)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCoreClient, "make_async_mp_client", make(FakeCore))
        patch.setattr(EngineCoreClient, "make_client", make(SyncFakeCore))
        yield cores


def engine_arguments(folder: Path, **arguments: Any) -> Any:
    """vLLM's arguments for a tiny model."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(model=str(folder), **{**ARGUMENTS, **arguments})
