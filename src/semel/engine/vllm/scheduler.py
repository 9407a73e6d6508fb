"""vLLM's scheduler, with semel's shipping of items at the end of a step, or with its encoder planning as well.

vLLM calls this interface unstable, so the plug-ins are optional and override little. Shipping overrides the end of a
step (`schedule`), where large tensors that the step does not encode are left out. Planning overrides what to encode for
one request (`_try_schedule_encoder_inputs`), what a request has used (`_free_encoder_inputs`), and also the end of a
step, where an encode whose request was preempted in the same step passes to the next request that shows the item (B7).

A hit is held when it is planned, since vLLM commits only what has to be encoded; requests that were not scheduled after
all let go of theirs at the end of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from semel.core import Mask, Placeholder, Timeline
from semel.encoder import Planner, Request
from semel.engine.vllm.compat import is_tested
from semel.engine.vllm.encoder_cache import EncoderCache
from semel.engine.vllm.shipping import Shipping

__all__ = [
    "AsyncPlanningScheduler",
    "AsyncShippingScheduler",
    "PlanningScheduler",
    "ShippingScheduler",
    "create_scheduler",
    "create_shipping_scheduler",
]

logger = logging.getLogger(__name__)


def create_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """What `--scheduler-cls` names: the scheduler that vLLM would use here, with semel's planning in it."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if is_tested("scheduler", "encoder planning and releasing that do not slow down with the number of items"):
        return (AsyncPlanningScheduler if is_async else PlanningScheduler)(vllm_config, *args, **kwargs)
    return (AsyncScheduler if is_async else Scheduler)(vllm_config, *args, **kwargs)


def create_shipping_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """What `--scheduler-cls` names: the scheduler that vLLM would use here, and items travel when they are encoded."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if is_tested("shipping of items", "worker processes get the tensors of an item only to encode it"):
        return (AsyncShippingScheduler if is_async else ShippingScheduler)(vllm_config, *args, **kwargs)
    return (AsyncScheduler if is_async else Scheduler)(vllm_config, *args, **kwargs)


class ShippingScheduler(Scheduler):  # type: ignore[misc]
    """Schedules as vLLM does, and sends items to the worker processes as semel does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shipping = Shipping.of(self.vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step."""
        output = super().schedule(*args, **kwargs)
        self._settle(output)
        if self._shipping is not None:
            shipped = self._shipping.ship(output, self.requests)
            if isinstance(self.encoder_cache_manager, EncoderCache):
                self.encoder_cache_manager.count(shipped)
        return output

    def _settle(self, output: Any) -> None:
        """Amend what the step encodes, before it is decided what travels with it."""


class AsyncShippingScheduler(ShippingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same over vLLM's asynchronous scheduler."""


class PlanningScheduler(ShippingScheduler):
    """Schedules as vLLM does, and plans the encoder as semel does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.encoder_cache_manager: Any
        if not isinstance(self.encoder_cache_manager, EncoderCache):
            size = self.encoder_cache_manager.cache_size
            self.encoder_cache_manager = EncoderCache.create_manager(cache_size=size, vllm_config=self.vllm_config)
        cache = self.encoder_cache_manager
        cache.settles_itself = False
        self._planner = Planner(
            cache.residency,
            shift=self.num_prefill_lookahead,
            chunks_items=not self.scheduler_config.disable_chunked_mm_input,
            is_remote=None if self.ec_connector is None else self.ec_connector.has_cache_item,
        )
        self._read: WeakKeyDictionary[Any, Request | None] = WeakKeyDictionary()

    def _settle(self, output: Any) -> None:
        cache = self.encoder_cache_manager
        settlement = cache.settle(output.num_scheduled_tokens)
        output.free_encoder_mm_hashes[:] = cache.identifiers(settlement.evicted)  # a connector may have this list
        for request_id, index in settlement.taken_over:
            output.scheduled_encoder_inputs.setdefault(request_id, []).append(index)

    def _try_schedule_encoder_inputs(
        self,
        request: Any,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        """Inputs to encode, tokens to compute, budget left, inputs to load, inputs that repeat one of these."""
        started_ns = perf_counter_ns()
        planned = self._request(request)
        if planned is None:
            return super()._try_schedule_encoder_inputs(  # type: ignore[no-any-return]
                request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
            )
        cache = self.encoder_cache_manager
        # vLLM gives back the budget of a preempted request, also for encodes that another one has taken over.
        adopted = cache.residency.adopted
        budget = encoder_compute_budget - adopted
        plan = self._planner.plan(planned, computed=num_computed_tokens, tokens=num_new_tokens, budget=budget)
        if plan.conflict is not None:
            self._refuse(request, planned, plan.conflict)
        for index in plan.hits:
            cache.residency.hold(planned.id, index, planned.keys[index])
        cache.cuts += plan.cut is not None
        cache.planning_ns += perf_counter_ns() - started_ns
        return list(plan.encodes), plan.tokens, plan.budget + adopted, list(plan.loads), list(plan.repeats)

    def _free_encoder_inputs(self, request: Any) -> None:
        """Let go of the inputs that lie, with the look-ahead, behind what is computed for certain."""
        cached_ids = self.encoder_cache_manager.get_cached_input_ids(request)
        if not cached_ids:
            return
        planned = self._request(request)
        if planned is None:
            super()._free_encoder_inputs(request)
            return
        if planned.timeline.is_encoder:
            used = len(planned.timeline) if request.num_computed_tokens > 0 else 0
        else:
            passed = request.num_computed_tokens - request.num_output_placeholders - self.num_prefill_lookahead
            used, _ = planned.timeline.window(passed, passed)
        for index in [index for index in cached_ids if index < used]:
            self._free_encoder_input(request, index)

    def _request(self, request: Any) -> Request | None:
        """What planning has to know of a request, read once; None for one that vLLM has to plan itself."""
        try:
            known = self._read[request]
        except KeyError:
            timeline = Timeline.encoder(()) if self.is_encoder_decoder else Timeline.decoder(())
            known = Request(request.request_id, timeline, [])
        if known is not None and len(known.keys) < len(request.mm_features):
            known = self._read[request] = self._read_more(request, known)
        return known

    def _read_more(self, request: Any, known: Request) -> Request | None:
        """A streaming session gets more inputs while it runs; what is known of it stays."""
        seen, total = len(known.keys), len(request.mm_features)
        placeholders = _placeholders(request.mm_features[seen:])
        try:
            timeline = (
                Timeline.encoder((*known.timeline, *placeholders))
                if self.is_encoder_decoder
                else known.timeline.followed_by(placeholders)
            )
        except ValueError as error:
            logger.warning("request %s is planned by vLLM, not by semel: %s", request.request_id, error)
            return None
        keys = [*known.keys, *(self.encoder_cache_manager.key(request, index) for index in range(seen, total))]
        return replace(known, timeline=timeline, keys=keys)

    def _refuse(self, request: Any, planned: Request, index: int) -> None:
        """An identifier stands for two items of different sizes: vLLM ends the request with an error."""
        key, size = planned.keys[index], planned.timeline[index].num_embeds
        known = self._planner.residency.size(key)
        if known is None:
            known = planned.timeline[planned.keys.index(key)].num_embeds
        identifier = request.mm_features[index].identifier
        self._reject_on_encoder_cache_embed_mismatch(request, index, identifier, known, size)


class AsyncPlanningScheduler(PlanningScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same over vLLM's asynchronous scheduler."""


def _placeholders(features: Iterable[Any]) -> Iterable[Placeholder]:
    for feature in features:
        place = feature.mm_position
        mask = None if place.is_embed is None else Mask(place.is_embed.tolist())
        yield Placeholder(place.offset, place.length, mask)
