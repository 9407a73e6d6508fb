"""The routes that transcribe or translate a clip, for encoder-decoder models. They execute.

The decoder's prompt is that of vLLM's server: the language and the task. If the client does not name the language, the
model detects it. A clip that is longer than the encoder's maximum is cut into pieces (`clips`), each of which is a
prompt. The language of the first piece applies to all.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final, TypeVar

from msgspec import UNSET
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from semel.core import Media, Tenant
from semel.engine import Stream
from semel.errors import EngineFailed, InvalidRequest
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.frontend.api.openai.audio_request import SpeechRequest, TranscriptionRequest, TranslationRequest, speech_of
from semel.frontend.api.openai.chat_response import Head
from semel.frontend.api.openai.transcription_response import (
    Marks,
    Task,
    Transcription,
    TranscriptionChunk,
    TranscriptionResponse,
    Translation,
    TranslationChunk,
    VerboseTranscript,
    VerboseTranscription,
)
from semel.frontend.execution import submit_request
from semel.frontend.http.body import read_bytes
from semel.frontend.http.sse import respond
from semel.frontend.items.clips import Chain, Clip, read_clip
from semel.frontend.routes.call import Call, serve_call
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.service import FrontendState, ServedModel
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
"""The languages that are detected: those that Whisper knows well, as in vLLM. A client may name any."""

_START: Final = "<|startoftranscript|>"
_Speech = TypeVar("_Speech", bound=SpeechRequest)
_TRANSCRIPTION: Final = TypeAdapter(TranscriptionRequest)
_TRANSLATION: Final = TypeAdapter(TranslationRequest)
_TRANSCRIBE: Final = takes(
    _TRANSCRIPTION,
    {JSON: shape(Transcription, VerboseTranscription), EVENTS: events_of(TranscriptionChunk)},
    form=FORM,
    named=True,
)
_TRANSLATE: Final = takes(
    _TRANSLATION,
    {JSON: shape(Translation, VerboseTranscription), EVENTS: events_of(TranslationChunk)},
    form=FORM,
    named=True,
)


def transcription_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes for clips."""

    async def transcriptions(request: Request) -> Response:
        """Write down what is said in a clip."""
        work = partial(_write_down, "transcribe")
        return await serve_call(request, service, _TRANSCRIPTION, work, partial(_ask, TranscriptionRequest))

    async def translations(request: Request) -> Response:
        """Write down in English what is said in a clip."""
        work = partial(_write_down, "translate")
        return await serve_call(request, service, _TRANSLATION, work, partial(_ask, TranslationRequest))

    return [
        DocumentedRoute("/v1/audio/transcriptions", transcriptions, methods=["POST"], operation=_TRANSCRIBE),
        DocumentedRoute("/v1/audio/translations", translations, methods=["POST"], operation=_TRANSLATE),
    ]


def decoder_text(language: str, prompt: str, *, times: bool, task: Task = "transcribe") -> str:
    """The beginning of the decoder's prompt, exactly as in vLLM.

    As in vLLM, `<|prev|>` is not a token of Whisper's, and a prompt that begins otherwise gets the decoder's start
    token first.
    """
    before = f"{_START}<|prev|>{prompt}" if prompt else ""
    return f"{before}{_START}<|{language}|><|{task}|>{'<|0.00|>' if times else '<|notimestamps|>'}"


async def _ask(
    kind: type[_Speech], request: Request, service: FrontendState, adapter: TypeAdapter[_Speech], call: Call
) -> _Speech:
    if (pooling := call.serving.contract.pooling) is not UNSET:
        call.serving.refuse_to_generate(pooling)
    if call.serving.pipeline.chat_renderer is not None:
        raise InvalidRequest(f"{call.serving.model} does not transcribe: send the clip in a chat, as input_audio")
    body = await read_bytes(request, service.body, call.account)
    call.account.take(len(body))  # the files of a form are copies
    form = await asyncio.to_thread(read_form, body, request.headers.get("content-type", ""))
    unknown = service.unknown_fields()
    speech = speech_of(form, adapter, kind.form_fields(), unknown)
    if unknown.count:
        service.ignored_fields.tell(request, unknown)
    call.use(speech.model)
    call.account.keep(len(speech.file))
    return speech


async def _write_down(task: Task, call: Call, speech: SpeechRequest) -> Response:
    serving, tenant = call.serving, Tenant(call.tenant)
    tokenizer = serving.pipeline.tokenizer
    marks = _marks(tokenizer) if speech.is_verbose else None
    clip = await read_clip(serving, speech.file, call.account, tenant=call.tenant)
    speech = speech.model_copy(update={"file": b""})
    call.account.keep(clip.nbytes)
    language = speech.language or await _detect(serving, clip.media(0), tenant, f"{call.request_id}-language")
    if tokenizer.token_id(f"<|{language}|>") is None:
        raise InvalidRequest.of(
            "language", f"{serving.model} has no {language!r}; send a code like en, or leave it out"
        )
    text = decoder_text(language, speech.prompt, times=speech.is_verbose, task=task)
    chain = Chain(len(clip.files), partial(_hear, call, tenant, clip, text, speech), call.account)
    await chain.begin()
    head = Head(f"{task}-{call.answer_id()}", serving.model, "")
    known = head, task, clip.seconds, language, len(tokenizer.encode(text))
    if marks is None:
        usage = speech.stream_include_usage
        transcript = TranscriptionResponse(*known, usage, usage and speech.stream_continuous_usage_stats)
    else:
        decode, temperature = tokenizer.decode, speech.temperature
        transcript = VerboseTranscript(
            *known, begins_s=clip.begins_s, marks=marks, decode=decode, temperature=temperature
        )
    return await respond(chain, transcript, streamed=speech.stream)


async def _hear(call: Call, tenant: Tenant, clip: Clip, text: str, speech: SpeechRequest, index: int) -> Stream:
    """The answer to one piece of a clip."""
    stream, _ = await submit_request(
        call.serving,
        call.serving.pipeline.read_transcription(clip.media(index), text, tenant),
        request_id=call.request_id if len(clip.files) == 1 else f"{call.request_id}-{index}",
        sampling=speech.sampling(call.serving.contract.max_tokens),
        tenant=tenant,
        kind=StreamedAnswer if speech.stream else BufferedAnswer,
        ahead=index > 0,
    )
    return stream


async def _detect(serving: ServedModel, media: Media, tenant: Tenant, request_id: str) -> str:
    """The language that the model detects."""
    tokenizer = serving.pipeline.tokenizer
    codes = {token: code for code in LANGUAGES if (token := tokenizer.token_id(f"<|{code}|>")) is not None}
    if not codes:
        raise InvalidRequest.of("language", f"{serving.model} cannot tell it; send one, as a code like en")
    stream, _ = await submit_request(
        serving,
        serving.pipeline.read_transcription(media, _START, tenant),
        request_id=request_id,
        sampling={"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": sorted(codes)},
        tenant=tenant,
        kind=BufferedAnswer,
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
