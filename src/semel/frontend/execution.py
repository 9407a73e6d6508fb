"""Executing: a draft becomes a prompt, and the prompt a stream from a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semel.engine import Stream, Submission
from semel.frontend.service import Serving
from semel.render import Draft

__all__ = ["execute"]


async def execute(
    serving: Serving, draft: Draft, *, request_id: str, sampling: Mapping[str, object], cache_salt: str | None
) -> tuple[Stream, Sequence[int]]:
    """The answer as it is generated, and the tokens of the prompt.

    With this call end its features and, once the caller lets go of the draft, its media: the worker has what it needs.
    """
    serving.check_items(draft.items)
    worker = serving.fleet.choose(draft.media)
    rendered = await serving.pipeline.render(draft, worker.holding)
    token_ids = rendered.prompt.token_ids
    serving.check_length(len(token_ids))
    submission = Submission(request_id, rendered.prompt, rendered.features, sampling, cache_salt)
    return await serving.fleet.submit(worker, submission, rendered.make), token_ids
