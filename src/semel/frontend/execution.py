"""Executing: a draft becomes a prompt, and the prompt a stream from a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from semel.core import Tenant
from semel.engine import Output, Stream, Submission
from semel.frontend.service import Serving
from semel.media.budget import Account
from semel.render import Draft

__all__ = ["Accounted", "execute"]


class Accounted:
    """A stream that closes its request's account with its first output: by then the media are let go."""

    def __init__(self, stream: Stream, account: Account) -> None:
        self._stream = stream
        self._account = account

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs as they come."""
        async for output in self._stream:
            self._account.close()
            yield output

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        self._account.close()
        await self._stream.close()


async def execute(
    serving: Serving, draft: Draft, *, request_id: str, sampling: Mapping[str, object], tenant: Tenant
) -> tuple[Stream, Sequence[int]]:
    """The answer as it is generated, and the tokens of the prompt.

    With this call end its features and, once the caller lets go of the draft, its media: the worker has what it needs.
    """
    serving.check_items(draft.items)
    worker = serving.fleet.choose(draft.media)
    rendered = await serving.pipeline.render(draft, worker.holding)
    token_ids = rendered.prompt.token_ids
    serving.check_length(len(token_ids))
    submission = Submission(request_id, rendered.prompt, rendered.features, sampling, tenant.prefix_salt)
    return await serving.fleet.submit(worker, submission, rendered.make), token_ids
