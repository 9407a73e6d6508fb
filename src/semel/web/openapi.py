"""OpenAPI documents: the parts that all of semel's applications share. No I/O.

Each route declares what it takes and returns. The shapes of responses are types, and errors are those of the tree in
`semel.errors`: their statuses and codes are defined nowhere else. Objects in responses are closed.

The version is 3.2, the first that can describe the events of a stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, Final

import msgspec

from semel.errors import RequestError, ServiceError, UnsupportedEncoding, told_kinds
from semel.web.errors import RETRIED, ErrorBody

__all__ = [
    "EVENTS",
    "JSON",
    "TEXT",
    "Codes",
    "Schema",
    "answer",
    "document",
    "events_of",
    "named_events_of",
    "refusals",
    "shape",
    "told_codes",
]

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"

Schema = Mapping[str, Any]
"""A JSON schema. The schemas that it refers to may be in its `$defs`; `document` collects them."""

Codes = Mapping[int, Mapping[str, str]]
"""By status: the codes of its errors, and the meaning of each."""

_REF: Final = "#/components/schemas/{name}"
_ROW: Final = re.compile(r" \(threats S\d+\)")
_RETRY_AFTER: Final = {"description": "Seconds to wait before it is sent again.", "schema": {"type": "integer"}}
_ENCODINGS: Final = {
    "description": "The encodings that a body may have.",
    "schema": {"const": UnsupportedEncoding.accepted},
}
_CHALLENGE: Final = {"description": "How to authenticate.", "schema": {"const": "Bearer"}}


@cache  # most of what making an application takes
def shape(*kinds: Any) -> Schema:
    """Return the schema of a JSON value of one of these types."""
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF, schema_hook=_anything)
    closed = {name: _closed(schema) for name, schema in components.items()}
    return {**(references[0] if len(references) == 1 else {"anyOf": list(references)}), "$defs": closed}


def events_of(*kinds: Any) -> Schema:
    """Return the schema of one event of a stream: one of these types, or an error, in JSON; and the end marker."""
    part = shape(*kinds, ErrorBody)
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": part["anyOf"]}}
    properties = {"data": {"anyOf": [{"const": "[DONE]"}, data]}}
    return {"type": "object", "properties": properties, "required": ["data"], "$defs": part["$defs"]}


def named_events_of(*kinds: Any) -> Schema:
    """Return the schema of one event of a stream whose events have names: one of these types in JSON."""
    part = shape(*kinds)
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": part["anyOf"]}}
    properties = {"event": {"enum": [kind.__struct_config__.tag for kind in kinds]}, "data": data}
    return {"type": "object", "properties": properties, "required": ["event", "data"], "$defs": part["$defs"]}


def answer(description: str, content: Mapping[str, Schema]) -> Mapping[str, Any]:
    """Return a response with one of these contents, by media type."""
    part = {kind: {"itemSchema" if kind == EVENTS else "schema": schema} for kind, schema in content.items()}
    return {"description": description, "content": part} if part else {"description": description}


def refusals(statuses: Iterable[int], family: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the responses with these error statuses, in the shape that a family of routes has for them."""
    return {str(status): {"$ref": f"#/components/responses/{family}Error{status}"} for status in sorted(statuses)}


def told_codes(kinds: Iterable[type[RequestError | ServiceError]] | None = None) -> Codes:
    """The codes of these errors, or of the whole tree. If classes share a code, the first one defines its meaning."""
    codes: dict[int, dict[str, str]] = {}
    for kind in told_kinds() if kinds is None else kinds:
        meaning = _ROW.sub("", (kind.__doc__ or "").partition("\n")[0])
        codes.setdefault(kind.status, {}).setdefault(kind.code, meaning)
    return codes


def document(
    title: str,
    paths: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    codes: Codes,
    key: str | None,
    families: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the document of an application. `key` describes the key that some of its operations need.

    `families` has, by its name, the type of the errors of a family of routes that has a shape of its own.
    """
    schemas: dict[str, Any] = {}
    hoisted = _hoisted(paths, schemas)
    errors = {f"Error{status}": _hoisted(_error(status, codes[status]), schemas) for status in sorted(codes)}
    for family, kind in (families or {}).items():
        for status in sorted(codes):
            errors[f"{family}Error{status}"] = _hoisted(_error_response(status, codes[status], shape(kind)), schemas)
    components: dict[str, Any] = {"schemas": dict(sorted(schemas.items())), "responses": errors}
    if key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": key}}
    return {
        "openapi": "3.2.0",
        "info": {"title": title, "version": version("semel")},
        "paths": hoisted,
        "components": components,
    }


def _error(status: int, codes: Mapping[str, str]) -> Mapping[str, Any]:
    part = shape(ErrorBody)
    narrowed = {"properties": {"error": {"properties": {"code": {"enum": list(codes)}}}}}
    return _error_response(status, codes, {"allOf": [{"$ref": part["$ref"]}, narrowed], "$defs": part["$defs"]})


def _error_response(status: int, codes: Mapping[str, str], schema: Schema) -> Mapping[str, Any]:
    description = "\n".join(f"- `{code}`: {meaning}" for code, meaning in codes.items())
    headers = {"Retry-After": {**_RETRY_AFTER, "required": True}} if status in RETRIED else {}
    if status == 401:
        headers = {"WWW-Authenticate": {**_CHALLENGE, "required": True}}
    if UnsupportedEncoding.code in codes:
        headers = {"Accept-Encoding": {**_ENCODINGS, "required": len(codes) == 1}}
    told_answer = answer(description, {JSON: schema})
    return {**told_answer, "headers": headers} if headers else told_answer


def _anything(kind: type) -> dict[str, Any]:
    if kind is object:
        return {"description": "Any value."}
    raise NotImplementedError


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**schema, "additionalProperties": False} if "properties" in schema else schema


def _hoisted(value: Any, schemas: dict[str, Any]) -> Any:
    """Return the same value without `$defs`, which are moved to `schemas`. One name must not have two meanings."""
    if isinstance(value, Mapping):
        for name, schema in value.get("$defs", {}).items():
            plain = _hoisted(schema, schemas)
            if schemas.setdefault(name, plain) != plain:
                raise ValueError(f"two schemas have the name {name}: rename one of the types")
        return {name: _hoisted(one, schemas) for name, one in value.items() if name != "$defs"}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_hoisted(one, schemas) for one in value]
    return value
