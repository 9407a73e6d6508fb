"""Queue of requests for the engine; `semel.fairness.turns` decides whose turn it is.

A request takes its turn when all that it needs is there, and keeps it until it has ended, however often it has to be
submitted. One that is cancelled while it waits leaves the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from semel.core import Output, Submission, tenant_name
from semel.errors import InvalidRequest, NotReady
from semel.fairness.turns import EngineWindow, Turn, Turns
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["EngineTurns"]


class EngineTurns:
    """The requests of all frontends at one engine. Without a window each goes to the engine at once."""

    def __init__(self, window: EngineWindow | None = None) -> None:
        self._turns = Turns(window)
        self._futures: dict[Turn, asyncio.Future[None]] = {}

    async def take(self, submission: Submission) -> Turn:
        """Wait for a request's turn; its owner gives it back."""
        prompt = submission.prompt
        tokens = len(prompt.token_ids) + len(prompt.encoder_token_ids or ())
        sequences = _positive(submission, "n") or 1
        tenant = tenant_name(submission.cache_salt)
        self._check_width(tenant, sequences)
        self._check_room(sequences, tokens)
        turn = self._turns.join(
            tenant,
            tokens,
            max_tokens=1 if "task" in submission.sampling else _positive(submission, "max_tokens"),  # it may pool
            sequences=sequences,
            priority=submission.priority,
        )
        self._advance()
        if turn.is_waiting:
            future = self._futures[turn] = asyncio.get_running_loop().create_future()
            try:
                await future
            except BaseException:
                self.release(turn)
                raise
        return turn

    def count(self, turn: Turn, output: Output) -> None:
        """Charge a tenant for what the engine has generated."""
        has_changed = self._turns.generate(turn, len(output.token_ids))
        if output.finish_reason is not None:
            self._turns.end(turn)
            has_changed = True
        if has_changed:
            self._advance()

    def release(self, turn: Turn) -> None:
        """End the turn of a request. Releasing twice does no harm."""
        self._futures.pop(turn, None)
        self._turns.leave(turn)
        self._advance()

    def samples(self) -> Iterator[Sample]:
        """Yield samples of its metrics."""
        yield metrics.ENGINE_SEQUENCES, self._turns.places, ()
        yield metrics.ENGINE_WAITING, len(self._turns.waiting), ()

    def _advance(self) -> None:
        while (turn := self._turns.begin()) is not None:
            future = self._futures.pop(turn, None)
            if future is not None and not future.done():
                future.set_result(None)

    def _check_width(self, tenant: str, sequences: int) -> None:
        """Refuse a request that would fill the engine however turns are taken; without names there are no turns."""
        window = self._turns.window
        if window is not None and tenant and sequences > (limit := window.common_places):
            raise InvalidRequest(
                f"n is {sequences:,}: with API keys the engine takes at most {limit:,} answers to one prompt, seven "
                "eighths of its --max-num-seqs: ask for fewer, in several requests"
            )

    def _check_room(self, sequences: int, tokens: int) -> None:
        """Refuse what the engine would refuse if all that waits here waited there."""
        window = self._turns.window
        if window is None:
            return
        for present, more, limit in (
            (self._turns.sequences.total, sequences, window.max_sequences),
            (self._turns.prompt_tokens, tokens, window.max_prompt_tokens),
        ):
            if limit is not None and present + more > limit:
                raise NotReady("the engine's queue is full (--max-num-queued-reqs, --max-num-queued-tokens)")


def _positive(submission: Submission, name: str) -> int | None:
    """Return a sampling parameter that is a number of something; None if it is not there. The engine checks it."""
    value = submission.sampling.get(name)
    return value if isinstance(value, int) and value > 0 else None
