"""The route that writes down what is said in a clip, for encoder-decoder models. It executes.

The decoder begins with what vLLM's server begins it with: the language, which the model itself is asked for if the
client does not tell it, and the task. One clip is one prompt: a longer one than the encoder takes is refused, since it
would be cut without a word.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from semel.core import Media, Tenant
from semel.engine import Stream
from semel.errors import EngineFailed, InvalidRequest
from semel.frontend.answers import Head
from semel.frontend.endings import ended, wished_id
from semel.frontend.events import EventStream, event
from semel.frontend.exchange import as_json, read
from semel.frontend.execution import execute
from semel.frontend.fleet import FleetStream, WholeStream
from semel.frontend.forms import FORM, read_form
from semel.frontend.handling import Call, handle
from semel.frontend.lengths import clip_seconds
from semel.frontend.service import Service, Serving
from semel.frontend.speech import TranscriptionRequest, transcription_of
from semel.frontend.transcripts import FRAMES_PER_S, Marks, Transcript
from semel.render import Tokenizer

__all__ = ["LANGUAGES", "decoder_text", "transcription_routes"]

LANGUAGES: Final = (
    *("af", "ar", "az", "be", "bg", "bs", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr"),
    *("gl", "he", "hi", "hr", "hu", "hy", "id", "is", "it", "ja", "kk", "kn", "ko", "lt", "lv", "mi", "mk", "mr"),
    *("ms", "ne", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sr", "sv", "sw", "ta", "th", "tl", "tr", "uk"),
    *("ur", "vi", "zh"),
)
"""Those that are looked for in a clip: the ones that Whisper knows well, as with vLLM. A client may name any."""

_START: Final = "<|startoftranscript|>"
_MAX_CLIP_FRAMES: Final = 3_000
_UNBOUNDED: Final = 2**62
_REQUEST: Final = TypeAdapter(TranscriptionRequest)


def transcription_routes(service: Service) -> APIRouter:
    """The route for clips."""
    router = APIRouter()

    @router.post("/v1/audio/transcriptions", openapi_extra=_schema())
    async def transcriptions(request: Request) -> Response:
        """Write down what is said in a clip."""
        return await handle(request, service, _REQUEST, partial(_transcribe, wished_id(request)), _ask)

    return router


def decoder_text(language: str, prompt: str, *, times: bool) -> str:
    """What the decoder begins with, to the letter of vLLM.

    There too `<|prev|>` is no token of Whisper's, and a decoder's start token is put before what begins otherwise.
    """
    before = f"{_START}<|prev|>{prompt}" if prompt else ""
    return f"{before}{_START}<|{language}|><|transcribe|>{'<|0.00|>' if times else '<|notimestamps|>'}"


def _schema() -> dict[str, Any]:
    body = TranscriptionRequest.model_json_schema()
    return {"requestBody": {"content": {FORM: {"schema": body}}, "required": True}}


async def _ask(
    request: Request, service: Service, _: TypeAdapter[TranscriptionRequest], call: Call
) -> TranscriptionRequest:
    if call.serving.pipeline.chat_renderer is not None:
        raise InvalidRequest(f"{call.serving.model} does not transcribe: send the clip in a chat, as input_audio")
    # The bytes of a clip are no JSON: commas among them mean nothing.
    body = await read(request, replace(service.body, max_values=_UNBOUNDED), call.account)
    call.account.keep(len(body))
    call.account.take(len(body))  # the files are copies
    form = await asyncio.to_thread(read_form, body, request.headers.get("content-type", ""))
    asked = transcription_of(form)
    call.serving.check_model(asked.model)
    call.account.keep(len(asked.file))
    return asked


async def _transcribe(wished: str | None, call: Call, asked: TranscriptionRequest) -> Response:
    request_id, serving = uuid.uuid4().hex, call.serving
    tokenizer, tenant = serving.pipeline.tokenizer, Tenant(call.tenant)
    seconds = _checked_seconds(serving, asked.file)
    marks = _marks(tokenizer) if asked.is_verbose else None
    media = Media("audio", asked.file)
    asked = asked.model_copy(update={"file": b""})
    language = asked.language or await _detect(serving, media, tenant, f"{request_id}-language")
    if tokenizer.token_id(f"<|{language}|>") is None:
        raise InvalidRequest(f"language: {serving.model} has no {language!r}; send a code like en, or leave it out")
    text = decoder_text(language, asked.prompt, times=asked.is_verbose)
    stream, prompt = await execute(
        serving,
        serving.pipeline.read_transcription(media, text, tenant),
        request_id=request_id,
        sampling=asked.sampling(serving.contract.max_tokens),
        tenant=tenant,
        kind=FleetStream if asked.stream else WholeStream,
        account=call.account,
    )
    head = Head(f"transcribe-{wished or request_id}", serving.model, "")
    transcript = Transcript(
        head,
        seconds,
        language,
        len(prompt.token_ids),
        asked.stream_include_usage and asked.stream_continuous_usage_stats,
    )
    if asked.stream:
        return EventStream([stream], ended(_events(stream, transcript, usage=asked.stream_include_usage)))
    try:
        async for output in stream:
            transcript.add(output)
    finally:
        await stream.close()
    if marks is not None:
        return as_json(transcript.verbose(marks, tokenizer.decode, asked.temperature))
    return as_json(transcript.whole())


async def _events(stream: Stream, transcript: Transcript, *, usage: bool) -> AsyncIterator[bytes]:
    async for output in stream:
        for chunk in transcript.chunks(output):
            yield event(chunk)
    if usage:
        yield event(transcript.closing())


async def _detect(serving: Serving, media: Media, tenant: Tenant, request_id: str) -> str:
    """The language that the model hears."""
    tokenizer = serving.pipeline.tokenizer
    codes = {token: code for code in LANGUAGES if (token := tokenizer.token_id(f"<|{code}|>")) is not None}
    if not codes:
        raise InvalidRequest(f"language: {serving.model} cannot tell it; send one, as a code like en")
    stream, _ = await execute(
        serving,
        serving.pipeline.read_transcription(media, _START, tenant),
        request_id=request_id,
        sampling={"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": sorted(codes)},
        tenant=tenant,
        kind=WholeStream,
    )
    try:
        heard = [token async for output in stream for token in output.token_ids]
    finally:
        await stream.close()
    if not heard or heard[0] not in codes:
        raise EngineFailed("the engine told no language of the clip; send one as `language`")
    return codes[heard[0]]


def _checked_seconds(serving: Serving, clip: bytes) -> float:
    """How long a clip is, if it is not longer than the encoder takes."""
    if (seconds := clip_seconds(clip)) is None:
        raise InvalidRequest("file: the length of the clip cannot be told; send FLAC, or WAV with plain samples")
    field = serving.contract.fields.get("audio", {}).get("input_features")
    frames = (field.shape[-1] if field is not None else None) or _MAX_CLIP_FRAMES
    if seconds > (limit := frames / FRAMES_PER_S):
        raise InvalidRequest(f"file: the clip has {seconds:.1f} s; {serving.model} takes {limit:g}: send it in pieces")
    return seconds


def _marks(tokenizer: Tokenizer) -> Marks:
    if (first := tokenizer.token_id("<|0.00|>")) is None:
        raise InvalidRequest("response_format: the model tells no times; ask for json")
    return Marks(first, tokenizer.token_id("<|endoftext|>"))
