"""Execution: renders a parsed request, and submits its prompt to a worker, which streams the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

from semel.core import AnswerParsing, Output, Prompt, Submission, Tenant
from semel.engine import Stream
from semel.engine.observed import Observed
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.fleet import BufferedAnswer, StreamedAnswer, TokenCounts
from semel.fleet.worker import RemoteWorker
from semel.frontend.budget import Account, Loan
from semel.frontend.service import ServedModel
from semel.render import MakeFeature, ParsedRequest
from semel.telemetry.request_context import current_span
from semel.telemetry.spans import span_trace
from semel.telemetry.stages import Stopwatch

__all__ = ["submit", "submit_draft"]

_STEP_BYTES: Final = 64 * 1024
_FREE_OUTPUTS: Final = 16


class _WholeAnswerRoom:
    """Charges an answer that waits to be complete to the request's account, in steps."""

    free_outputs = 0

    def __init__(self, account: Account) -> None:
        self._account = account
        self._nbytes = 0
        self._charged = 0

    def hold(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if (missing := self._nbytes - self._charged) > 0:
            step = max(missing, _STEP_BYTES)
            self._account.grow(step)
            self._charged += step

    def drop(self, nbytes: int) -> None:
        """It is read at once, and kept until it is complete."""

    def clear(self) -> None:
        self._account.shrink(self._charged)
        self._nbytes = self._charged = 0


class _BacklogRoom(Loan):
    """Charges what waits for a slow reader to the request's tenant: the account closes with the first output."""

    __slots__ = ()
    free_outputs = _FREE_OUTPUTS


class _AccountedStream:
    """A stream that, at its first output, records a time and closes the request's account: the media are dropped."""

    def __init__(
        self,
        stream: Stream,
        account: Account | None,
        watch: Stopwatch | None,
        tokens: TokenCounts,
        observed: Observed | None = None,
    ) -> None:
        self._stream = stream
        self._tokens = tokens
        self._account = account
        self._watch = watch
        self._observed = observed

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs as they arrive. Until the first one, the request can be called back."""
        outputs = aiter(self._stream)
        with nullcontext() if self._account is None else self._account.revocable():
            output = await anext(outputs, None)
        if output is None:
            return
        if self._watch is not None:
            self._watch.lap("first_token")
        self._close_account()
        if self._observed is not None:
            self._observed.take(output)
        self._tokens.generation += len(output.token_ids)
        yield output
        async for output in outputs:
            self._tokens.generation += len(output.token_ids)
            if self._observed is not None:
                self._observed.take(output)
            yield output

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        self._close_account()
        if self._observed is not None:
            self._observed.end()
        await self._stream.close()

    def _close_account(self) -> None:
        if self._account is not None:
            self._account.close()


async def submit_draft(
    serving: ServedModel,
    draft: ParsedRequest,
    *,
    request_id: str,
    sampling: Mapping[str, object],
    tenant: Tenant,
    parsing: AnswerParsing | None = None,
    priority: int = 0,
    opening: ConversationPrefix | None = None,
    kind: type[StreamedAnswer] = StreamedAnswer,
    account: Account | None = None,
    answer_account: Account | None = None,
    ahead: bool = False,
) -> tuple[Stream, Prompt]:
    """Render and submit a parsed request. Returns its answer, of class `kind`, and its prompt.

    The features are dropped when this call returns: the worker has those that it needs. The media stay in memory until
    the first output, in case the worker is lost, so the request's `account` charges them until then; the stream closes
    it. The answer is charged to `answer_account` while it waits, the same unless another one is named. An answer that
    is submitted `ahead` is read later, so the time of its first output means nothing and is not
    recorded.
    """
    media_bytes = sum(media.nbytes for media in draft.media.values())
    serving.check_items(draft.items)
    prefix = b"" if opening is None else opening.key(draft.items, tenant)
    with serving.fleet.preparing(draft.media, prefix=prefix) as worker:
        rendered = await serving.pipeline.render(draft, worker.holding)
    prompt, salt = rendered.prompt, tenant.prefix_salt
    serving.check_length(len(prompt.token_ids))
    submission = Submission(request_id, prompt, rendered.features, sampling, salt, parsing=parsing, priority=priority)
    stream = await submit(
        serving,
        worker,
        submission,
        rendered.make,
        kind,
        account=account,
        answer_account=answer_account,
        keep_bytes=media_bytes,
        ahead=ahead,
    )
    return stream, prompt


async def submit(
    serving: ServedModel,
    worker: RemoteWorker,
    submission: Submission,
    make: MakeFeature,
    kind: type[StreamedAnswer] = StreamedAnswer,
    *,
    account: Account | None = None,
    answer_account: Account | None = None,
    keep_bytes: int = 0,
    ahead: bool = False,
) -> Stream:
    """Submit to a worker. Until the first output the account charges `keep_bytes`, from which features can be remade.

    The time of the first output is not recorded if the answer is submitted `ahead`.
    """
    span = current_span()
    observed = Observed.begin(span, submission, serving.model)
    if (trace := span_trace(span)) is not None:
        submission = replace(submission, trace=trace)
    watch = Stopwatch(serving.pipeline.timings)
    stream = await serving.fleet.submit(worker, submission, make, kind)
    watch.lap("send")
    tokens = serving.fleet.tokens[serving.contract.model]
    tokens.prompt += len(submission.prompt.token_ids)
    if (paying := answer_account or account) is not None:
        stream.charge(_WholeAnswerRoom(paying) if kind is BufferedAnswer else _BacklogRoom(paying, stream.overflow))
    if account is not None:
        account.keep(keep_bytes)
    return _AccountedStream(stream, account, None if ahead else watch, tokens, observed)
