"""Conversion between outputs and messages, in both directions. Nothing is interpreted here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from semel.core import Output, PoolingOutput
from semel.wire.messages import Delta, Details, Pooled

__all__ = ["is_large", "to_delta", "to_deltas", "to_output"]

_MAX_LOGPROBS: Final = 16_384
"""Maximum number per message: half a megabyte, and with the longest token texts still a quarter of the message
limit."""

_SMALL_DELTA_TOKENS: Final = 64
_POOLED_BYTES: Final = 256 * 1024
"""Of one message, in whole numbers: vectors of all tokens of a long prompt have hundreds of megabytes."""

_NONE: Final = Details()


def to_deltas(request_id: str, output: Output) -> Iterable[Delta | Pooled]:
    """Return the deltas of one output of a request: several if it has many log probabilities (S18), or was pooled."""
    if output.pooling is not None:
        return _pooled(request_id, output, output.pooling)
    if output.logprobs is None:
        return (to_delta(request_id, output),)
    return (to_delta(request_id, piece) for piece in _pieces(output))


def is_large(delta: Delta) -> bool:
    """Return whether a delta may be long: the last delta of a parsed answer contains the whole answer."""
    if delta.logprobs is not None or len(delta.token_ids) > _SMALL_DELTA_TOKENS:
        return True
    if (details := delta.details) is None:
        return False
    return details.prompt_logprobs is not None or (details.message is not None and delta.finish_reason is not None)


def to_delta(request_id: str, output: Output) -> Delta:
    """Return the delta of one output of a request."""
    logprobs = None if output.logprobs is None else tuple(dict(step) for step in output.logprobs)
    details = _details(output)
    return Delta(
        request_id,
        output.index,
        output.text,
        output.token_ids,
        output.finish_reason,
        logprobs,
        None if details == _NONE else details,
    )


def to_output(delta: Delta | Pooled) -> Output:
    """Return the output in a delta, or the piece of one that was pooled."""
    if isinstance(delta, Pooled):
        pooling = PoolingOutput(delta.shape, delta.data)
        return Output(0, "", (), finish_reason=delta.finish_reason, cached_tokens=delta.cached_tokens, pooling=pooling)
    more = delta.details or _NONE
    return Output(
        delta.index,
        delta.text,
        delta.token_ids,
        delta.logprobs,
        delta.finish_reason,
        more.stop_reason,
        more.texts,
        more.message,
        more.reasoning_tokens,
        more.cached_tokens,
        more.created_cache_tokens,
        more.prompt_logprobs,
        more.weight_versions,
    )


def _pooled(request_id: str, output: Output, pooling: PoolingOutput) -> Iterator[Pooled]:
    """Split a pooling output. The finish comes with the last piece, data about the prompt with the first."""
    data, cached_tokens = pooling.data, output.cached_tokens
    for start in range(0, max(len(data), 1), _POOLED_BYTES):
        end = start + _POOLED_BYTES
        finish_reason = output.finish_reason if end >= len(data) else None
        yield Pooled(request_id, pooling.shape, data[start:end], finish_reason, cached_tokens)
        cached_tokens = None


def _pieces(output: Output) -> Iterator[Output]:
    """Split an output. The text and the finish come with the last piece, data about the prompt with the first."""
    entries = max(map(len, output.logprobs or ()), default=0)
    count, size = len(output.token_ids), _MAX_LOGPROBS // max(entries, 1) or 1
    if output.logprobs is None or count <= size:
        yield output
        return
    # A parsed output stays parsed in every piece; otherwise hidden tokens would appear as text.
    message: dict[str, object] | None = None if output.message is None else {}
    for start in range(0, count, size):
        end = start + size
        texts = None if output.texts is None else output.texts[start:end]
        piece = replace(output, token_ids=output.token_ids[start:end], logprobs=output.logprobs[start:end], texts=texts)
        if start:
            piece = replace(piece, cached_tokens=None, created_cache_tokens=None, prompt_logprobs=None)
        if end < count:
            piece = replace(
                piece,
                text="",
                finish_reason=None,
                stop_reason=None,
                message=message,
                reasoning_tokens=None,
                weight_versions=None,
            )
        yield piece


def _details(output: Output) -> Details:
    prompt_logprobs = output.prompt_logprobs
    return Details(
        output.stop_reason,
        None if output.texts is None else tuple(dict(step) for step in output.texts),
        None if output.message is None else dict(output.message),
        output.reasoning_tokens,
        output.cached_tokens,
        output.created_cache_tokens,
        None if prompt_logprobs is None else tuple(None if step is None else dict(step) for step in prompt_logprobs),
        output.weight_versions,
    )
