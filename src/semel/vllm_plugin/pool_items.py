"""Items of a plain vLLM, made in semel's sandboxed pool: equal ones once, however many requests wait for them.

The pool runs on an event loop of its own, in a daemon thread, so that it serves an API server, `AsyncLLM` and `LLM`
alike. It starts with the first request at the latest, never before vLLM has forked its engine. What goes wrong with an
item is that item's error; a pool that does not start, or has no process any more, is the door's fault: then there are
no modalities, and vLLM preprocesses by itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from semel.cache import SharedCache
from semel.core import Media, Modality, Origin
from semel.engine.vllm.model.model import VllmModel, read_target
from semel.engine.vllm.model.prompt_rules import overrides
from semel.errors import ConfigError, NotReady, ServiceError
from semel.processing.folder import find_folder
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pool import Pool
from semel.vllm_plugin.counters import count
from semel.vllm_plugin.levels import logger

__all__ = ["Made", "PoolGone", "PoolItems", "num_processes"]

_MEMORY_BYTES: Final = 512 << 20
"""Of features between the pool and vLLM. One that finds no room is copied next to it."""

_OFFERS: Final = OfferLimits(max_bytes=4 << 30)
_MAX_WAITING: Final = 1 << 20  # vLLM's own queue has no limit
_TIMEOUT_S: Final = 120.0
_CLOSE_S: Final = 10.0
_REFUSED: Final = ("hf_config_path", "model_class_overrides", "skip_tokenizer_init", "video_pruning_rate")
"""Flags that a process of the pool cannot follow."""

Made = tuple[Any, Any]
"""vLLM's item, and its updates of a prompt."""

_T = TypeVar("_T")


class PoolGone(Exception):
    """The pool takes no items any more."""


def num_processes(api_servers: int = 1) -> int:
    """Return the number of processes of one API server's pool: a core is left to the server, if there are many."""
    return max(1, max(2, len(os.sched_getaffinity(0)) - 1) // api_servers)


@dataclass(slots=True)
class _Flight:
    made: Future[Made]
    waiters: int = 0


class PoolItems:
    """The pool of one renderer, and the items that are being made in it."""

    def __init__(self, model_config: Any, tokenizer: Any, mm_thread: Executor, processes: int) -> None:
        self._config = model_config
        self._tokenizer = tokenizer
        self._mm_thread = mm_thread
        self._processes = processes
        self._lock = Lock()
        self._flights: dict[str, _Flight] = {}
        self._builder = ThreadPoolExecutor(1, "semel-items")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._memory: SharedCache | None = None
        self._started: Future[frozenset[Modality]] | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._pool: Pool | None = None
        self._model: VllmModel | None = None
        _leave_unopened()

    def start(self) -> Future[frozenset[Modality]]:
        """Start the pool, unless it has been started; what comes of it are the modalities whose items it makes."""
        with self._lock:
            if self._started is None:
                self._loop = asyncio.new_event_loop()
                Thread(target=_run, args=(self._loop,), name="semel-pool", daemon=True).start()
                self._started = self.run(self._start())
            return self._started

    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run something on the pool's loop, once it has been started."""
        assert self._loop is not None, "the pool was started"
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def join(self, name: str, media: Media, order: Mapping[str, Any]) -> Future[Made]:
        """Have an item made, or wait with the others for the one that is being made. `leave` ends it."""
        with self._lock:
            flight = self._flights.get(name)
            if flight is None:
                flight = self._flights[name] = _Flight(self.run(self._make(media, order)))
            else:
                count("joined")
            flight.waiters += 1
            return flight.made

    def leave(self, name: str) -> None:
        """Wait no more for an item: it was given to vLLM's cache, or its request has gone."""
        with self._lock:
            flight = self._flights[name]
            flight.waiters -= 1
            if not flight.waiters:
                del self._flights[name]

    def stop(self, reason: object) -> None:
        """Leave all further items to vLLM, with one line."""
        with self._lock:
            is_on = self._started is not None and (not self._started.done() or bool(self._started.result()))
            self._started = Future()
            self._started.set_result(frozenset())
        _leave_unopened(False)
        if is_on:
            logger.warning("semel: the renderer is off, and vLLM preprocesses by itself: %s", reason)

    def close(self) -> None:
        """End the pool and its thread."""
        if (loop := self._loop) is None or loop.is_closed():
            return
        with suppress(TimeoutError):
            self.run(self._close()).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        self._builder.shutdown(wait=False)

    async def _start(self) -> frozenset[Modality]:
        self._starting = asyncio.current_task()
        try:
            _check(self._config)
            self._model = await asyncio.get_running_loop().run_in_executor(self._mm_thread, self._learn)
            self._pool = await self._start_pool()
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM can do without the pool
            logger.warning("semel: the renderer is off, and vLLM preprocesses by itself: %s", error)
            _leave_unopened(False)
            return frozenset()
        made = frozenset(self._model.max_items)
        _leave_unopened("image" in made)
        if left := sorted(set(self._model.processor.info.allowed_mm_limits) - made):
            logger.info("semel: vLLM preprocesses %s of this model by itself", " and ".join(left))
        return made

    async def _start_pool(self) -> Pool:
        self._memory = SharedCache.create(_MEMORY_BYTES)
        target = read_target(self._config)
        folder = await asyncio.to_thread(find_folder, self._config.model, target.rendering)
        return await Pool.start(
            folder,
            target,
            processes=self._processes,
            timeout_s=_TIMEOUT_S,
            max_waiting=_MAX_WAITING,
            memory=self._memory,
            offers=_OFFERS,
            processor="plugin",
        )

    def _learn(self) -> VllmModel:
        """Learn the fields of the model's items, on vLLM's own thread: some processors allow no other next to it."""
        renderer = SimpleNamespace(tokenizer=self._tokenizer)
        model = VllmModel.from_llm(SimpleNamespace(model_config=self._config, renderer=renderer))
        if overrides(model.processor, "_cached_apply_hf_processor"):
            raise ConfigError(f"{type(model.processor).__name__} makes other items in other company")
        return model

    async def _make(self, media: Media, order: Mapping[str, Any]) -> Made:
        assert self._pool is not None, "the pool was started"
        assert self._model is not None, "the pool was started"
        try:
            feature = await self._pool.process(media, order)
        except NotReady as error:
            raise (PoolGone(str(error)) if self._pool.refusal else error) from None
        if feature.origin is None:
            raise ServiceError("a pool process says nothing of what it has decoded")
        count("preprocessed")
        origin = Origin(feature.origin.shape, feature.origin.metadata, dict(order["options"]))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._builder, self._model.build_with_updates, feature, origin)

    async def _close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._pool is not None:
            await self._pool.close()
        if self._memory is not None:
            self._memory.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _leave_unopened(unopened: bool = True) -> None:
    """Have the level `images`, if it is on, open no file in this process, or again."""
    if (images := sys.modules.get("semel.vllm_plugin.images")) is not None:
        images.leave_unopened(unopened)


def _check(model_config: Any) -> None:
    """Refuse flags that the pool's processes could not follow."""
    multimodal = model_config.get_multimodal_config()
    for name in _REFUSED:
        if getattr(model_config, name, None) or getattr(multimodal, name, None):
            raise ConfigError(f"the pool cannot follow --{name.replace('_', '-')}")
    if (device := (multimodal.mm_processor_kwargs or {}).get("device", "cpu")) != "cpu":
        raise ConfigError(f"vLLM preprocesses on {device}")
