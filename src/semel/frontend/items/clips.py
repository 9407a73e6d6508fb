"""Clips for an encoder: their length, the pieces that they are cut into, and the answers to the pieces in order.

A clip that is short enough by its file header stays unchanged, so that its bytes are its identity. The pool decodes and
cuts any other clip, whose pieces are then the items. This process decodes nothing (threats S6).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from semel.core import Media, Output
from semel.engine import Stream
from semel.errors import InvalidRequest
from semel.frontend.api.openai.transcription_response import FRAMES_PER_S, SAMPLING_RATE
from semel.frontend.budget import Account
from semel.frontend.service import ServedModel
from semel.media.duration import clip_seconds

__all__ = ["PIECES_AT_ONCE", "Chain", "Clip", "read_clip"]

PIECES_AT_ONCE: Final = 8
"""Maximum pieces of one clip in flight: an hour has 120, and other requests need their turn (threats S18)."""

_MAX_CLIP_FRAMES: Final = 3_000


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip as pieces that fit the encoder."""

    seconds: float
    files: Sequence[bytes | memoryview]
    begins_s: Sequence[float]
    """The offset of each piece in the clip."""

    @property
    def nbytes(self) -> int:
        """The memory of the clip: all pieces, and the copies of those in flight."""
        return sum(map(len, self.files)) + self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        """The memory of these copies. A file that was not cut is not copied."""
        sizes = [len(file) for file in self.files if isinstance(file, memoryview)]
        return sum(sorted(sizes)[-PIECES_AT_ONCE:])

    def media(self, index: int) -> Media:
        """The piece with this index."""
        return Media("audio", bytes(self.files[index]))


async def read_clip(serving: ServedModel, data: bytes, account: Account, *, tenant: str = "") -> Clip:
    """Read a clip from a file. The memory of its pieces is charged to the request's account."""
    seconds = clip_seconds(data, sampling_rate=SAMPLING_RATE)
    if seconds is not None and seconds <= _encoder_s(serving):
        return Clip(seconds, (data,), (0.0,))
    if (cut := serving.pipeline.cut) is None:
        raise InvalidRequest.of("file", "clips are not cut here: send at most 30 s, as WAV or FLAC of 16,000 Hz")
    pieces = await cut(Media("audio", data), account.take, tenant=tenant)
    begins = list(accumulate(pieces.lengths_s, initial=0.0))
    clip = Clip(pieces.seconds, pieces.files, begins[:-1])
    account.take(clip.copied_bytes)
    return clip


class Chain:
    """The answers to the pieces of a clip, in order. Some pieces are submitted ahead."""

    def __init__(self, pieces: int, ask: Callable[[int], Coroutine[Any, Any, Stream]], account: Account) -> None:
        self._left = deque(range(pieces))
        self._ask = ask
        self._account = account
        self._pending: deque[asyncio.Task[Stream]] = deque()

    async def begin(self) -> None:
        """Submit the first pieces. An error of the first piece is raised here."""
        self._go_on()
        try:
            await asyncio.shield(self._pending[0])
        except BaseException:
            await self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs as they arrive, in the order of the pieces. Until the first, the request can be called back."""
        has_begun = False
        while self._pending:
            stream = await asyncio.shield(self._pending[0])
            outputs = aiter(stream)
            with nullcontext() if has_begun else self._account.revocable():
                output = await anext(outputs, None)
            while output is not None:
                has_begun = True
                if len(self._pending) == 1:  # the last piece: the media are not needed any more
                    self._account.close()
                yield output
                output = await anext(outputs, None)
            await stream.close()
            self._pending.popleft()
            self._go_on()

    async def close(self) -> None:
        """Abort the pieces that have no complete answer."""
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
    """The maximum length of a clip for the encoder, in seconds."""
    field = serving.contract.fields.get("audio", {}).get("input_features")
    return ((field.shape[-1] if field is not None else None) or _MAX_CLIP_FRAMES) / FRAMES_PER_S
