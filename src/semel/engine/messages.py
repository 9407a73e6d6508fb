"""Submissions and outputs as messages between frontend and worker, and back. Nothing is interpreted here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from semel.core import Digest, Feature, Prompt
from semel.engine.protocol import Output, Submission
from semel.wire.messages import Delta, Details, Submit
from semel.wire.translation import submit_of

__all__ = ["delta_of", "output_of", "submission_of", "submit_for"]

_NONE: Final = Details()


def submit_for(submission: Submission, payloads: Iterable[Digest]) -> Submit:
    """The message that submits; `payloads` names the features that will be sent."""
    return submit_of(
        submission.request_id,
        submission.prompt,
        sampling=submission.sampling,
        cache_salt=submission.cache_salt,
        payloads=payloads,
        dialogue=submission.dialogue,
        priority=submission.priority,
    )


def submission_of(submit: Submit, prompt: Prompt, features: Mapping[Digest, Feature]) -> Submission:
    """What was submitted: its prompt put together, and the features that came for it."""
    return Submission(
        submit.request_id,
        prompt,
        features,
        submit.sampling,
        submit.cache_salt,
        dialogue=submit.dialogue,
        priority=submit.priority,
    )


def delta_of(request_id: str, output: Output) -> Delta:
    """The message that an output of a request travels in."""
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


def output_of(delta: Delta) -> Output:
    """The output in a message."""
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
    )


def _details(output: Output) -> Details:
    told = output.prompt_logprobs
    return Details(
        output.stop_reason,
        None if output.texts is None else tuple(dict(step) for step in output.texts),
        None if output.message is None else dict(output.message),
        output.reasoning_tokens,
        output.cached_tokens,
        output.created_cache_tokens,
        None if told is None else tuple(None if step is None else dict(step) for step in told),
    )
