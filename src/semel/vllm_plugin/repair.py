"""Repair of lost items below HTTP: the door's level `repair`.

vLLM keeps names of items in the process of its server and their tensors in the engine core. Where the two have
drifted, as after an abort or a refusal between rendering and sending, the core answers a request with the hashes that
it lacks, and vLLM fails the request. Here the request is rendered again and sent again, before anybody sees it: in
servers, under `AsyncLLM` and `LLM`. First only what was lost is made again; if something is missing still, the request
is sent with all of its items, whatever vLLM believes of the core; then vLLM's error stands.

That takes the media of requests that wait for their first output. They are held by reference, up to `SEMEL_REPAIR_MB`,
the newest ones; requests whose media are gone get vLLM's error.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Final

from semel.engine.vllm.compat.internals import find_mirror
from semel.vllm_plugin.counters import count
from semel.vllm_plugin.hooks import hook
from semel.vllm_plugin.levels import LevelOff, logger

__all__ = ["Media", "MediaBudget", "Repair", "install", "media_bytes"]

_LIMIT: Final = "SEMEL_REPAIR_MB"
_DEFAULT_MB: Final = 512
_KEY: Final = "semel_media"
"""Under which a rendered prompt has its media."""
_REPAIR: Final = "semel_repair"
"""The attribute of vLLM's output processor with the repair of its requests."""
_MAX_TRIES: Final = 2


def install() -> str:
    """Hook repair into vLLM's renderers, engine clients and the handling of their outputs."""
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    from semel.vllm_plugin.metrics import show_metrics

    limit = os.environ.get(_LIMIT, str(_DEFAULT_MB))
    if not limit.isdecimal():
        raise LevelOff(f"{_LIMIT}={limit} is not a whole number of megabytes")
    show_metrics()
    hooks = _Hooks(MediaBudget(int(limit) << 20))
    hook(BaseRenderer, "process_for_engine", hooks.render)
    hook(BaseRenderer, "process_for_engine_async", hooks.render_async)
    hook(InputProcessor, "process_inputs", hooks.process_inputs)
    hook(AsyncLLM, "__init__", hooks.start_async)
    hook(AsyncLLM, "pause_generation", hooks.pause)
    hook(AsyncLLM, "sleep", hooks.sleep)
    hook(LLMEngine, "__init__", hooks.start)
    hook(LLMEngine, "step", hooks.step)
    hook(OutputProcessor, "add_request", hooks.add_request)
    hook(OutputProcessor, "abort_requests", hooks.abort_requests)
    hook(OutputProcessor, "process_outputs", hooks.process_outputs)
    return "lost items are sent again"


class Media:
    """The prompt that a request was rendered from, with its media; it does not travel with a copy."""

    def __init__(self, prompt: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.prompt = prompt
        """None if it is not held any more."""
        self.options = options or {}
        self.nbytes = 0 if prompt is None else media_bytes(prompt)
        self.renderings: dict[int, asyncio.Task[Any]] = {}
        """Those under way, by the number of the try: all samples of a request wait for one."""

    def __reduce__(self) -> tuple[type[Media], tuple[()]]:
        return Media, ()


class MediaBudget:
    """The media that are held, within a limit: the oldest ones go first. For all threads of a process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._total_bytes = 0
        self._media: OrderedDict[weakref.ref[Media], int] = OrderedDict()
        self._dead: deque[weakref.ref[Media]] = deque()
        """Those that nobody refers to any more; filled without the lock, since garbage is collected anywhere."""
        self._lock = threading.Lock()

    def hold(self, media: Media) -> None:
        """Hold one more, as long as somebody refers to it."""
        with self._lock:
            while self._dead:
                self._total_bytes -= self._media.pop(self._dead.popleft(), 0)
            self._media[weakref.ref(media, self._dead.append)] = media.nbytes
            self._total_bytes += media.nbytes
            while self._total_bytes > self._max_bytes:
                oldest, nbytes = self._media.popitem(last=False)
                self._total_bytes -= nbytes
                if (one := oldest()) is not None:
                    one.prompt = None


def media_bytes(value: Any) -> int:
    """Return about how much memory media take. Nothing is decoded for it."""
    if isinstance(value, Mapping):
        return sum(map(media_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(media_bytes, value)) if not value or not isinstance(value[0], int) else 8 * len(value)
    if isinstance(value, bytes | str):
        return len(value)
    if (original := getattr(type(value), "__dataclass_fields__", {}).get("original_bytes")) is not None:
        return len(getattr(value, original.name)) + media_bytes(value.media)
    if type(value).__module__.startswith("PIL."):
        return int(value.width * value.height * len(value.getbands()))
    return int(getattr(value, "nbytes", 0))


class _Features(list[Any]):
    """The items of a request, with the media that they were made of, until the request is registered."""

    def __init__(self, features: Iterable[Any], media: Media) -> None:
        super().__init__(features)
        self.media = media


class _Flight:
    """A request that has no output yet, without tensors."""

    def __init__(self, request: Any, media: Media, pauses: int) -> None:
        self.pauses = pauses
        """How often the engine had been paused when the request was registered."""
        self.request = copy(request)
        self.request.mm_features = [replace(feature, data=None) for feature in request.mm_features]
        self.media = media
        self.tries = 0

    def rendering(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the prompt and the options to render it with: the last time, past what the core is said to have."""
        return dict(self.media.prompt or {}), {**self.media.options, "skip_mm_cache": self.tries == _MAX_TRIES}

    def filled(self, rendered: Mapping[str, Any]) -> Any:
        """Return the request with the items that were made again. Raise `LookupError` if they are other ones."""
        decoder = rendered["decoder_prompt"] if rendered["type"] == "enc_dec" else rendered
        items: dict[str, Any] = {}
        for modality, hashes in decoder["mm_hashes"].items():
            for name, item in zip(hashes, decoder["mm_kwargs"][modality], strict=True):
                items[name] = items.get(name) or item
        request = copy(self.request)
        request.mm_features = [replace(feature, data=items[feature.mm_hash]) for feature in request.mm_features]
        return request


class Repair:
    """Repair of the requests of one engine client."""

    def __init__(self, llm: Any, renders: Callable[..., Any]) -> None:
        self._core = llm.engine_core
        self._renderer = llm.renderer
        self._outputs = weakref.proxy(llm.output_processor)  # which refers to this one
        self._renders = renders
        """vLLM's own rendering."""
        self._flights: dict[str, _Flight] = {}
        self._pauses = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, request: Any) -> None:
        """Remember a request that is about to be sent, if its media are known."""
        if isinstance(features := request.mm_features, _Features):
            request.mm_features = list(features)
            self._flights[request.request_id] = _Flight(request, features.media, self._pauses)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests."""
        for request_id in request_ids if self._flights else ():
            self._flights.pop(request_id, None)

    def pause(self) -> None:
        """Abort the requests that are registered now, as the engine core does with those that it has."""
        self._pauses += 1

    def take_lost(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs without those that say that items were lost, and send their requests again."""
        return outputs if not self._flights else [one for one in outputs if not self._is_repaired(one)]

    def _is_repaired(self, output: Any) -> bool:
        flight = self._flights.pop(output.request_id, None)
        if flight is None or not output.mm_cache_miss_hashes:
            return False
        count("lost", len(output.mm_cache_miss_hashes))
        if flight.media.prompt is None or flight.tries == _MAX_TRIES:
            return False
        flight.tries += 1
        self.send_again(flight, output)
        return True

    def send_again(self, flight: _Flight, output: Any) -> None:
        """Begin to send a request again."""
        task = asyncio.get_running_loop().create_task(self._send_again(flight, output))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_again(self, flight: _Flight, output: Any) -> None:
        try:
            request = flight.filled(await self._render(flight, output.mm_cache_miss_hashes))
            if flight.pauses != self._pauses:
                self._fail(_aborted(output))
            elif self._sent(flight):
                await self._core.add_request_async(request)
        except Exception as error:  # noqa: BLE001 (vLLM's error stands)
            self.give_up(flight, output, error)

    async def _render(self, flight: _Flight, lost: Iterable[str]) -> Any:
        """Render a prompt again, once for all of its samples."""
        renderings, number = flight.media.renderings, flight.tries
        if (task := renderings.get(number)) is None:

            async def render() -> Any:
                loop = asyncio.get_running_loop()
                # In the one thread that may touch vLLM's cache.
                await loop.run_in_executor(self._renderer._mm_executor, self.forget, lost)
                prompt, options = flight.rendering()
                return await self._renders(self._renderer, prompt, **options)

            task = renderings[number] = asyncio.create_task(render())
            task.add_done_callback(lambda _: renderings.pop(number))
        return await asyncio.shield(task)

    def forget(self, lost: Iterable[str]) -> None:
        """Take lost items out of vLLM's cache in this process."""
        for name in lost:
            self._renderer.mm_processor_cache.invalidate(name)

    def _sent(self, flight: _Flight) -> bool:
        """Count a request that is sent again; False if it was aborted meanwhile."""
        request_id = flight.request.request_id
        if request_id not in self._outputs.request_states:
            return False
        self._flights[request_id] = flight
        count("repaired")
        return True

    def give_up(self, flight: _Flight, output: Any, error: Exception) -> list[Any]:
        """Let vLLM fail a request; returns what it makes of that for a caller without a queue."""
        self.drop([flight.request.request_id])
        logger.warning("semel: a request whose item was lost could not be rendered again: %r", error)
        return self._fail(output)

    def _fail(self, output: Any) -> list[Any]:
        """Let vLLM end a request with an output. It ends even if vLLM cannot handle that."""
        from vllm.v1.metrics.stats import IterationStats

        stats = IterationStats() if self._outputs.log_stats else None
        try:
            outputs: list[Any] = self._outputs.process_outputs([output], time.monotonic(), stats).request_outputs
        except Exception:  # noqa: BLE001 (nobody may wait for it for ever)
            logger.exception("semel: vLLM could not handle the failure of a request, which is aborted")
            self._outputs.abort_requests([output.request_id], internal=True)
            return []
        return outputs


def _aborted(output: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    return EngineCoreOutput(output.request_id, [], finish_reason=FinishReason.ABORT)


class _SyncRepair(Repair):
    """The same for `LLM`, which has no event loop: between two steps."""

    def __init__(self, llm: Any, renders: Callable[..., Any]) -> None:
        super().__init__(llm, renders)
        self._lost: list[tuple[_Flight, Any]] = []

    def send_again(self, flight: _Flight, output: Any) -> None:
        """Note a request for the end of this step."""
        self._lost.append((flight, output))

    def end_step(self) -> list[Any]:
        """Send again what was lost; returns outputs of what could not be."""
        lost, self._lost = self._lost, []
        failed: list[Any] = []
        for flight, output in lost:
            try:
                self.forget(output.mm_cache_miss_hashes)
                prompt, options = flight.rendering()
                request = flight.filled(self._renders(self._renderer, prompt, **options))
                if self._sent(flight):
                    self._core.add_request(request)
            except Exception as error:  # noqa: BLE001 (vLLM's error stands)
                failed += self.give_up(flight, output, error)
        return failed


class _Hooks:
    """The methods of vLLM as they are with repair. A fault of semel's own switches it off."""

    def __init__(self, budget: MediaBudget) -> None:
        self._budget = budget
        self._rendered = threading.local()
        self._is_off = False

    def render(self, own: Any, renderer: Any, prompt: Any, arrival_time: float, **options: Any) -> Any:
        original = dict(prompt)  # vLLM takes something out of it
        rendered = own(renderer, prompt, arrival_time, **options)
        options["arrival_time"] = arrival_time
        media = self._safely(self._keep, renderer, rendered, original, options)
        if hasattr(self._rendered, "media"):
            self._rendered.media = media
        return rendered

    async def render_async(self, own: Any, renderer: Any, prompt: Any, arrival_time: float, **options: Any) -> Any:
        original = dict(prompt)
        rendered = await own(renderer, prompt, arrival_time, **options)
        options["arrival_time"] = arrival_time
        self._safely(self._keep, renderer, rendered, original, options)
        return rendered

    def process_inputs(self, own: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
        self._rendered.media = None
        try:
            request = own(processor, *args, **kwargs)
            if request.mm_features and not request.resumable:
                self._safely(self._mark, request, kwargs["prompt"] if "prompt" in kwargs else args[1])
        finally:
            del self._rendered.media
        return request

    def start_async(self, own: Any, llm: Any, *args: Any, **kwargs: Any) -> None:
        own(llm, *args, **kwargs)
        self._safely(self._attach, llm, Repair, type(llm.renderer).process_for_engine_async)

    def start(self, own: Any, llm: Any, *args: Any, **kwargs: Any) -> None:
        own(llm, *args, **kwargs)
        self._safely(self._attach, llm, _SyncRepair, type(llm.renderer).process_for_engine)

    def step(self, own: Any, llm: Any) -> Any:
        outputs = own(llm)
        repair = getattr(llm.output_processor, _REPAIR, None)
        return outputs if repair is None else outputs + repair.end_step()

    async def pause(self, own: Any, llm: Any, *args: Any, **kwargs: Any) -> Any:
        self._abort_all(llm, kwargs.get("mode", "abort"))
        return await own(llm, *args, **kwargs)

    async def sleep(self, own: Any, llm: Any, level: int = 1, mode: str = "abort", **kwargs: Any) -> Any:
        self._abort_all(llm, mode)
        return await own(llm, level, mode, **kwargs)

    def add_request(self, own: Any, outputs: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        own(outputs, request, *args, **kwargs)
        if (repair := getattr(outputs, _REPAIR, None)) is not None:
            self._safely(repair.add, request)

    def abort_requests(self, own: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = own(outputs, *args, **kwargs)
        if (repair := getattr(outputs, _REPAIR, None)) is not None:
            repair.drop(aborted)
        return aborted

    def process_outputs(self, own: Any, outputs: Any, produced: list[Any], *args: Any, **kwargs: Any) -> Any:
        if (repair := getattr(outputs, _REPAIR, None)) is not None:
            kept = self._safely(repair.take_lost, produced)
            produced = produced if kept is None else kept
        return own(outputs, produced, *args, **kwargs)

    def _keep(self, renderer: Any, rendered: Any, prompt: dict[str, Any], options: dict[str, Any]) -> Media | None:
        """Keep the media of a prompt whose items vLLM names to its engine core instead of sending them."""
        parts = (prompt, prompt.get("encoder_prompt") or {}, prompt.get("decoder_prompt") or {})
        has_media = any(part.get("multi_modal_data") for part in parts)
        if not has_media or options.get("skip_mm_cache") or find_mirror(renderer.mm_processor_cache) is None:
            return None
        media = rendered[_KEY] = Media(prompt, options)
        self._budget.hold(media)
        return media

    def _mark(self, request: Any, prompt: Any) -> None:
        is_rendered = isinstance(prompt, dict) and "type" in prompt
        # Taken out of the prompt: a caller has that until the last output, and only the first one is waited for here.
        media = prompt.pop(_KEY, None) if is_rendered else self._rendered.media
        if media is not None:
            request.mm_features = _Features(request.mm_features, media)

    def _abort_all(self, llm: Any, mode: str) -> None:
        """Note a pause, in which requests that wait in the core for `mode` "keep" go on afterwards."""
        if mode != "keep" and (repair := getattr(llm.output_processor, _REPAIR, None)) is not None:
            repair.pause()

    def _attach(self, llm: Any, kind: Callable[..., Repair], renders: Any) -> None:
        setattr(llm.output_processor, _REPAIR, kind(llm, getattr(renders, "__wrapped__", renders)))

    def _safely(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what semel's own part makes; None from its first fault on."""
        if self._is_off:
            return None
        try:
            return call(*args)
        except Exception:  # noqa: BLE001 (vLLM goes on without it)
            self._is_off = True
            logger.exception("semel: repair is off after a fault of its own; vLLM goes on as it is")
            return None
