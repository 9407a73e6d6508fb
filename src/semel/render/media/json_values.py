"""Values of a request's JSON, each checked for its type where it is used. An error names its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.errors import InvalidRequest

__all__ = ["at_least_one", "kind_of", "list_of", "object_of", "optional_string", "string_of", "type_of"]


def object_of(value: object, where: str) -> dict[str, Any]:
    """Return an object."""
    if not isinstance(value, dict):
        raise InvalidRequest.of(where, f"must be an object, not {kind_of(value)}")
    return value


def list_of(value: object, where: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise InvalidRequest.of(where, f"must be a list, not {kind_of(value)}")
    return value


def string_of(value: object, where: str) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise InvalidRequest.of(where, f"must be a string, not {kind_of(value)}")
    return value


def optional_string(value: object, where: str) -> str | None:
    """Return a string or null."""
    return None if value is None else string_of(value, where)


def type_of(value: dict[str, Any], where: str) -> str:
    """Return the type that an object says it has."""
    return string_of(value.get("type"), f"{where}.type")


def at_least_one(values: Sequence[Any], where: str, what: str) -> None:
    """Refuse an empty list."""
    if not values:
        raise InvalidRequest.of(where, f"has no {what}; send at least one")


def kind_of(value: object) -> str:
    """Return what a value is, in the words of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"
