"""The fault of a request, in a sentence: pydantic's errors in the words of the API. Pure.

The message begins with the place, such as `messages[3].content[1]`, and `param` is that place. A field that takes one
of several types has an error for each of them: the one that got furthest counts, or all are said together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from semel.errors import InvalidRequest, excerpt

__all__ = ["FORMS", "fault_of", "split_field"]

FORMS: Final = ("a text", "a chat")
"""The names of the two forms of a request. pydantic puts them before the location of an error; no client sends them."""

_MAX_ALTERNATIVES: Final = 8
_TAGGED: Final = frozenset({"response_format"})
"""Fields whose type depends on what they say in "type". pydantic puts that into a place too."""

_TYPE_LABEL: Final = re.compile(
    r"^(str|int|float|bool|bytes|dict|list|none|constrained-\w+|nullable|_?[A-Z]\w*)$|\[[^\]]|[({]"
)
"""The names that pydantic puts into a place for one of several types that a field takes: `str`, `list[int]`, a class.
No field of the APIs is written so."""

_ONE: Final = {" 1 characters": " one character", " 1 entries": " one entry"}
_SENTENCES: Final[Mapping[str, str]] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "bytes_too_short": "is empty",
    "bytes_type": "must be a file",
    "dict_type": "must be an object",
    "extra_forbidden": "unknown field; leave it out",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be over {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "has too many digits",
    "int_type": "must be a whole number",
    "less_than": "must be under {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing; send it",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_sub_type": "must be a string",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a string",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
}


def fault_of(error: ValidationError) -> InvalidRequest:
    """The first fault of a request. The message has its place, and so has `param`."""
    errors = error.errors(include_url=False, include_input=False)
    place, sentence = _worst(errors)
    if errors[0]["type"] == "json_invalid":
        return InvalidRequest(f"the body is no JSON: {excerpt(str(errors[0].get('ctx', {}).get('error', '')))}")
    if not place:
        return InvalidRequest(f"the body {sentence}")
    return InvalidRequest.of(place, sentence)


def split_field(place: str) -> tuple[str, str]:
    """The field of the request that a place is in, and the rest of the place."""
    end = min((at for at in map(place.find, ".[") if at >= 0), default=len(place))
    return place[:end], place[end:]


def _worst(errors: Sequence[ErrorDetails]) -> tuple[str, str]:
    """The place and the sentence of the first fault; of several types of one field, what got furthest."""
    first = errors[0]
    base, is_choice = _base(first["loc"])
    if not is_choice:
        return _place(first["loc"]), _sentence(first)
    same = [one for one in errors if _base(one["loc"]) == (base, True)]
    deepest = max(same, key=lambda one: len(_steps(one["loc"])))
    if len(_steps(deepest["loc"])) > len(base):
        return _place(deepest["loc"]), _sentence(deepest)
    of_its_type = [one for one in same if not one["type"].endswith("_type")]
    sentences = list(dict.fromkeys(map(_sentence, (of_its_type or same)[:_MAX_ALTERNATIVES])))
    head, *others = sentences
    return _place(first["loc"]), ", or ".join([head, *(one.removeprefix("must be ") for one in others)])


def _base(loc: Sequence[str | int]) -> tuple[tuple[str | int, ...], bool]:
    """The place of a field before the first type of several, and whether there is one."""
    for number, step in enumerate(loc):
        if _is_label(step):
            return _steps(loc[:number]), True
    return _steps(loc), False


def _steps(loc: Sequence[str | int]) -> tuple[str | int, ...]:
    before = (None, *loc)
    return tuple(step for step, last in zip(loc, before, strict=False) if not _is_label(step) and last not in _TAGGED)


def _is_label(step: str | int) -> bool:
    return isinstance(step, str) and (step in FORMS or _TYPE_LABEL.search(step) is not None)


def _place(loc: Sequence[str | int]) -> str:
    """The place as clients write it: `messages[3].content`."""
    written = ""
    for step in _steps(loc):
        written += f"[{step}]" if isinstance(step, int) else f".{excerpt(step)}"
    return written.removeprefix(".")


def _sentence(error: ErrorDetails) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    if (sentence := _SENTENCES.get(error["type"])) is None:
        return excerpt(error["msg"])
    said = sentence.format_map({name: _text_of(value) for name, value in context.items()})
    for plural, singular in _ONE.items():
        said = said.removesuffix(plural) + singular if said.endswith(plural) else said
    return excerpt(said)


def _text_of(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
