"""Following grammars in vLLM's engine core, held to what they may cost others (threats S27).

vLLM finds the tokens that each grammar allows before every step, and the whole batch waits for the slowest. Here that
runs in a `Lane`, where each call has a deadline; what a tenant's grammars take is charged to it. A request ends alone,
with an error, if one of its calls is overdue, or if its steps took a second more than 5 ms each. While other tenants
are about, requests of one that owes too much are held back, and its expensive ones sit steps out.

An exception in here switches all of it off with a line in the log: the engine goes on as vLLM's.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from semel.core import tenant_name
from semel.engine.vllm.grammars.lane import Lane, Overdue
from semel.engine.vllm.grammars.limits import BUSY, EXPENSIVE, MAX_CALL_S
from semel.engine.vllm.grammars.meter import FollowingAccounts

__all__ = ["Followed", "Following"]

_REJECTED: Final = ""
"""A token that the grammar does not allow: vLLM's own error, without a reason."""

_MAX_ABANDONED: Final = 2
"""Threads of one tenant."""

_FREE_STEP_NS: Final = 5_000_000
_MAX_EXCESS_NS: Final = 1_000_000_000
_CHEAP_NS: Final = 500_000
"""Of a step: less is what following ordinary schemas takes, and is not charged."""

_STEP_NS: Final = 50_000_000
"""That the grammars of one tenant may take of a step, all together, where they can sit it out."""

_ENDED_DEBT_NS: Final = 500_000_000
"""Over this debt the most expensive request ends, where requests cannot be held back."""

_WRITE_NS: Final = 1_000_000_000

logger = logging.getLogger(__name__)


class Followed(StructuredOutputGrammar):  # type: ignore[misc]
    """A request's grammar, followed in the lane only.

    vLLM accepts tokens where it cannot be interrupted, so that is put off until the next mask.
    """

    def __init__(self, inner: Any, request_id: str, tenant: str, lane: Lane) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.ending: str | None = None
        """Why the request is to end."""

        self.is_direct = False
        """True if the lane is switched off."""

        self.step_ns = 0
        self.last_ns = 0
        self.excess_ns = 0
        self.last_step = 0
        self._inner = inner
        self._lane = lane
        self._pending: list[int] = []
        self._is_rejected = False

    def settle(self, step: int) -> None:
        """Close a step's account."""
        self.last_ns, self.step_ns, self.last_step = self.step_ns, 0, step
        self.excess_ns += max(0, self.last_ns - _FREE_STEP_NS)
        if self._is_rejected:
            self.ending = _REJECTED
        elif self.ending is None and self.excess_ns > _MAX_EXCESS_NS:
            self.ending = EXPENSIVE

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Note tokens for later; drafts are accepted at once, in the lane."""
        if self.is_direct or self._lane.is_inside:
            self._catch_up()
            return bool(self._call(self._inner.accept_tokens, request_id, tokens))
        self._pending += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Check drafts."""
        if self.ending is not None:
            return []
        if self.is_direct or self._lane.is_inside:
            return self._validate(tokens)
        try:
            return self._lane.run(lambda: self._validate(tokens))
        except Overdue:
            self.ending = EXPENSIVE
            return []

    def rollback(self, num_tokens: int) -> None:
        """Take drafts back."""
        if self.ending is None:
            self._call(self._inner.rollback, num_tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Fill in the mask of the allowed tokens."""
        self._catch_up()
        self._call(self._inner.fill_bitmask, bitmask, batch_index)

    def is_terminated(self) -> bool:
        """Return whether nothing is held to it any more; vLLM then allows every token."""
        if self.ending is not None:
            return True
        if self.is_direct or self._lane.is_inside:
            self._catch_up()
        return bool(self._inner.is_terminated())

    def reset(self) -> None:
        """Begin again."""
        self._pending.clear()
        self._inner.reset()

    def _validate(self, tokens: list[int]) -> list[int]:
        self._catch_up()
        found: list[int] = self._call(self._inner.validate_tokens, tokens)
        return found

    def _catch_up(self) -> None:
        """Accept what was put off."""
        if self._pending:
            tokens, self._pending = self._pending, []
            if not self._call(self._inner.accept_tokens, self.request_id, tokens):
                self._is_rejected = True

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not self._lane.is_inside:
            return function(*arguments)
        result, cpu_ns = self._lane.call(self, function, *arguments)
        self.step_ns += cpu_ns
        return result


class Following:
    """The grammars of an engine core, as its scheduler sees them; vLLM's own way if it is off. No method raises."""

    def __init__(self, scheduler: Any, *, is_on: bool = True, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._scheduler = scheduler
        self._clock_ns = clock_ns
        self._lane = Lane(MAX_CALL_S)
        self._accounts = FollowingAccounts()
        self._expensive: dict[str, Followed] = {}
        """By request: those whose last step was not cheap."""

        self._endings: dict[str, str] = {}
        self._cpu_ns = 0
        self._ended = 0
        self._written_ns = 0
        self._is_off = not is_on
        self._step = 0
        config = scheduler.vllm_config
        self._sits_out = (
            config.speculative_config is None  # drafts of a step that was sat out gave tokens outside the mask
            and config.parallel_config.distributed_executor_backend != "external_launcher"  # a scheduler for each rank
            and hasattr(scheduler, "current_step")
        )
        if is_on:  # batches of vLLM's own pool would go on with grammars whose thread was abandoned
            scheduler.structured_output_manager.fill_bitmask_parallel_threshold = sys.maxsize

    def totals(self) -> Mapping[str, int]:
        """Return what was done so far, under the names of `EncoderTotals`."""
        return {
            "following_ns": self._cpu_ns,
            "following_ended": self._ended,
            "following_abandoned": self._lane.abandoned(),
        }

    def see(self, request: Any) -> None:
        """Note a request that came."""
        self._guarded(lambda: self._accounts.see(tenant_name(request.cache_salt), self._clock_ns()))

    def bitmask(self, output: Any, compute: Callable[[], Any]) -> Any:
        """Compute the masks of a step in the lane, without the grammars that are overdue."""
        if self._is_off or not output.has_structured_output_requests:
            return compute()
        try:
            return self._bitmask(output, compute)
        except Exception as error:  # noqa: BLE001 - the engine would die of it; what is vLLM's own comes again below
            self._switch_off(error)
            return compute()

    def plan(self) -> None:
        """Let the expensive requests of tenants that owe too much sit the next step out."""
        if self._expensive:
            self._guarded(self._plan)

    def holds_back(self, request: Any) -> bool:
        """Return whether a request that waits has to go on waiting; one whose tenant has too many lost threads ends."""
        if self._is_off or request.structured_output_request is None:
            return False
        return bool(self._guarded(lambda: self._holds_back(request)))

    def take_endings(self) -> dict[str, str]:
        """Return the requests that are to end, and why, once."""
        if not self._endings:
            return {}
        endings, self._endings = self._endings, {}
        present = {name: reason for name, reason in endings.items() if name in self._scheduler.requests}
        for name, reason in present.items():
            self._expensive.pop(name, None)
            if reason:
                logger.warning("request %s is ended: its grammar is too expensive to follow (%s)", name, reason)
        self._ended += sum(map(bool, present.values()))
        return present

    def _bitmask(self, output: Any, compute: Callable[[], Any]) -> Any:
        followed = list(self._followed(output))
        while True:
            try:
                masks = self._lane.run(compute)
                break
            except Overdue as overdue:
                self._abandon(overdue.owner, followed)
        now_ns, self._step = self._clock_ns(), self._step + 1
        for one in followed:
            self._cpu_ns += one.step_ns
            if one.step_ns > _CHEAP_NS:
                self._accounts.charge(one.tenant, one.step_ns, now_ns)
            one.settle(self._step)
            if one.ending is not None:
                self._endings[one.request_id] = one.ending
            elif one.last_ns > _CHEAP_NS:
                self._expensive[one.request_id] = one
            else:
                self._expensive.pop(one.request_id, None)
        return masks

    def _followed(self, output: Any) -> Iterable[Followed]:
        """Yield the grammars of a step, each wrapped when it is used for the first time."""
        for request_id in output.num_scheduled_tokens:
            request = self._scheduler.requests.get(request_id)
            structured = None if request is None else request.structured_output_request
            if structured is None or not isinstance(grammar := structured.grammar, StructuredOutputGrammar):
                continue
            if not isinstance(grammar, Followed):
                grammar = Followed(grammar, request_id, tenant_name(request.cache_salt), self._lane)
                structured.grammar = grammar
            yield grammar

    def _abandon(self, owner: Followed, followed: Iterable[Followed]) -> None:
        """End a request whose call is overdue; with it all of its tenant's if too many of its threads are lost."""
        owner.ending = EXPENSIVE
        owner.step_ns += int(MAX_CALL_S * 1e9)
        self._scheduler.structured_output_manager._grammar_bitmask = None  # the lost thread may still write to it
        if self._lane.abandoned(owner.tenant) >= _MAX_ABANDONED:
            for one in followed:
                if one.tenant == owner.tenant and one.ending is None:
                    one.ending = BUSY

    def _plan(self) -> None:
        now_ns, requests = self._clock_ns(), self._scheduler.requests
        groups: defaultdict[str, list[Followed]] = defaultdict(list)
        for request_id, one in list(self._expensive.items()):
            if request_id in requests:
                groups[one.tenant].append(one)
            else:
                del self._expensive[request_id]
        for request in requests.values():
            self._accounts.see(tenant_name(request.cache_salt), now_ns)
        for tenant, group in groups.items():
            if not self._accounts.is_shared(tenant, now_ns):
                continue
            if not self._sits_out:
                if self._accounts.debt_ns(tenant, now_ns) > _ENDED_DEBT_NS:
                    self._endings[max(group, key=lambda one: one.last_ns).request_id] = BUSY
                continue
            left_ns = 0 if self._accounts.is_over(tenant, now_ns) else _STEP_NS
            for one in sorted(group, key=lambda one: one.last_step):
                if left_ns <= 0:
                    self._sit_out(requests[one.request_id])
                left_ns -= one.last_ns

    def _sit_out(self, request: Any) -> None:
        eligible = self._scheduler.current_step + 2  # the next step is the one after the current
        request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)

    def _holds_back(self, request: Any) -> bool:
        tenant = tenant_name(request.cache_salt)
        if self._lane.abandoned(tenant) >= _MAX_ABANDONED:
            self._endings[request.request_id] = BUSY
            return True
        return self._accounts.is_over(tenant, self._clock_ns())

    def _guarded(self, work: Callable[[], Any]) -> Any:
        if self._is_off:
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the engine would die of it
            self._switch_off(error)
            return None

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        logger.error("grammars are followed without limits from now on: an error in semel", exc_info=error)
        for request in self._scheduler.requests.values():
            structured = request.structured_output_request
            if structured is not None and isinstance(grammar := structured.grammar, Followed):
                grammar.is_direct = True

    def write_due(self) -> bool:
        """Return whether the totals should be written again."""
        now_ns = self._clock_ns()
        is_due = bool(self._cpu_ns) and now_ns - self._written_ns > _WRITE_NS
        self._written_ns = now_ns if is_due else self._written_ns
        return is_due
