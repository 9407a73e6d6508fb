"""The names of all top-level fields that any of the APIs has: served, without effect, or refused by name."""

from __future__ import annotations

from typing import Final

from semel.frontend.api.audio_request import SPEECH_REFUSED, TranscriptionRequest, TranslationRequest
from semel.frontend.api.fields import REFUSED
from semel.frontend.api.generate_request import GenerateRequest
from semel.frontend.api.messages_request import MESSAGES_REFUSED, MessagesRequest
from semel.frontend.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from semel.frontend.api.responses_request import RESPONSES_REFUSED, ResponsesRequest

__all__ = ["API_FIELDS"]

_REQUESTS: Final = (
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, GenerateRequest),
    *(TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest),
)
_FORMS: Final = (TranscriptionRequest, TranslationRequest)

API_FIELDS: Final = frozenset(GenerateRequest.unsupported).union(
    *(kind.model_fields for kind in _REQUESTS),
    *(kind.form_fields() for kind in _FORMS),
    *(REFUSED, RESPONSES_REFUSED, MESSAGES_REFUSED, SPEECH_REFUSED),
)
"""A field that is in none of them is cut out of a large body before it is parsed."""
