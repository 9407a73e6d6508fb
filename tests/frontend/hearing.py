"""An application for a model that transcribes: its engine hears the same in every clip, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import io
import wave
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from semel.core import Feature, Key, Layout, Media, Output, Submission, Tensor
from semel.media import DecodeLimits, Pieces, cut_audio
from semel.render import Pipeline, Tokenizer
from tests.frontend import rig as rigs
from tests.frontend.rig import Rig, rig

ROUTE = "/v1/audio/transcriptions"
WORDS = ("hello", "there", "you")
MARKS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"),
    *("<|de|>", "<|en|>", "<|ja|>", "<|haw|>"),
)
TIMES = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1_501))


def clip(seconds: float = 1.5, *, rate: int = 16_000, fill: bytes = b"\1\0") -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(fill * int(seconds * rate))
    return buffer.getvalue()


def make_tokenizer() -> Tokenizer:
    """Words, and the special tokens of Whisper."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    raw.add_special_tokens(list(MARKS))
    raw.add_tokens(list(TIMES))
    return Tokenizer(raw)


TOKENIZER = make_tokenizer()


def id_of(token: str) -> int:
    found = TOKENIZER.token_id(token)
    assert found is not None
    return found


class Spoken:
    """An answer that is known beforehand."""

    def __init__(self, outputs: list[Output]) -> None:
        self._outputs = outputs

    async def __aiter__(self) -> AsyncIterator[Output]:
        for output in self._outputs:
            yield output

    async def close(self) -> None:
        pass


class Hearing:
    """Hears German, and says "hello there" in two pieces; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Submission] = []
        end = id_of("<|endoftext|>")
        self.outputs = [
            Output(0, "hello", (1,), ({1: -0.5},)),
            Output(
                0, " there", (2, id_of("<|1.00|>"), end), ({2: -1.5}, {id_of("<|1.00|>"): -1.0}, {end: 0.0}), "stop"
            ),
        ]

    async def submit(self, submission: Submission) -> Spoken:
        self.asked.append(submission)
        if "allowed_token_ids" in submission.sampling:
            return Spoken([Output(0, "", (id_of("<|de|>"),), finish_reason="length")])
        return Spoken(self.outputs)

    def begun(self) -> list[str]:
        """What the decoders were begun with."""
        return [TOKENIZER.decode(submission.prompt.token_ids).replace(" ", "") for submission in self.asked]


@asynccontextmanager
async def hearing_rig(
    folder: Path, hearing: Hearing, monkeypatch: pytest.MonkeyPatch, limits: DecodeLimits | None = None
) -> AsyncIterator[Rig]:
    """The application; clips are cut by the pool's own code, in a thread."""

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        tensor = Tensor("uint8", (len(media.data),), memoryview(media.data))
        return Feature("audio", {"input_features": tensor}, Layout((0,) * 4))

    async def cut(media: Media, spend: Callable[[int], None], **_: object) -> Pieces:
        pieces = await asyncio.to_thread(
            cut_audio, media.data, limits or DecodeLimits(), sampling_rate=16_000, max_s=30
        )
        spend(sum(map(len, pieces.files)))
        return replace(pieces, files=[memoryview(file) for file in pieces.files])

    monkeypatch.setattr(rigs, "CONTRACT", replace(rigs.CONTRACT, max_items={"audio": 1}))
    pipeline = Pipeline(TOKENIZER, None, process, "heard", Key(bytes(32)), cut=cut)
    async with rig(folder, pipeline) as made:
        monkeypatch.setattr(made.engine, "submit", hearing.submit)
        yield made


async def send(app: Rig, data: bytes | None = None, **fields: Any) -> httpx.Response:
    files = {"file": ("clip.wav", clip() if data is None else data, "audio/wav")}
    return await app.client.post(ROUTE, data=fields, files=files)


async def refusal(app: Rig, data: bytes | None = None, **fields: Any) -> str:
    reply = await send(app, data, **fields)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


def settled(app: Rig) -> bool:
    return (app.service.budget.in_flight, app.service.budget.requests) == (0, 0)
