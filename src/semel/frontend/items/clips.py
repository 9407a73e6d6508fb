"""A clip on its way to an encoder: how long it is, the pieces that the encoder takes, and their answers in order.

A clip that is short enough by its head stays as it came, so that its bytes are its identity. Any other is decoded and
cut by the pool, and from then on its pieces are the items: this process decodes nothing (threats S6).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from semel.core import Media, Output
from semel.engine import Stream
from semel.errors import InvalidRequest
from semel.frontend.api.transcription_response import FRAMES_PER_S, SAMPLING_RATE
from semel.frontend.budget import Account
from semel.frontend.service import ServedModel
from semel.media.duration import clip_seconds

__all__ = ["PIECES_AT_ONCE", "Chain", "Clip", "read_clip"]

PIECES_AT_ONCE: Final = 8
"""Of one clip: an hour has 120, and others want to be answered too (threats S18)."""

_MAX_CLIP_FRAMES: Final = 3_000


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip in pieces that an encoder takes."""

    seconds: float
    files: Sequence[bytes | memoryview]
    begins_s: Sequence[float]
    """Where each piece begins in the clip."""

    @property
    def nbytes(self) -> int:
        """What it holds: all pieces, and copies of those that are asked for at once."""
        return sum(map(len, self.files)) + self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        """What those copies hold; a file that was not cut is not copied."""
        sizes = [len(file) for file in self.files if isinstance(file, memoryview)]
        return sum(sorted(sizes)[-PIECES_AT_ONCE:])

    def media(self, index: int) -> Media:
        """One piece."""
        return Media("audio", bytes(self.files[index]))


async def read_clip(serving: ServedModel, data: bytes, account: Account) -> Clip:
    """The clip that a file holds; what its pieces take is in the request's account."""
    seconds = clip_seconds(data, sampling_rate=SAMPLING_RATE)
    if seconds is not None and seconds <= _encoder_s(serving):
        return Clip(seconds, (data,), (0.0,))
    if (cut := serving.pipeline.cut) is None:
        raise InvalidRequest.of("file", "clips are not cut here: send at most 30 s, as WAV or FLAC of 16,000 Hz")
    pieces = await cut(Media("audio", data), account.take)
    begins = list(accumulate(pieces.lengths_s, initial=0.0))
    clip = Clip(pieces.seconds, pieces.files, begins[:-1])
    account.take(clip.copied_bytes)
    return clip


class Chain:
    """The answers to the pieces of a clip, one behind the other; some are asked for ahead."""

    def __init__(self, pieces: int, ask: Callable[[int], Coroutine[Any, Any, Stream]], account: Account) -> None:
        self._left = deque(range(pieces))
        self._ask = ask
        self._account = account
        self._pending: deque[asyncio.Task[Stream]] = deque()

    async def begin(self) -> None:
        """Ask for the first ones; what is wrong with the request, the first one tells."""
        self._go_on()
        try:
            await asyncio.shield(self._pending[0])
        except BaseException:
            await self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs as they come, those of the first piece first."""
        while self._pending:
            stream = await asyncio.shield(self._pending[0])
            async for output in stream:
                if len(self._pending) == 1:  # nothing of what came is needed any more
                    self._account.close()
                yield output
            await stream.close()
            self._pending.popleft()
            self._go_on()

    async def close(self) -> None:
        """Abort what is not answered."""
        pending, self._pending = self._pending, deque()
        self._left.clear()
        for task in pending:
            task.cancel()
        for begun in await asyncio.gather(*pending, return_exceptions=True):
            if not isinstance(begun, BaseException):
                await begun.close()
        self._account.close()

    def _go_on(self) -> None:
        while self._left and len(self._pending) < PIECES_AT_ONCE:
            self._pending.append(asyncio.create_task(self._ask(self._left.popleft())))


def _encoder_s(serving: ServedModel) -> float:
    """How long a clip may be for the encoder."""
    field = serving.contract.fields.get("audio", {}).get("input_features")
    return ((field.shape[-1] if field is not None else None) or _MAX_CLIP_FRAMES) / FRAMES_PER_S
