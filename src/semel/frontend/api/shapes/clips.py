"""The shapes of what is said in clips. Types only."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semel.frontend.api.shapes.usage import StreamedUsage

__all__ = [
    "ClipUsage",
    "Segment",
    "Transcription",
    "TranscriptionChunk",
    "TranscriptionChunkChoice",
    "TranscriptionDelta",
    "Translation",
    "TranslationChunk",
    "VerboseTranscription",
]


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
