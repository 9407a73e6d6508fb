"""The answer of vLLM to one submission, and vLLM's errors in our words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from semel.core import Digest, Output
from semel.engine.vllm.grammars.limits import BUSY, EXPENSIVE, TOO_EXPENSIVE
from semel.engine.vllm.plugins.rejection import Rejection
from semel.engine.vllm.requests.item_cache import ItemCache
from semel.engine.vllm.requests.parsing import AnswerReader
from semel.engine.vllm.requests.progress import StepCounter
from semel.engine.vllm.requests.sampling import to_outputs
from semel.errors import (
    Busy,
    EngineDead,
    EngineFailed,
    FeatureMissing,
    FeatureRejected,
    InvalidRequest,
    NotReady,
    SemelError,
)

__all__ = ["VllmStream", "failures"]

_BUSY: Final = "your schemas and grammars take more than their share of the engine's CPU time: send it again later"

_DRAFTED: Final = "{}: the engine's drafts have left no token that it allows; send it again"
"""vLLM 0.32 gives a grammar a token outside its mask now and then if it drafts tokens, whoever sent it."""


class VllmStream:
    """The answer to one submission."""

    def __init__(
        self,
        llm: Any,
        collector: Any,
        item_cache: ItemCache,
        referred: tuple[Digest, ...],
        reader: AnswerReader | None = None,
        steps: StepCounter | None = None,
    ) -> None:
        self._llm = llm
        self._steps = steps
        self._collector = collector
        self._items = item_cache
        self._referred = referred
        self._reader = reader
        self._begun = False
        self._has_output = False
        self._finished = False
        self.form: str | None = None
        """The field of the request that its answer is held to, if there is one."""

        self.has_drafts = False
        """Whether vLLM drafts tokens (speculative decoding)."""

        self.on_close: Callable[[], None] = _pass
        """Called when nothing more is wanted, and vLLM has the abort."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield the outputs as they are generated."""
        with failures():
            while not self._finished:
                result = self._collector.get_nowait() or await self._collector.get()
                self._finished = result.finished
                if failed := [part for part in result.outputs if part.finish_reason == "error"]:
                    self._begun = self._begun or bool(failed[0].token_ids)
                    raise self._failure(failed[0].stop_reason)
                for output in to_outputs(result, is_first=not self._has_output):
                    self._has_output = True
                    self._begun = self._begun or bool(output.token_ids)
                    if self._reader is not None:
                        output = self._reader.read(output, result.prompt_token_ids)
                    yield output

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        self._collector.close()
        try:
            if not self._finished:
                self._finished = True
                await self._llm.abort(self._collector.request_id, internal=True)
                if self._steps is not None:
                    self._steps.review()
        finally:
            self.on_close()

    def _failure(self, reason: object) -> SemelError:
        if (rejection := Rejection.of_reason(reason)) is not None:
            return FeatureRejected(str(rejection))
        if reason == EXPENSIVE:
            return InvalidRequest(f"the schema or grammar: {TOO_EXPENSIVE}")
        if reason == BUSY:
            return Busy(_BUSY)
        if self._begun and self.form is not None:  # its grammar has rejected a token: no fault of the engine (S31)
            if self.has_drafts:
                return Busy(_DRAFTED.format(self.form))
            return InvalidRequest(
                f"{self.form}: no token was left that it allows; check it, and the sampling parameters that exclude "
                "tokens"
            )
        if self._begun or not self._referred:
            return EngineFailed("the engine gave up on the request; sending it again may succeed")
        return FeatureMissing(self._items.lost(self._referred))


def _pass() -> None:
    """Do nothing."""


@contextmanager
def failures() -> Iterator[None]:
    """Raise what vLLM raises inside as our own errors."""
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (MaxQueuedTokensError, QueueOverflowError) as error:
        raise NotReady("the engine's queue is full (--max-num-queued-reqs, --max-num-queued-tokens)") from error
    except EngineDeadError as error:
        raise EngineDead("the engine has died; its log says why, and it has to be started again") from error
