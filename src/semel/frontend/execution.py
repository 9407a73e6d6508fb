"""Execution: renders a parsed request, and submits its prompt to a worker, which streams the answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

from semel.core import AnswerParsing, Prompt, Submission, Tenant
from semel.engine import Stream
from semel.engine.observed import Observed
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.frontend.budget import Account, Loan
from semel.frontend.service import ServedModel
from semel.render import MakeFeature, ParsedRequest
from semel.render.media.source import MediaFile
from semel.telemetry.request_context import current_span
from semel.telemetry.spans import span_trace
from semel.telemetry.stages import Stopwatch

__all__ = ["submit", "submit_request"]

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


@dataclass(slots=True)
class _Reader:
    """Records the time of the first output and closes the request's account: by then the media are dropped."""

    account: Account | None
    watch: Stopwatch | None
    observed: Observed | None

    def waiting(self) -> AbstractContextManager[object]:
        """Let the request be called back until its first output."""
        return nullcontext() if self.account is None else self.account.revocable()

    def begin(self) -> None:
        if self.watch is not None:
            self.watch.lap("first_token")
        if self.account is not None:
            self.account.close()

    def end(self) -> None:
        if self.account is not None:
            self.account.close()
        if self.observed is not None:
            self.observed.end()


async def submit_request(
    serving: ServedModel,
    parsed_request: ParsedRequest,
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
    is submitted `ahead` is read later, so the time of its first output means nothing and is not recorded.
    """
    prefix = b"" if opening is None else opening.key(parsed_request.items, tenant)
    if parsed_request.items:
        media_bytes = sum(media.nbytes for media in parsed_request.media.values())
        is_named = any(isinstance(media, MediaFile) for media in parsed_request.media.values())
        serving.check_items(parsed_request.items)
        with serving.fleet.preparing(parsed_request.media, prefix=prefix, adapter=serving.adapter) as worker:
            rendered = await serving.pipeline.render(parsed_request, worker.holding)
    else:  # nobody holds anything of it: the worker is chosen when it is submitted
        media_bytes, is_named = 0, False
        rendered = await serving.pipeline.render(parsed_request)
        worker = serving.fleet.choose((), prefix=prefix, adapter=serving.adapter)
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
    if is_named and kind is StreamedAnswer and not ahead:
        await stream.begin()  # a lost item that has only a name is a 404 then, and no event of a stream
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
) -> StreamedAnswer:
    """Submit to a worker. Until the first output the account charges `keep_bytes`, from which features can be remade.

    The time of the first output is not recorded if the answer is submitted `ahead`.
    """
    span = current_span()
    observed = Observed.begin(span, submission, serving.model) if span.is_recording() else None
    if serving.adapter is not None:
        submission = replace(submission, adapter=serving.adapter)
    if (trace := span_trace(span)) is not None:
        submission = replace(submission, trace=trace)
    watch = Stopwatch(serving.pipeline.timings)
    stream = await serving.fleet.submit(worker, submission, make, kind)
    watch.lap("send")
    if (paying := answer_account or account) is not None:
        stream.charge(_WholeAnswerRoom(paying) if kind is BufferedAnswer else _BacklogRoom(paying, stream.overflow))
    if account is not None:
        account.keep(keep_bytes)
    stream.serve(_Reader(account, None if ahead else watch, observed))
    return stream
