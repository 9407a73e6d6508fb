"""Pause, sleep and new weights of a running vLLM, by the names of vLLM's own server.

Features do not depend on weights, so items stay in vLLM's item cache whatever happens to the weights; only a sleep,
which frees memory, lets go of them. Encoder outputs and prefixes do: whatever may change a weight is done between two
steps of the engine, and what was made before it is forgotten before the next one. Encoder outputs are not shared with
other workers any more from before the first change on: their names there are those of the weights at start.

While weights are loaded, vLLM's layers have none, and a step would end the engine. So the engine is held between the
first and the last call of a transfer, and after a change that failed until one succeeds or its operator resumes it.

Calls follow one another, each until the engine core has done it. A pause that waits for requests holds up only changes
of weights and sleep: whatever ends its wait overtakes it, so another pause may hurry it, and a resume ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from semel.engine.protocol import PauseMode, WeightUpdate
from semel.engine.vllm.caches import EngineCaches
from semel.engine.vllm.requests.stream import failures
from semel.engine.vllm.tier.host import HostTier
from semel.errors import EngineFailed, InvalidRequest, SemelError

__all__ = ["RPC_METHODS", "VllmControl"]

RPC_METHODS: Final[Mapping[str, bool]] = {
    "reload_weights": True,
    "reset_weights": True,
    "compute_weight_checksums": False,
}
"""The methods of vLLM's worker processes that can be called by name; True for those that change weights."""

_DISCARDS_WEIGHTS: Final = 2
"""The level of sleep after which weights have to be loaded again."""

_RESUMED: Final = "the engine was resumed while this waited for its requests to end"

logger = logging.getLogger(__name__)


class VllmControl:
    """See `semel.engine.protocol.EngineControl`."""

    def __init__(self, llm: Any, caches: EngineCaches, tier: HostTier | None) -> None:
        self._llm = llm
        self._caches = caches
        self._tier = tier
        self._order = asyncio.Lock()
        self._pausing: set[asyncio.Task[None]] = set()
        """Pauses that the engine core has begun, and that wait for running requests."""
        self._has_paused = False
        """True if a change of weights has paused the engine."""
        self._is_transferring = False
        self._lacks_weights = False
        """True within a change of weights, in a transfer, and after one of them failed."""
        self._failures = 0
        """Changes of weights that failed."""
        self._is_asleep = False

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Let the engine make no more steps: `abort` its requests, `wait` until they have ended, or `keep` them."""
        with _refusals("pause"):
            await self._pause(mode)
            if clear_cache and mode != "keep":
                await asyncio.shield(self._caches.forget_outputs())

    async def resume(self) -> None:
        """Let the engine go on; not in the middle of a transfer of weights."""
        with _refusals("resume"):
            async with self._letting_go():
                if self._is_asleep:
                    raise InvalidRequest("the engine sleeps: call /wake_up")
                await self._llm.resume_generation()
                self._note_resumed()

    async def is_paused(self) -> bool:
        """Return whether the engine makes no steps."""
        with _refusals("is_paused"):
            return bool(await self._llm.is_paused())

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause (0), and move the weights to the host's memory (1) or discard them (2)."""
        with _refusals("sleep"):
            await self._pause(mode)
            async with self._alone():
                if not await self._llm.is_paused():
                    raise InvalidRequest(_RESUMED)
                if level >= _DISCARDS_WEIGHTS:
                    self._note_new_weights()
                self._is_asleep |= level > 0
                await asyncio.shield(self._caches.sleep(level, "keep"))  # what is to end has ended

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        """Take the memory with these tags back, or all; returns whether the engine goes on, as it does with all."""
        with _refusals("wake_up"):
            async with self._letting_go():
                is_awake = bool(await self._llm.wake_up(None if tags is None else list(tags)))
                if is_awake:
                    self._is_asleep = False
                    self._note_resumed()
                return is_awake

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps at any level, 0 included."""
        with _refusals("is_sleeping"):
            return bool(await self._llm.is_sleeping())

    async def release_kv_cache_memory(self) -> None:
        """Give the memory of the KV cache back."""
        with _refusals("release_kv_cache_memory"):
            async with self._alone():
                await asyncio.shield(self._caches.release_kv_cache_memory())

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests as they are; their answers say `abort`."""
        with _refusals("abort_requests"):
            await self._llm.abort(list(request_ids))

    async def update_weights(self, step: WeightUpdate, info: Any = None) -> None:
        """Do a step of vLLM's protocol of weight transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        llm = self._llm
        with _refusals(step):
            match step:
                case "init_weight_transfer_engine":
                    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
                case "shutdown_weight_transfer_engine":
                    await llm.shutdown_weight_transfer_engine()
                case "start_weight_update" | "start_draft_weight_update":
                    async with self._changing() as was_running:
                        try:
                            await getattr(llm, step)()
                        except BaseException:
                            if was_running:  # it has changed nothing
                                self._lacks_weights = False
                                await asyncio.shield(self._let_go())
                            raise
                        self._is_transferring = True
                case "update_weights":
                    request = WeightTransferUpdateRequest(update_info=info)
                    async with self._changing(in_transfer=True):
                        await llm.update_weights(request)
                case "finish_weight_update":
                    async with self._changing(in_transfer=True):
                        await llm.finish_weight_update(info)
                        self._is_transferring = False

    async def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None
    ) -> list[Any]:
        """Call a method of all worker processes, if it is one of `RPC_METHODS`."""
        if method not in RPC_METHODS:
            raise InvalidRequest(f"method: {method!r} cannot be called; use {', '.join(RPC_METHODS)}", param="method")
        folder = kwargs.get("weights_path")
        if (
            isinstance(folder, str)
            and folder.startswith(("/", "."))
            and not await asyncio.to_thread(Path(folder).is_dir)
        ):
            raise InvalidRequest("weights_path: there is no such folder on the worker's host", param="kwargs")
        with _refusals(method):
            if not RPC_METHODS[method]:
                return list(await self._llm.collective_rpc(method, timeout_s, tuple(args), dict(kwargs)))
            async with self._changing():
                return list(await self._llm.collective_rpc(method, timeout_s, tuple(args), dict(kwargs)))

    async def set_weight_version(self, version: str) -> None:
        """Name the weights."""
        with _refusals("update_weight_version"):
            await self._llm.update_weight_version(version)

    async def weight_version(self) -> str:
        """Return the name of the weights."""
        with _refusals("weight_info"):
            return str(await self._llm.get_weight_version())

    async def weight_checksums(self) -> list[Mapping[str, str]]:
        """Return the checksums of the parameters in each worker process."""
        with _refusals("weight_checker"):
            return list(await self._llm.compute_weight_checksums())

    def world_size(self, *, include_dp: bool) -> int:
        """Return the number of worker processes."""
        parallel = self._llm.vllm_config.parallel_config
        return int(parallel.world_size_across_dp if include_dp else parallel.world_size)

    async def forget_prefixes(self, *, in_connector: bool) -> None:
        """Forget the prefixes, in a connector as well if asked for."""
        with _refusals("reset_prefix_cache"):
            await asyncio.shield(self._caches.forget_prefixes(in_connector=in_connector))

    async def forget_items(self) -> None:
        """Forget the items."""
        with _refusals("reset_mm_cache"):
            await asyncio.shield(self._caches.forget_items())

    async def forget_outputs(self) -> None:
        """Forget encoder outputs and prefixes."""
        with _refusals("reset_encoder_cache"):
            await asyncio.shield(self._caches.forget_outputs())

    async def _pause(self, mode: PauseMode) -> None:
        """Pause, and return when no step is made any more. Others have their turn as soon as the engine core knows."""
        async with self._order:
            if mode == "wait" and (self._lacks_weights or self._is_asleep):
                raise InvalidRequest("mode: no request can end before the engine has its weights; use abort or keep")
            self._has_paused = False  # whoever pauses resumes
            pausing = asyncio.create_task(self._llm.pause_generation(mode=mode, clear_cache=False))  # items stay
            self._pausing.add(pausing)
            pausing.add_done_callback(self._pausing.discard)
            await asyncio.sleep(0)  # it is sent now
            await self._llm.is_paused()  # the engine core takes calls in their order
        await asyncio.wait({pausing})
        if pausing.cancelled():
            raise InvalidRequest(_RESUMED)
        pausing.result()

    @asynccontextmanager
    async def _letting_go(self) -> AsyncIterator[None]:
        """Let the engine go on inside, but not in a transfer, nor after a change that failed while this waited."""
        failures = self._failures
        async with self._order:
            if self._is_transferring:
                raise InvalidRequest("weights are being transferred: call /finish_weight_update first")
            if self._failures != failures:
                raise InvalidRequest("an update of the weights has failed meanwhile: give the engine others")
            yield

    def _note_resumed(self) -> None:
        """End the pauses that still wait: vLLM would answer them when no request runs, which may be never."""
        self._has_paused = self._lacks_weights = False
        for pausing in self._pausing:
            pausing.cancel()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Have the engine for oneself inside, when no pause waits for requests."""
        while True:
            async with self._order:
                if not (pausing := set(self._pausing)):
                    yield
                    return
            await asyncio.wait(pausing)

    @asynccontextmanager
    async def _changing(self, *, in_transfer: bool = False) -> AsyncIterator[bool]:
        """Change weights inside, between two steps: nothing of before is used after it, also if it fails halfway.

        Yields whether the engine was running before.
        """
        async with self._alone():
            if in_transfer and not self._is_transferring:
                raise InvalidRequest("no transfer of weights has begun: call /start_weight_update first")
            self._note_new_weights()
            was_running = not await self._llm.is_paused()
            if was_running:
                self._has_paused = True
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._lacks_weights = True
            try:
                yield was_running
            except BaseException:
                self._failures += 1
                if in_transfer:
                    self._is_transferring = False  # vLLM has given it up
                raise
            finally:
                await asyncio.shield(self._caches.forget_outputs())
            if not self._is_transferring:
                self._lacks_weights = False
                await asyncio.shield(self._let_go())

    async def _let_go(self) -> None:
        """Let an engine go on that a change of weights has paused."""
        if self._has_paused:
            await self._llm.resume_generation()
            self._has_paused = False

    def _note_new_weights(self) -> None:
        if self._tier is not None:
            self._tier.note_new_weights()


@contextmanager
def _refusals(call: str) -> Iterator[None]:
    """Raise what vLLM raises inside as an error that names the call; the log says more (threats S7)."""
    try:
        with failures():
            yield
    except SemelError:
        raise
    except Exception as error:
        logger.exception("%s failed in the engine", call)
        raise EngineFailed(f"{call} failed in the engine; the worker's log says why") from error
