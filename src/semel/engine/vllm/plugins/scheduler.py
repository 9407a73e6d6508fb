"""vLLM's scheduler, with semel's lazy transfer of items at the end of a step, or with its encoder planning as well.

vLLM calls this interface unstable, so the plug-ins are optional and override little. Lazy transfer overrides the end of
a step (`schedule`), where large tensors that the step does not encode are left out, and what becomes of a step's
results (`update_from_output`), where requests end whose items the encoder's output did not fit. Around that, grammars
are followed within limits (`grammars.following`): where masks are made, where a step is planned, and where a request
waits. Planning overrides what to encode for one request (`_try_schedule_encoder_inputs`), what a request has used
(`_free_encoder_inputs`), and also the end of a step, where an encode whose request was preempted in the same step
passes to the next request that shows the item (B7).

A hit is held when it is planned, since vLLM commits only what has to be encoded; requests that were not scheduled after
all let go of theirs at the end of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from semel.core import Mask, Placeholder, Timeline
from semel.encoder.plan import Planner, Request
from semel.engine.vllm.compat.internals import drop_encoder_outputs, forget_prefix
from semel.engine.vllm.compat.probes import take_calls
from semel.engine.vllm.compat.versions import PLANNING_SINCE, is_tested
from semel.engine.vllm.grammars.following import Following
from semel.engine.vllm.plugins.encoder_cache import EncoderCache
from semel.engine.vllm.plugins.lazy_transfer import LazyTransfer
from semel.engine.vllm.plugins.pooling_failures import fill_failures
from semel.engine.vllm.plugins.rejection import Rejection, read_not_finite, read_rejections
from semel.engine.vllm.tier.config import has_tier

__all__ = [
    "AsyncLazyTransferScheduler",
    "AsyncPlanningScheduler",
    "LazyTransferScheduler",
    "PlanningScheduler",
    "create_lazy_transfer_scheduler",
    "create_plain_scheduler",
    "create_scheduler",
]

logger = logging.getLogger(__name__)


def create_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `--scheduler-cls` names: the scheduler that vLLM would use here, with semel's planning in it."""
    is_async = vllm_config.scheduler_config.async_scheduling
    missing = "encoder planning and releasing that do not slow down with the number of items"
    if is_tested("scheduler", missing, since=PLANNING_SINCE):
        return (AsyncPlanningScheduler if is_async else PlanningScheduler)(vllm_config, *args, **kwargs)
    return (AsyncScheduler if is_async else Scheduler)(vllm_config, *args, **kwargs)


def create_lazy_transfer_scheduler(vllm_config: Any, *args: Any, limits_grammars: bool = True, **kwargs: Any) -> Any:
    """Create the scheduler of `--scheduler-cls`: the one that vLLM would use here, with lazy transfer."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if is_tested("lazy transfer of items", "worker processes get the tensors of an item only to encode it"):
        kind = AsyncLazyTransferScheduler if is_async else LazyTransferScheduler
        return kind(vllm_config, *args, limits_grammars=limits_grammars, **kwargs)
    return (AsyncScheduler if is_async else Scheduler)(vllm_config, *args, **kwargs)


def create_plain_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the same for plain vLLM with semel inside: grammars cost what they cost there."""
    return create_lazy_transfer_scheduler(vllm_config, *args, limits_grammars=False, **kwargs)


class LazyTransferScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with semel's lazy transfer."""

    def __init__(self, *args: Any, limits_grammars: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy_transfer = LazyTransfer.from_config(self.vllm_config)
        self._tier = self.ec_connector.books if has_tier(self.vllm_config) else None
        self._following = Following(self, is_on=limits_grammars)
        self.max_num_scheduled_tokens: int
        self._plans = False
        self._pools = self.vllm_config.model_config.runner_type == "pooling"
        self._first_chunk = 0
        self._late_bytes = 0
        take_calls()
        if isinstance(self.encoder_cache_manager, EncoderCache):
            self.encoder_cache_manager.include(self._totals)
            if self._tier is not None:
                self._tier.on_change = self.encoder_cache_manager.write_totals

    def _totals(self) -> dict[str, int]:
        return {**self._following.totals(), **({} if self._tier is None else self._tier.totals())}

    def add_request(self, request: Any) -> None:
        """Take a request."""
        self._following.see(request)
        super().add_request(request)

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Find the tokens that the grammars of a step allow."""
        return self._following.bitmask(scheduler_output, partial(super().get_grammar_bitmask, scheduler_output))

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Return whether a request that waits can be scheduled."""
        return not self._following.holds_back(request) and super()._handle_blocked_waiting_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step."""
        self._following.plan()
        is_cut = self._first_chunk and self.requests
        output = self._cut(super().schedule) if is_cut else super().schedule(*args, **kwargs)
        self._settle(output)
        if self._lazy_transfer is not None:
            shipped = self._lazy_transfer.ship(output, self.requests)
            self._late_bytes += shipped.late_bytes
            if isinstance(self.encoder_cache_manager, EncoderCache):
                self.encoder_cache_manager.count(shipped)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take what a step made; end requests with items that the encoder's output did not fit, or costly grammars."""
        rejections, endings = read_rejections(model_runner_output), self._following.take_endings()
        not_finite = read_not_finite(model_runner_output)
        if (not_finite or self._following.write_due()) and isinstance(self.encoder_cache_manager, EncoderCache):
            self.encoder_cache_manager.not_finite += not_finite
            self.encoder_cache_manager.write_totals()
        if not rejections and not endings:
            return self._update(scheduler_output, model_runner_output, {})
        rejected = self._concerned(rejections)
        reasons = endings | {request_id: rejection.reason for request_id, rejection in rejected.items()}
        _withhold(model_runner_output, reasons)
        self.encoder_cache_mismatch_reqs.update(reasons)  # vLLM ends them with an error
        outputs = self._update(scheduler_output, model_runner_output, reasons)
        if rejections:
            self._forget(rejections, len(rejected))
        return outputs

    def _update(self, scheduler_output: Any, model_runner_output: Any, reasons: Mapping[str, str]) -> Any:
        """Have vLLM take what a step made. `reasons` are those of the requests that it ends with an error."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if reasons:
            for output in (output for of_client in outputs.values() for output in of_client.outputs):
                if reason := reasons.get(output.request_id):
                    output.stop_reason = reason
        if self._pools:
            fill_failures(outputs)
        return outputs

    def probe(self, command: str, names: Sequence[str]) -> dict[str, int]:
        """Do what the proof at start asks for between two steps (`semel.engine.vllm.proof`); returns counts.

        `count` does nothing; the names are keys of encoder outputs. `drop` drops these from the device, and the tier
        keeps them. `cut` lets the next step compute so many tokens only. `unplanned` leaves planning to vLLM until
        `planned`. `off` switches a capability off for this run.
        """
        if command == "drop":
            self._drop(names, 0)
        elif command == "cut":
            self._first_chunk = int(names[0])
        elif command in ("planned", "unplanned"):
            self._plans = command == "planned"
        elif command == "off":
            self._switch_off(names)
        lazy_transfer, tier = self._lazy_transfer, self._tier
        totals = {} if tier is None else tier.totals()
        return {
            "has_lazy_transfer": int(lazy_transfer is not None and lazy_transfer.is_on),
            "late_bytes": self._late_bytes,
            "has_encoder_planning": int(self._plans),
            "has_host_tier": int(tier is not None and tier.is_on),
            "saved": 0 if tier is None else sum(tier.host_cache.filled(name) is not None for name in names),
            "loads": totals.get("tier_loads", 0),
            "prefetched": totals.get("tier_prefetched", 0),
        }

    def _switch_off(self, names: Sequence[str]) -> None:
        if "host_tier" in names and self._tier is not None:
            self._tier.switch_off()
        if "lazy_transfer" in names and self._lazy_transfer is not None:
            self._lazy_transfer.is_on = False
        if "encoder_planning" in names:
            self._plans = False

    def _cut(self, schedule: Callable[[], Any]) -> Any:
        """Plan a step of few tokens: an item behind them is encoded by a later one."""
        whole, self.max_num_scheduled_tokens, self._first_chunk = self.max_num_scheduled_tokens, self._first_chunk, 0
        try:
            return schedule()
        finally:
            self.max_num_scheduled_tokens = whole

    def _forget(self, rejections: Iterable[Rejection], requests: int) -> None:
        """Forget the outputs of items that did not fit, with which so many requests were ended."""
        identifiers = [rejection.identifier for rejection in rejections]
        self._drop(identifiers, requests)
        if self._tier is not None:
            self._tier.forget(identifiers)

    def _drop(self, identifiers: Sequence[str], requests: int) -> None:
        """Drop outputs from the device, after so many requests with them were ended."""
        if isinstance(self.encoder_cache_manager, EncoderCache):
            self.encoder_cache_manager.reject(identifiers, requests)
        else:
            drop_encoder_outputs(self.encoder_cache_manager, identifiers)

    def reset_encoder_cache(self) -> None:
        """Forget every encoder output: the weights change. vLLM does not tell its connectors.

        Requests that wait for their first step were submitted before, and so may find prefixes of before: they look for
        none. Those that had one go on with what they have.
        """
        super().reset_encoder_cache()
        for request in self.requests.values():
            if not (request.num_computed_tokens or request.num_preemptions):
                request.skip_reading_prefix_cache = True
        if self._tier is not None:
            self._tier.reset()

    def _concerned(self, rejections: Iterable[Rejection]) -> dict[str, Rejection]:
        """Return the requests that may have used an output which did not fit, or a prefix that was computed with it.

        They have been scheduled; those that wait will have the item encoded for themselves.
        """
        ended = {}
        for rejection in rejections:
            for request in self.requests.values():
                if request.status not in (RequestStatus.RUNNING, RequestStatus.PREEMPTED):
                    continue
                if (feature := rejection.concerns(request.mm_features)) is None:
                    continue
                ended[request.request_id] = rejection
                if request.status == RequestStatus.RUNNING and not self.is_encoder_decoder:
                    forget_prefix(self, request.request_id, feature.mm_position.offset)
                logger.warning("request %s is ended: %s", request.request_id, rejection)
        return ended

    def _settle(self, output: Any) -> None:
        """Amend what the step encodes, before it is decided what travels with it."""


class AsyncLazyTransferScheduler(LazyTransferScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same over vLLM's asynchronous scheduler."""


class PlanningScheduler(LazyTransferScheduler):
    """vLLM's scheduler with semel's lazy transfer and encoder planning."""

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
        self._plans = True

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
        """Return what planning has to know of a request, read once; None for one that vLLM has to plan itself."""
        if not self._plans:
            return None
        try:
            known = self._read[request]
        except KeyError:
            timeline = Timeline.encoder(()) if self.is_encoder_decoder else Timeline.decoder(())
            known = Request(request.request_id, timeline, [])
        if known is not None and len(known.keys) < len(request.mm_features):
            known = self._read[request] = self._read_more(request, known)
        return known

    def _read_more(self, request: Any, known: Request) -> Request | None:
        """Let a streaming session get more inputs while it runs; what is known of it stays."""
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
        """End a request with an error: an identifier stands for two items of different sizes."""
        key, size = planned.keys[index], planned.timeline[index].num_embeds
        known = self._planner.residency.size(key)
        if known is None:
            known = planned.timeline[planned.keys.index(key)].num_embeds
        identifier = request.mm_features[index].identifier
        self._reject_on_encoder_cache_embed_mismatch(request, index, identifier, known, size)


class AsyncPlanningScheduler(PlanningScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same over vLLM's asynchronous scheduler."""


def _withhold(output: Any, request_ids: Iterable[str]) -> None:
    """Take what a step made for requests out of its output: a first token would reach their clients, or be the last."""
    for request_id in request_ids:
        output.prompt_logprobs_dict.pop(request_id, None)
        output.prompt_token_id_logprobs_dict.pop(request_id, None)
        row = output.req_id_to_index.get(request_id)
        if row is not None and output.sampled_token_ids:
            output.sampled_token_ids[row] = []
        if row is not None and output.pooler_output:
            output.pooler_output[row] = None


def _placeholders(features: Iterable[Any]) -> Iterable[Placeholder]:
    for feature in features:
        place = feature.mm_position
        mask = None if place.is_embed is None else Mask(place.is_embed.tolist())
        yield Placeholder(place.offset, place.length, mask)
