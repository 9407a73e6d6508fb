"""Turns at an engine: which request of which tenant begins next (threats S21). Pure: the clock is passed in.

An engine serves its queue in order of arrival and knows no tenants. So it gets only what keeps it busy: a window of
sequences, and of prompts that it has not computed yet. The others wait here, in a fair queue: the counter of a tenant
is of tokens, of the prompts that began and of all that was generated.

While several tenants are about, the last eighth of the window is only for a tenant within its share of it: its request
does not wait until a long answer of another ends. A request of several sequences that does not fit may be passed over
by tenants that are hardly ahead in tokens; then the places that become free are left free until it fits. A tenant
without a name, alone, has no window: there are no API keys then, and the engine's own queue is as good.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from semel.fairness.queue import FairQueue, WaitingTenant
from semel.fairness.shares import Shares

__all__ = ["EngineWindow", "Turn", "Turns"]

_UNKNOWN_STEPS: Final = 2  # that an engine begins before a step's output is seen: it plans one while another runs
_AT_HAND: Final = 2  # requests of a tenant ahead of the engine whatever their length: one is computed, one is next


@dataclass(frozen=True, slots=True)
class EngineWindow:
    """The capacity of an engine, as it is configured: sequences at a time, tokens in a step.

    Over `max_sequences` that wait or run, or `max_prompt_tokens` that have not begun, requests are refused.
    """

    sequences: int
    step_tokens: int
    max_sequences: int | None = None
    max_prompt_tokens: int | None = None

    @property
    def lead(self) -> int:
        """The sequences that it gets beyond those that it runs, so that the next one is there when one ends."""
        return max(1, self.sequences // 16)

    @property
    def common_places(self) -> int:
        """The sequences that a tenant may have beyond its share while others are about."""
        reserve = max(1, self.sequences // 8) if self.sequences > 3 else 0
        return self.sequences - reserve

    @property
    def lead_tokens(self) -> int:
        """The tokens that a tenant may have had more than another whose request it passes over: of eight steps."""
        return 8 * self.sequences

    @property
    def prompt_tokens(self) -> int:
        """The tokens of prompts that it gets in advance: half of them are computed before that is known here."""
        return 2 * _UNKNOWN_STEPS * self.step_tokens

    def ends(self, max_tokens: int | None) -> int:
        """Estimate how many of sequences so short have ended before that is known here; of long ones none."""
        return 0 if max_tokens is None else min(_UNKNOWN_STEPS * self.sequences // max_tokens, self.sequences // 2)


class Turn:
    """A request that waits, or that the engine has."""

    __slots__ = ("_ends", "_is_ahead", "_tenant", "is_waiting", "places", "prompt_tokens", "sequences")

    _tenant: WaitingTenant[Turn]

    def __init__(self, sequences: int, prompt_tokens: int, places: int, ends: int) -> None:
        self.sequences = sequences  # that have not ended
        self.places = places  # of the window: as many, but never more than one tenant can have
        self._ends = ends
        self.prompt_tokens = prompt_tokens
        self.is_waiting = True
        self._is_ahead = False

    def __repr__(self) -> str:
        state = "waits" if self.is_waiting else "is in the engine" if self.sequences else "is over"
        return f"Turn({self._tenant.name!r}, {self.sequences} sequences, {state})"


class Turns:
    """The requests of all tenants at one engine. Without a window none waits."""

    def __init__(self, window: EngineWindow | None, now: Callable[[], float] = time.monotonic) -> None:
        self.window = window
        self.waiting: FairQueue[Turn] = FairQueue(now=now)
        self.sequences = Shares(sys.maxsize)  # that wait or that the engine has
        self.places = 0  # of the window that are in use
        self.prompt_tokens = 0  # of requests that wait, or that the engine has and that have no output yet
        self._ahead_tokens = 0
        self._ahead = Shares(sys.maxsize)  # requests that the engine has, and that have no output yet

    def __repr__(self) -> str:
        waiting = self.waiting
        return f"Turns({self.places} places in use, {len(waiting)} requests wait, {waiting.about} tenants)"

    def join(
        self, name: str, prompt_tokens: int, *, max_tokens: int | None = None, sequences: int = 1, priority: int = 0
    ) -> Turn:
        """Let a request wait. The lower its priority the earlier it begins, among those of its tenant."""
        window = self.window
        places = sequences if window is None else min(sequences, window.common_places)
        turn = Turn(sequences, prompt_tokens, places, 0 if window is None else window.ends(max_tokens))
        turn._tenant = self.waiting.add(name, turn, turn, priority)
        self.sequences.change(name, sequences)
        self.prompt_tokens += prompt_tokens
        return turn

    def begin(self) -> Turn | None:
        """Begin the request that the engine gets now, if there is one. Call it until there is none."""
        queue = self.waiting
        if not queue.places.total:
            return None
        skipped: list[WaitingTenant[Turn]] = []
        try:
            while (tenant := queue.first()) is not None:
                turn = tenant.next_item
                if skipped and self._is_ahead(tenant, skipped[0]):
                    return None
                if self._fits(turn, turn.places):
                    return self._enter(queue.take(tenant))
                if not self._fits(turn, 1):
                    return None  # it is its turn; only a request that is too wide for what is free may be passed over
                skipped.append(queue.skip(tenant))
            return None
        finally:
            if skipped:
                queue.restore(skipped)

    def generate(self, turn: Turn, tokens: int) -> bool:
        """Count generated tokens. Returns whether they are the request's first: another one may begin then."""
        turn._tenant.used += tokens
        is_first = turn._is_ahead
        if is_first:
            self._arrive(turn)
        return is_first

    def end(self, turn: Turn) -> None:
        """End one of a request's sequences."""
        if turn.sequences:
            self._shrink(turn, turn.sequences - 1)

    def leave(self, turn: Turn) -> None:
        """End a request, or give it up, whether it waits or not. Leaving twice does no harm."""
        if turn.is_waiting:
            self.waiting.discard(turn._tenant.name, turn)
            turn.is_waiting = False
            turn.places = 0
            self.prompt_tokens -= turn.prompt_tokens
        elif turn._is_ahead:
            self._arrive(turn)
        if turn.sequences:
            self._shrink(turn, 0)

    def _enter(self, turn: Turn) -> Turn:
        tenant = turn._tenant
        tenant.used += max(1, turn.prompt_tokens)
        tenant.running += turn.places
        self._ahead.change(tenant.name, 1)
        turn.is_waiting, turn._is_ahead = False, True
        self.places += turn.places
        self._ahead_tokens += turn.prompt_tokens
        return turn

    def _arrive(self, turn: Turn) -> None:
        """Note that the engine has computed a prompt, or does not have to."""
        turn._is_ahead = False
        self._ahead.change(turn._tenant.name, -1)
        self._ahead_tokens -= turn.prompt_tokens
        self.prompt_tokens -= turn.prompt_tokens

    def _shrink(self, turn: Turn, sequences: int) -> None:
        self.sequences.change(turn._tenant.name, sequences - turn.sequences)
        turn.sequences = sequences
        freed = max(0, turn.places - sequences)
        turn.places -= freed
        turn._tenant.running -= freed
        self.places -= freed

    def _fits(self, turn: Turn, places: int) -> bool:
        """Return whether a request may begin, if it took so many places."""
        window, tenant = self.window, turn._tenant
        if window is None or (not tenant.name and self.waiting.about == 1):
            return True
        if self._ahead[tenant.name] >= _AT_HAND and self._ahead_tokens >= window.prompt_tokens:
            return False
        return self.places + places <= self._limit(window, turn, places)

    def _is_ahead(self, tenant: WaitingTenant[Turn], first: WaitingTenant[Turn]) -> bool:
        """Return whether a tenant has had so much more than the first that it may not pass it over."""
        return self.window is not None and tenant.used - first.used > self.window.lead_tokens

    def _limit(self, window: EngineWindow, turn: Turn, places: int) -> int:
        most = window.sequences + max(window.lead, turn._ends)
        if self.waiting.about == 1:
            return most
        active = max(2, len(self.sequences))  # another may come at any time
        is_within_share = (turn._tenant.running + places - 1) * active < window.sequences  # of one place at least
        return most if is_within_share else window.common_places + turn._ends
