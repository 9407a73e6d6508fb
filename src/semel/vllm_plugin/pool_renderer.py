"""vLLM's renderer for HF tokenizers, whose items are made in semel's pool and committed by vLLM itself.

Hashes are computed in threads, and items that vLLM's cache lacks are made in the pool. On vLLM's one thread for items,
in vLLM's own order, its own `apply` then finds every item in its cache, or made: its prompt, its counts, and what it
remembers of the engine's cache are its own. An item that the pool refuses, or dies of, is refused (400): no decoder
runs in this process for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from vllm.multimodal.parse import AudioProcessorItems, ImageProcessorItems, VideoProcessorItems, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.hf import HfRenderer
from vllm.utils.torch_utils import set_default_torch_num_threads

from semel.core import Modality
from semel.errors import SemelError
from semel.vllm_plugin.counters import count
from semel.vllm_plugin.item_processor import Order, to_order
from semel.vllm_plugin.lookahead import PromptsAhead, look_ahead
from semel.vllm_plugin.pool_items import Made, PoolGone, PoolItems, num_processes

__all__ = ["PoolRenderer"]

_THREADS: Final = 4
_KINDS: Final = (AudioProcessorItems, ImageProcessorItems, VideoProcessorItems)


class _HashedInputs(ProcessorInputs):  # type: ignore[misc]
    """vLLM's inputs, which are hashed once."""

    _hashes: Any = None

    def get_mm_hashes(self, model_id: str, hash_algorithm: str) -> Any:
        if self._hashes is None:
            self._hashes = super().get_mm_hashes(model_id, hash_algorithm)
        return self._hashes


@dataclass(frozen=True, slots=True)
class _ReadyItems:
    """vLLM's cache for one prompt, with items that were made for it and wait for their turn."""

    cache: Any
    ready: Mapping[str, Made]

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.ready or (self.cache is not None and self.cache.is_cached_item(mm_hash))

    def missing(self, mm_hashes: Iterable[str]) -> list[str]:
        return [mm_hash for mm_hash in mm_hashes if not self.is_cached_item(mm_hash)]

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def get_and_update_item(self, mm_item: Made | None, mm_hash: str) -> Any:
        made = mm_item or self.ready.get(mm_hash)
        return made if self.cache is None else self.cache.get_and_update_item(made, mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        if self.cache is not None:
            self.cache.touch_sender_cache_item(mm_hash)

    def release_sender_touches(self) -> None:
        if self.cache is not None:
            self.cache.release_sender_touches()


@dataclass(frozen=True, slots=True)
class _Work:
    """A prompt whose missing items are being made."""

    request_id: str
    inputs: _HashedInputs
    cache: Any
    places: dict[str, tuple[Modality, int]]
    """The items that the pool makes, by hash; others are vLLM's to process."""
    orders: dict[str, Order] = field(default_factory=dict)
    """Those that vLLM's cache lacks."""
    flights: dict[str, Future[Made]] = field(default_factory=dict)
    is_apart: bool = False
    """True if its items are not shared with other prompts: without a cache, a client's names are not believed."""

    def flight_name(self, mm_hash: str) -> str:
        """Return the name under which an item is being made."""
        return f"{self.request_id} {mm_hash}" if self.is_apart else mm_hash


class PoolRenderer(HfRenderer):  # type: ignore[misc]
    """vLLM's renderer with a pool."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        if self.mm_processor is None:
            return
        self._committer = _committer(self.mm_processor)
        processes = num_processes(config.parallel_config._api_process_count)
        self._items = PoolItems(config.model_config, tokenizer, self._mm_executor, processes)
        self._hashing = ThreadPoolExecutor(_THREADS, "semel-hash")
        self._process_multimodal_async = self._process_async  # vLLM sets an attribute of the instance too
        self._resources.callback(self._items.close)
        self._resources.callback(self._hashing.shutdown, wait=False)
        self._ahead = PromptsAhead(2 * processes + 1)
        look_ahead()

    def start_mm_warmup_in_background(self) -> None:
        """Start the pool too: vLLM has forked its engine by now."""
        super().start_mm_warmup_in_background()
        if self.mm_processor is not None:
            self._items.start()

    def warmup(self, chat_params: Any) -> None:
        """Start the pool where no engine is forked."""
        super().warmup(chat_params)
        if self.mm_processor is not None:
            self._items.start()

    def render_ahead(self, prompts: Iterable[Any]) -> Iterator[Any]:
        """Yield the prompts of a batch in their order, while the items of the next ones are made."""
        return iter(prompts) if self.mm_processor is None else self._ahead.render(prompts)

    def _process_multimodal(self, *call: Any, **options: Any) -> Any:
        """Process a prompt of `LLM`, or a raw one of `AsyncLLM`, in the caller's thread."""
        self._items.start()
        if not self._ahead.is_on:
            return self._items.run(self._process_async(*call, **options)).result()
        begun = self._items.run(self._begin(*call, **options)).result()
        return self._ahead.add(lambda: self._items.run(self._finish(*begun)).result(), partial(self._leave, begun[1]))

    async def _process_async(self, *call: Any, **options: Any) -> Any:
        return await self._finish(*await self._begin(*call, **options))

    async def _begin(self, *call: Any, **options: Any) -> tuple[Callable[[], Any], _Work | None]:
        """Have the missing items of a prompt made; returns vLLM's own way too, and no work if it has to be that."""
        in_thread = asyncio.get_running_loop().run_in_executor
        own = partial(HfRenderer._process_multimodal, self, *call, **options)
        modalities = await asyncio.shield(asyncio.wrap_future(self._items.start()))
        if modalities.isdisjoint(_mm_data(*call, **options)):
            return own, None
        work = await in_thread(self._hashing, partial(self._prepare, modalities, *call, **options))
        self._join(work)
        return own, work

    async def _finish(self, own: Callable[[], Any], work: _Work | None) -> Any:
        """Commit a prompt once its items are made; again with those that were evicted meanwhile."""
        in_thread = asyncio.get_running_loop().run_in_executor
        if work is None:
            return await in_thread(self._mm_executor, own)
        ready: dict[str, Made] = {}
        try:
            while True:
                for mm_hash, made in work.flights.items():
                    ready[mm_hash] = await asyncio.shield(asyncio.wrap_future(made))
                result, evicted = await in_thread(self._mm_executor, self._commit, work, ready)
                if not evicted:
                    return result
                await in_thread(self._hashing, self._order, work, evicted)
                self._join(work)
        except PoolGone as error:
            self._items.stop(error)
            return await in_thread(self._mm_executor, own)
        except SemelError as error:
            count("pool_refusals")
            raise ValueError(str(error)) from None
        finally:
            self._leave(work)

    def _join(self, work: _Work) -> None:
        for mm_hash, order in work.orders.items():
            if mm_hash not in work.flights:
                work.flights[mm_hash] = self._items.join(work.flight_name(mm_hash), *order)

    def _leave(self, work: _Work | None) -> None:
        if work is not None:
            for mm_hash in work.flights:
                self._items.leave(work.flight_name(mm_hash))

    def _prepare(
        self,
        modalities: Collection[str],
        prompt: list[int],
        mm_data: Mapping[str, Any],
        mm_uuids: Any,
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> _Work:
        """Do what vLLM's `_process_multimodal` does before `apply`, and write the orders of missing items."""
        processor = self.get_mm_processor()
        request_id = f"renderer{self.api_process_rank}-mm-{self._mm_req_counter.inc(1)}"
        items = processor.info.parse_mm_data(mm_data)
        uuids = self._process_mm_uuids(mm_data, items, parse_mm_uuids(mm_uuids), request_id)
        inputs = _HashedInputs(
            *(prompt, items, uuids),
            hf_processor_mm_kwargs=mm_processor_kwargs or {},
            media_io_kwargs=media_io_kwargs or {},
        )
        places: dict[str, tuple[Modality, int]] = {}
        for modality, hashes in _hashes(processor, inputs).items():
            if modality in modalities and type(items[modality]) in _KINDS:
                for index, mm_hash in enumerate(hashes):
                    if items[modality].data[index] is not None:
                        places.setdefault(mm_hash, (modality, index))
        cache = self._mm_processor_only_cache if skip_mm_cache else self._mm_processor_cache
        work = _Work(request_id, inputs, cache, places, is_apart=cache is None and bool(mm_uuids))
        self._order(work, _ReadyItems(cache, {}).missing(places))
        return work

    def _order(self, work: _Work, missing: list[str]) -> None:
        """Write the orders of missing items; those that the pool does not take are vLLM's."""
        items = work.inputs.mm_data_items
        for mm_hash in missing:
            modality, index = work.places[mm_hash]
            options = _options(self.get_mm_processor(), work.inputs, modality, index)
            item, is_cached = items[modality].data[index], work.cache is not None
            if (order := to_order(modality, item, options, is_cached=is_cached)) is None:
                del work.places[mm_hash]
            else:
                work.orders[mm_hash] = order

    def _commit(self, work: _Work, ready: Mapping[str, Made]) -> tuple[Any, list[str]]:
        """Let vLLM put the items into its cache and the prompt; nothing, if some are missing: their hashes."""
        cache = _ReadyItems(work.cache, ready)
        if missing := cache.missing(work.places):
            return None, missing
        work.inputs.cache = cache
        with set_default_torch_num_threads():
            made = self._committer.apply(work.inputs, self._mm_timing_registry.get(work.request_id))
        self.update_mm_cache_stats()
        return made, []


def _mm_data(_: list[int], mm_data: Mapping[str, Any], *__: Any, **___: Any) -> Mapping[str, Any]:
    """Return vLLM's second argument, by place or by name."""
    return mm_data


def _committer(processor: Any) -> Any:
    """Return vLLM's processor, without its work on no items where none is missing: a third of a repeat's CPU here."""
    if not hasattr(processor, "_get_mm_hashes"):  # before vLLM 0.32 these have other arguments
        return processor
    committer = copy(processor)

    def process(mm_items: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> Any:
        return processor._apply_hf_processor_main(mm_items, hf_kwargs) if any(mm_items.values()) else {}

    def fields(hf_inputs: Any, options: Mapping[str, object]) -> Any:
        return processor._get_mm_fields_config(hf_inputs, options) if hf_inputs else {}

    def updates(mm_items: Mapping[str, Any], options: Mapping[str, object], made: Any) -> Any:
        return processor._get_mm_prompt_updates(mm_items, options, made) if any(mm_items.values()) else {}

    committer._apply_hf_processor_main, committer._get_mm_fields_config = process, fields
    committer._get_mm_prompt_updates = updates
    return committer


def _hashes(processor: Any, inputs: _HashedInputs) -> Mapping[Modality, list[str]]:
    if (own := getattr(processor, "_get_mm_hashes", None)) is not None:  # since 0.32
        return cast("Mapping[Modality, list[str]]", own(inputs))
    info = processor.info
    return cast(
        "Mapping[Modality, list[str]]",
        inputs.get_mm_hashes(info.model_id, info.ctx.get_mm_config().mm_hasher_algorithm),
    )


def _options(processor: Any, inputs: _HashedInputs, modality: str, index: int) -> Mapping[str, object]:
    """Return the `mm_processor_kwargs` of one item: since vLLM 0.32 they may have a value for each."""
    select = getattr(processor, "_get_cache_missing_processor_kwargs", None)
    if select is None:
        return cast("Mapping[str, object]", inputs.hf_processor_mm_kwargs)
    others = {
        name: [name != modality or number != index for number in range(len(its))]
        for name, its in inputs.mm_data_items.items()
    }
    return cast("Mapping[str, object]", select(inputs, others))
