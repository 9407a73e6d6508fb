"""Transcription responses in vLLM's variant of OpenAI's shapes: complete, with timed segments, or as chunks. Pure.

The pieces of a clip are transcribed in order. An output with a finish reason ends its piece. `text` gets the same
response as `json`, as from vLLM's server.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NotRequired, cast

from typing_extensions import TypedDict

from semel.core import Output
from semel.frontend.api.openai.chat_response import Head
from semel.frontend.api.shared.logprobs import Decode
from semel.frontend.api.shared.usage import StreamedUsage

__all__ = [
    "FRAMES_PER_S",
    "SAMPLING_RATE",
    "ClipUsage",
    "Marks",
    "Segment",
    "Task",
    "Transcription",
    "TranscriptionChunk",
    "TranscriptionChunkChoice",
    "TranscriptionDelta",
    "TranscriptionResponse",
    "Translation",
    "TranslationChunk",
    "VerboseTranscript",
    "VerboseTranscription",
    "segments",
]

SAMPLING_RATE: Final = 16_000
"""Whisper's sampling rate in Hz."""

FRAMES_PER_S: Final = 100
"""Whisper's spectrograms have one frame every 10 ms."""

Task = Literal["transcribe", "translate"]

_FRAME_SAMPLES: Final = SAMPLING_RATE // FRAMES_PER_S
_STEP_S: Final = 0.02
_TIME: Final = re.compile(r"<\|\d+\.\d+\|>")


class ClipUsage(TypedDict):
    """How long a clip is, in seconds and rounded up."""

    type: Literal["duration"]
    seconds: int


class Transcription(TypedDict):
    """What is said in a clip."""

    text: str
    usage: ClipUsage


class Translation(TypedDict):
    """What is said in a clip, in English."""

    text: str


class Segment(TypedDict):
    """What is said between two times."""

    id: int
    avg_logprob: float
    compression_ratio: float
    end: float
    no_speech_prob: None
    seek: int
    start: float
    temperature: float
    text: str
    tokens: list[int]


class VerboseTranscription(TypedDict):
    """What is said in a clip, and when."""

    duration: float
    language: str
    text: str
    segments: list[Segment]
    words: None


class TranscriptionDelta(TypedDict):
    """What to add to the text."""

    content: str


class TranscriptionChunkChoice(TypedDict):
    """More of the transcript; the last has the reason for its end."""

    delta: TranscriptionDelta
    finish_reason: NotRequired[str | None]
    stop_reason: NotRequired[int | str | None]


class TranscriptionChunk(TypedDict):
    """More of what is said in a clip."""

    id: str
    object: Literal["transcription.chunk"]
    created: int
    model: str
    choices: list[TranscriptionChunkChoice]
    usage: NotRequired[StreamedUsage]


class TranslationChunk(TypedDict):
    """More of what is said in a clip, in English."""

    id: str
    object: Literal["translation.chunk"]
    created: int
    model: str
    choices: list[TranscriptionChunkChoice]
    usage: NotRequired[StreamedUsage]


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens that are not text: all timestamps, which are the tokens from `first_time` on, and the end token."""

    first_time: int
    end: int | None


@dataclass(slots=True)
class TranscriptionResponse:
    """Builds the transcript of one clip: chunk by chunk for a stream, or complete at the end."""

    head: Head
    task: Task
    seconds: float
    language: str
    prompt_tokens: int
    """The number of prompt tokens of the decoder."""

    closing_usage: bool = False
    running_usage: bool = False
    _pieces: list[list[Output]] = field(default_factory=lambda: [[]])
    _completion_tokens: int = 0
    _separated: bool = True

    @property
    def separator(self) -> str:
        """The text between two pieces or segments."""
        return "" if self.language in ("ja", "zh") else " "

    def add(self, output: Output) -> None:
        """Collect an output for the complete response."""
        self._pieces[-1].append(output)
        if output.finish_reason is not None:
            self._pieces.append([])

    def whole(self) -> Transcription | Translation | VerboseTranscription:
        """The complete response. A transcription has its usage too: the seconds of the clip, rounded up."""
        text = self.separator.join("".join(output.text for output in piece) for piece in filter(None, self._pieces))
        if self.task == "translate":
            return {"text": text}
        return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(self.seconds)}}

    def chunks(self, output: Output) -> Iterator[TranscriptionChunk | TranslationChunk]:
        """The chunk for one output; none if it would be empty."""
        self._completion_tokens += len(output.token_ids)
        text = output.text
        if text and not self._separated:
            text, self._separated = self.separator + text, True
        if not text and output.finish_reason is None:
            return
        choice: TranscriptionChunkChoice = {"delta": {"content": text}}
        if output.finish_reason is not None:
            choice["finish_reason"] = output.finish_reason
            choice["stop_reason"] = output.stop_reason
            self._separated = False
        chunk = self._chunk([choice])
        if self.running_usage:
            chunk["usage"] = self._usage()
        yield chunk

    def closing(self) -> Iterator[TranscriptionChunk | TranslationChunk]:
        """The last chunk of a stream, with its usage, if the client requested it."""
        if self.closing_usage:
            chunk = self._chunk([])
            chunk["usage"] = self._usage()
            yield chunk

    def _chunk(self, choices: list[TranscriptionChunkChoice]) -> TranscriptionChunk | TranslationChunk:
        chunk = {
            "id": self.head.answer_id,
            "object": "translation.chunk" if self.task == "translate" else "transcription.chunk",
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
        }
        return cast("TranscriptionChunk | TranslationChunk", chunk)

    def _usage(self) -> StreamedUsage:
        # Same order of operations as vLLM: another order can round to another frame.
        prompt = self.prompt_tokens + math.ceil(self.seconds * SAMPLING_RATE / _FRAME_SAMPLES)
        total = prompt + self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self._completion_tokens, "total_tokens": total}


@dataclass(slots=True)
class VerboseTranscript(TranscriptionResponse):
    """A transcript with timed segments."""

    begins_s: Sequence[float] = (0.0,)
    """The offset of each piece in the clip."""

    marks: Marks = field(kw_only=True)
    decode: Decode = field(kw_only=True)
    temperature: float = field(kw_only=True)

    def whole(self) -> VerboseTranscription:
        """The complete response, with the text by segments."""
        entries: list[Segment] = []
        for begin_s, piece in zip(self.begins_s, self._pieces, strict=False):
            token_ids = [token for output in piece for token in output.token_ids]
            logprobs = [step for output in piece for step in output.logprobs or ()]
            entries += segments(token_ids, logprobs, self.marks, self.decode, self.temperature, begin_s)
        return {
            "duration": self.seconds,
            "language": self.language,
            "text": self.separator.join(one["text"] for one in entries),
            "segments": entries,
            "words": None,
        }


def segments(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float]],
    marks: Marks,
    decode: Decode,
    temperature: float,
    begin_s: float = 0.0,
) -> list[Segment]:
    """The segments of one piece, numbered from 0. A segment ends where two timestamps follow each other."""
    marked = [marks.first_time, *token_ids]
    if marked[-1] == marks.end:
        marked.pop()
    if len(marked) > 1 and marked[-2] < marks.first_time <= marked[-1]:
        marked.append(marked[-1])  # the last timestamp ends its segment, though no other segment begins after it
    entries: list[Segment] = []
    begin, sum_of_logprobs = 0, 0.0
    for place in range(1, len(marked)):
        if min(marked[place - 1], marked[place]) < marks.first_time:
            sum_of_logprobs += logprobs[place - 1][marked[place]]
            continue
        tokens = marked[begin + 1 : place - 1]
        text = _TIME.sub("", decode(tokens))  # a single timestamp ends no segment; the text omits it
        entries.append(
            {
                "id": len(entries),
                "avg_logprob": sum_of_logprobs / (place - begin),
                "compression_ratio": len(text.encode()) / len(zlib.compress(text.encode())),
                "end": begin_s + _STEP_S * (marked[place - 1] - marks.first_time),
                "no_speech_prob": None,
                "seek": int(begin_s),
                "start": begin_s + _STEP_S * (marked[begin] - marks.first_time),
                "temperature": temperature,
                "text": text,
                "tokens": tokens,
            }
        )
        begin, sum_of_logprobs = place, 0.0
    return entries
