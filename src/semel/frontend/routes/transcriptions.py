"""The routes that write down what is said in a clip, as it is or in English, for encoder-decoder models. They execute.

The decoder begins with what vLLM's server begins it with: the language, which the model itself is asked for if the
client does not tell it, and the task. A clip that is longer than the encoder takes is cut into pieces (`clips`), each
of which is a prompt; the first one tells the language of all.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from semel.core import Media, Tenant
from semel.engine import Stream
from semel.errors import EngineFailed, InvalidRequest
from semel.fleet.fleet import FleetStream, WholeStream
from semel.frontend.api.audio_request import SpeechRequest, TranscriptionRequest, TranslationRequest, speech_of
from semel.frontend.api.chat_response import Head
from semel.frontend.api.shapes import (
    Transcription,
    TranscriptionChunk,
    Translation,
    TranslationChunk,
    VerboseTranscription,
)
from semel.frontend.api.transcription_response import Marks, Task, Transcript
from semel.frontend.execution import execute
from semel.frontend.http.body import read_bytes
from semel.frontend.http.respond import answered, wished_id
from semel.frontend.items.clips import Chain, Clip, read_clip
from semel.frontend.routes.call import Call, handle
from semel.frontend.routes.openapi import takes
from semel.frontend.service import Service, Serving
from semel.render import Tokenizer
from semel.web.multipart import FORM, read_form
from semel.web.openapi import EVENTS, JSON, events_of, shape

__all__ = ["LANGUAGES", "decoder_text", "transcription_routes"]

LANGUAGES: Final = (
    *("af", "ar", "az", "be", "bg", "bs", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr"),
    *("gl", "he", "hi", "hr", "hu", "hy", "id", "is", "it", "ja", "kk", "kn", "ko", "lt", "lv", "mi", "mk", "mr"),
    *("ms", "ne", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sr", "sv", "sw", "ta", "th", "tl", "tr", "uk"),
    *("ur", "vi", "zh"),
)
"""Those that are looked for in a clip: the ones that Whisper knows well, as with vLLM. A client may name any."""

_START: Final = "<|startoftranscript|>"
_Asked = TypeVar("_Asked", bound=SpeechRequest)
_TRANSCRIPTION: Final = TypeAdapter(TranscriptionRequest)
_TRANSLATION: Final = TypeAdapter(TranslationRequest)
_ANSWERS: Final = {JSON: shape(Transcription, VerboseTranscription), EVENTS: events_of(TranscriptionChunk)}
_TRANSLATED: Final = {JSON: shape(Translation, VerboseTranscription), EVENTS: events_of(TranslationChunk)}


def transcription_routes(service: Service) -> APIRouter:
    """The routes for clips."""
    router = APIRouter()

    @router.post("/v1/audio/transcriptions", openapi_extra=takes(_TRANSCRIPTION, _ANSWERS, form=FORM, named=True))
    async def transcriptions(request: Request) -> Response:
        """Write down what is said in a clip."""
        work = partial(_write_down, wished_id(request), "transcribe")
        return await handle(request, service, _TRANSCRIPTION, work, partial(_ask, TranscriptionRequest))

    @router.post("/v1/audio/translations", openapi_extra=takes(_TRANSLATION, _TRANSLATED, form=FORM, named=True))
    async def translations(request: Request) -> Response:
        """Write down in English what is said in a clip."""
        work = partial(_write_down, wished_id(request), "translate")
        return await handle(request, service, _TRANSLATION, work, partial(_ask, TranslationRequest))

    return router


def decoder_text(language: str, prompt: str, *, times: bool, task: Task = "transcribe") -> str:
    """What the decoder begins with, to the letter of vLLM.

    There too `<|prev|>` is no token of Whisper's, and a decoder's start token is put before what begins otherwise.
    """
    before = f"{_START}<|prev|>{prompt}" if prompt else ""
    return f"{before}{_START}<|{language}|><|{task}|>{'<|0.00|>' if times else '<|notimestamps|>'}"


async def _ask(
    kind: type[_Asked], request: Request, service: Service, adapter: TypeAdapter[_Asked], call: Call
) -> _Asked:
    if call.serving.pipeline.chat_renderer is not None:
        raise InvalidRequest(f"{call.serving.model} does not transcribe: send the clip in a chat, as input_audio")
    body = await read_bytes(request, service.body, call.account)
    call.account.take(len(body))  # the files are copies
    form = await asyncio.to_thread(read_form, body, request.headers.get("content-type", ""))
    asked = speech_of(form, adapter, frozenset(kind.model_fields))
    call.serving.check_model(asked.model)
    call.account.keep(len(asked.file))
    return asked


async def _write_down(wished: str | None, task: Task, call: Call, asked: SpeechRequest) -> Response:
    serving, tenant = call.serving, Tenant(call.tenant)
    tokenizer = serving.pipeline.tokenizer
    marks = _marks(tokenizer) if asked.is_verbose else None
    clip = await read_clip(serving, asked.file, call.account)
    asked = asked.model_copy(update={"file": b""})
    call.account.keep(clip.nbytes)
    language = asked.language or await _detect(serving, clip.media(0), tenant, f"{call.request_id}-language")
    if tokenizer.token_id(f"<|{language}|>") is None:
        raise InvalidRequest.of(
            "language", f"{serving.model} has no {language!r}; send a code like en, or leave it out"
        )
    text = decoder_text(language, asked.prompt, times=asked.is_verbose, task=task)
    chain = Chain(len(clip.files), partial(_hear, call, tenant, clip, text, asked), call.account)
    await chain.begin()
    transcript = Transcript(
        head=Head(f"{task}-{wished or call.request_id}", serving.model, ""),
        task=task,
        seconds=clip.seconds,
        language=language,
        prompt_tokens=len(tokenizer.encode(text)),
        closing_usage=asked.stream_include_usage,
        running_usage=asked.stream_include_usage and asked.stream_continuous_usage_stats,
    )
    if marks is not None:
        transcript = transcript.with_times(clip.begins_s, marks, tokenizer.decode, asked.temperature)
    return await answered(chain, transcript, streamed=asked.stream)


async def _hear(call: Call, tenant: Tenant, clip: Clip, text: str, asked: SpeechRequest, index: int) -> Stream:
    """The answer to one piece of a clip."""
    stream, _ = await execute(
        call.serving,
        call.serving.pipeline.read_transcription(clip.media(index), text, tenant),
        request_id=call.request_id if len(clip.files) == 1 else f"{call.request_id}-{index}",
        sampling=asked.sampling(call.serving.contract.max_tokens),
        tenant=tenant,
        kind=FleetStream if asked.stream else WholeStream,
        ahead=index > 0,
    )
    return stream


async def _detect(serving: Serving, media: Media, tenant: Tenant, request_id: str) -> str:
    """The language that the model hears."""
    tokenizer = serving.pipeline.tokenizer
    codes = {token: code for code in LANGUAGES if (token := tokenizer.token_id(f"<|{code}|>")) is not None}
    if not codes:
        raise InvalidRequest.of("language", f"{serving.model} cannot tell it; send one, as a code like en")
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


def _marks(tokenizer: Tokenizer) -> Marks:
    if (first := tokenizer.token_id("<|0.00|>")) is None:
        raise InvalidRequest.of("response_format", "the model tells no times; ask for json")
    return Marks(first, tokenizer.token_id("<|endoftext|>"))
