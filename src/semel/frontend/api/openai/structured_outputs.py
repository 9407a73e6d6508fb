"""Constraints on answers: OpenAI's response formats and vLLM's structured outputs. Sizes are bounded (S15)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from semel.errors import InvalidRequest

__all__ = [
    "JsonObjectFormat",
    "JsonSchema",
    "JsonSchemaFormat",
    "ResponseFormat",
    "StructuralTagFormat",
    "StructuredOutputs",
    "TextFormat",
    "check_json",
    "constrained_field",
    "constraint",
]

_MAX_CHARS: Final = 262_144
"""Maximum characters of a grammar or of a schema's JSON."""


def check_json(value: object, *names: str, max_chars: int) -> None:
    """Refuse a value whose JSON is too long: it travels to the worker in one message, which the worker parses."""
    if (chars := len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))) > max_chars:
        message = f"{' and '.join(names)}: JSON of {chars:,} characters; the limit is {max_chars:,}: send less"
        raise InvalidRequest(message, param=names[0])


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    check_json(schema, "structured_outputs.json", max_chars=_MAX_CHARS)
    return schema


_Grammar = Annotated[str, Field(max_length=_MAX_CHARS)]
_Schema = Annotated[dict[str, Any], AfterValidator(_checked_schema)]
_Choice = Annotated[str, Field(max_length=4_096)]
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(TypedDict, total=False):
    """What the answer is held to while it is generated: one of the first six, and how strictly."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    json: _Grammar | _Schema | None
    regex: _Grammar | None
    choice: Annotated[list[_Choice], Field(min_length=1, max_length=1_024)] | None
    grammar: _Grammar | None
    json_object: bool | None
    structural_tag: _Grammar | None
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: _Grammar | None


class _Format(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class TextFormat(_Format):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(_Format):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(_Format):
    """A schema, by a name that says what it is for."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(_Format):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(BaseModel):
    """Text with parts of a given form; what else it has is checked where it is compiled."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["structural_tag"]


_Form = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


def _checked_format(form: _Form) -> _Form:
    check_json(form.model_dump(by_alias=True), "response_format", max_chars=_MAX_CHARS)
    return form


ResponseFormat = Annotated[_Form, Field(discriminator="type"), AfterValidator(_checked_format)]


def constrained_field(form: ResponseFormat | None, outputs: StructuredOutputs | None) -> str | None:
    """The field that the answer is held to, if there is one."""
    if form is not None and not isinstance(form, TextFormat):
        return "response_format"
    kinds = [kind for kind in _KINDS if (outputs or {}).get(kind) is not None]
    return "structured_outputs" if kinds else None


def constraint(form: ResponseFormat | None, outputs: StructuredOutputs | None) -> Mapping[str, Any] | None:
    """Both as one constraint of the engine. A response format takes precedence; a second constraint is refused."""
    constraints = {name: value for name, value in (outputs or {}).items() if value is not None}
    match form:
        case JsonObjectFormat():
            constraints["json_object"] = True
        case JsonSchemaFormat(json_schema=schema):
            constraints["json"] = schema.json_schema
        case StructuralTagFormat():
            constraints["structural_tag"] = json.dumps(form.model_dump(by_alias=True))
    if len(kinds := [kind for kind in _KINDS if constraints.get(kind) is not None]) > 1:
        message = f"structured_outputs and response_format: {' and '.join(kinds)} exclude each other"
        raise InvalidRequest(message, param="structured_outputs")
    return constraints or None
