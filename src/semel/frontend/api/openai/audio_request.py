"""Requests for transcription and translation of speech: OpenAI's fields and vLLM's extensions, under their names.

A form has only text values. They are parsed as numbers and booleans where the field has that type. An unknown field is
refused by name, as in `requests`, and numbers are bounded (threats S15).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from semel.errors import InvalidRequest
from semel.frontend.api.shared.faults import fault_of
from semel.frontend.api.shared.fields import REFUSED, without_refused
from semel.frontend.api.shared.unknown_fields import UnknownFields
from semel.web.multipart import Form

__all__ = ["SPEECH_REFUSED", "SpeechRequest", "TranscriptionRequest", "TranslationRequest", "speech_of"]

_SAMPLING: Final = (
    *("frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "seed", "temperature", "top_k", "top_p"),
)
"""Fields that the engine has as sampling parameters under the same name."""

SPEECH_REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    **REFUSED,
    "chunking_strategy": (("auto",), "long clips are cut where vLLM cuts them"),
    "hotwords": (("",), "put the words into prompt"),
    "include": ((), "answers have no log probabilities"),
    "include_stop_str_in_output": (("false",), "answers end before it"),
    "known_speaker_names": ((), "speakers are not told apart"),
    "known_speaker_references": ((), "speakers are not told apart"),
    "n": (("1",), "send the clip again"),
    "timestamp_granularities[]": ((), "only in a transcription"),
    "to_language": ((), "only in a translation"),
}
"""Fields that are refused by name, as in `REFUSED`. The values of a form are text."""

_Code = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]


class SpeechRequest(BaseModel):
    """A clip, and how to write down what is said in it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": True},  # with a warning, unless the operator refuses them
    )

    file: Annotated[bytes, Field(min_length=1)]
    model: str | None = None
    language: _Code | None = None
    prompt: Annotated[str, Field(max_length=4_096)] = ""
    response_format: Literal["json", "text", "verbose_json"] = "json"
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False

    temperature: float = 0.0
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "<|" in self.prompt:
            raise InvalidRequest.of("prompt", "<| begins a special token, and a text has none; leave it out")  # S14
        if self.stream and self.is_verbose:
            raise InvalidRequest.of("stream", "not with verbose_json; ask for json")
        if not self.stream and (self.stream_include_usage or self.stream_continuous_usage_stats):
            raise InvalidRequest("stream_include_usage and stream_continuous_usage_stats: only with stream")
        return self

    @classmethod
    def form_fields(cls) -> frozenset[str]:
        """The names of the fields in a form."""
        return frozenset(one.alias or name for name, one in cls.model_fields.items())

    @property
    def is_verbose(self) -> bool:
        """True if the response has segments with timestamps."""
        return self.response_format == "verbose_json"

    def sampling(self, max_tokens: int) -> Mapping[str, object]:
        """The engine's sampling parameters, with at most `max_tokens` tokens."""
        sampling: dict[str, object] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if (longest := self.max_completion_tokens) is not None:
            sampling["max_tokens"] = min(longest, max_tokens)
        if self.is_verbose:
            sampling["logprobs"] = 1
        return sampling


class TranscriptionRequest(SpeechRequest):
    """A clip, to be written down in its own language."""

    timestamp_granularities: list[Literal["segment"]] = Field(default=[], alias="timestamp_granularities[]")

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.timestamp_granularities and not self.is_verbose:
            raise InvalidRequest.of("timestamp_granularities", "only with the response_format verbose_json")
        return self


class TranslationRequest(SpeechRequest):
    """A clip, to be written down in English; `language` is the one that is spoken."""

    to_language: Literal["en"] | None = None


_Speech = TypeVar("_Speech", bound=SpeechRequest)


def speech_of(
    form: Form, kind: TypeAdapter[_Speech], known: frozenset[str], unknown: UnknownFields | None = None
) -> _Speech:
    """Parse a form as a request of this `kind`, whose fields are `known`. The error names the field."""
    if form.files.keys() != {"file"}:
        raise InvalidRequest.of("file", "send one clip under this name, as a file and not as text")
    sampling: dict[str, Any] = {**without_refused(form.fields, known, SPEECH_REFUSED, unknown), **form.files}
    try:
        return kind.validate_python(sampling)
    except ValidationError as error:
        raise fault_of(error) from None
