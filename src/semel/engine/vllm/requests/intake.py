"""The way of a request into vLLM, once its input is built: vLLM's checks, its new items, its place in the order.

Items go into vLLM's cache in the order in which its engine core sees them, under one lock. A request with several
answers or many new items has these delivered first (`item_delivery`). What takes long for many items is done next to
the event loop, or in slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final

from semel.aio import at_once, in_slices, to_the_end
from semel.core import Digest, Submission
from semel.engine.vllm.compat.internals import add_validated, pause_after_large
from semel.engine.vllm.requests.inputs import input_items, set_items
from semel.engine.vllm.requests.item_builder import FEW_ITEMS, BuiltInput, ItemBuilder
from semel.engine.vllm.requests.item_cache import Admission, ItemCache
from semel.engine.vllm.requests.item_delivery import ItemDelivery
from semel.engine.vllm.requests.sampling import refusals

__all__ = ["RequestIntake"]

_NO_ITEMS: Final = Admission(())


class RequestIntake:
    """The way of requests into vLLM."""

    def __init__(
        self, llm: Any, cache: ItemCache, builder: ItemBuilder, delivery: ItemDelivery, order: asyncio.Lock
    ) -> None:
        pause_after_large(llm, FEW_ITEMS)
        self._llm = llm
        self._cache = cache
        self._builder = builder
        self._delivery = delivery
        self._order = order

    async def add(
        self, submission: Submission, built: BuiltInput, params: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Admission]:
        """Return what vLLM's answer comes from, and what became of the request's items."""
        if not submission.prompt.items:  # nothing goes into the item cache, so vLLM may refuse it at any time
            return await self._added(submission.request_id, built.prompt, params, options), _NO_ITEMS
        try:
            request = await self._validated(submission, built.prompt, params, options)
            answers = 1 if submission.pools else params.n
            delivered = await self._deliver(submission, built, answers)
            async with self._order:
                self._llm.check_admission(answers, submission.request_id)
                return await self._admitted(submission, built.prompt, params, options, request, delivered)
        finally:
            self._builder.drop(built.items)

    async def _added(self, request_id: str, prompt: Any, params: Any, options: Mapping[str, Any]) -> Any:
        try:
            with refusals():
                return await self._llm.add_request(request_id, prompt, params, **options)
        except BaseException:
            await asyncio.shield(self._llm.abort(request_id))
            raise

    async def _validated(self, submission: Submission, prompt: Any, params: Any, options: Mapping[str, Any]) -> Any:
        """Return the request as vLLM's engine core takes it, after vLLM's own checks, which leave no trace."""
        tasks = await self._llm.get_supported_tasks()
        fields = {name: options[name] for name in ("trace_headers", "priority", "lora_request") if name in options}
        check = self._llm.input_processor.process_inputs
        process = partial(check, submission.request_id, prompt, params, tasks, **fields)
        with refusals():
            return await self._builder.run(process, len(submission.prompt.items))

    async def _deliver(self, submission: Submission, built: BuiltInput, answers: int) -> AbstractSet[Digest]:
        """Return those of the request's items that went to the engine core before it."""
        fresh = await in_slices(self._delivery.due(submission, built.items, answers))
        if not fresh:
            return frozenset()
        self._llm.check_admission(answers, submission.request_id)
        return await self._delivery.deliver(submission.request_id, fresh, submission.features, built.items)

    async def _admitted(
        self,
        submission: Submission,
        prompt: Any,
        params: Any,
        options: Mapping[str, Any],
        request: Any,
        delivered: AbstractSet[Digest],
    ) -> tuple[Any, Admission]:
        """Put the request's items into the cache, and the request into vLLM.

        With many items there are pauses, in which the caller may be cancelled. Half an admission would leave the mirror
        and the engine core apart, so it goes on to its end, and the request is dropped then.
        """
        items = submission.prompt.items
        admitting = self._cache.admission(
            items, input_items(prompt), submission.features, submission.client_features, delivered
        )
        if len(items) <= FEW_ITEMS:
            admission = at_once(admitting)
            at_once(set_items(request, input_items(prompt)))
            return await self._added_with(admission, request, params, options), admission

        async def admit() -> tuple[Any, Admission]:
            admission = await in_slices(admitting)
            await in_slices(set_items(request, input_items(prompt)))
            return await self._added_with(admission, request, params, options), admission

        try:
            return await to_the_end(admit())
        except asyncio.CancelledError:
            await asyncio.shield(self._llm.abort(submission.request_id))
            raise

    async def _added_with(self, admission: Admission, request: Any, params: Any, options: Mapping[str, Any]) -> Any:
        """Return what vLLM's answer comes from, now that it has the request and the items of its admission."""
        request_id = request.request_id  # vLLM gives it another one
        try:
            return await add_validated(self._llm, request, params, options)
        except BaseException:
            try:
                await asyncio.shield(self._llm.abort(request_id))
            finally:
                self._cache.take_back(admission)
            raise
