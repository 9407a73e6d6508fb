"""The shapes of what a frontend answers, as its OpenAPI document tells them. Types only.

What is answered is made in `answers`, `continuations`, `generated`, `renderings` and `transcripts`. The document tells
these types as closed: a field too many or too few in an answer is caught by the tests that hold every answer against it
(`tests/frontend/test_openapi.py`). What is always null here, vLLM has and semel never fills.
"""

from semel.frontend.api.server import ModelList, Readiness, Version
from semel.frontend.api.shapes.chats import ChatCompletion, ChatCompletionChunk
from semel.frontend.api.shapes.clips import (
    Transcription,
    TranscriptionChunk,
    Translation,
    TranslationChunk,
    VerboseTranscription,
)
from semel.frontend.api.shapes.texts import TextCompletion, TextCompletionChunk
from semel.frontend.api.shapes.tokens import Detokenized, Generated, GeneratedChunk, RenderedPrompt, Tokenized

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "Detokenized",
    "Generated",
    "GeneratedChunk",
    "ModelList",
    "Readiness",
    "RenderedPrompt",
    "TextCompletion",
    "TextCompletionChunk",
    "Tokenized",
    "Transcription",
    "TranscriptionChunk",
    "Translation",
    "TranslationChunk",
    "VerboseTranscription",
    "Version",
]
