"""Constraints of a request's answer as texts: schemas, regular expressions, grammars (threats S20). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

from semel.core import Submission, hash_parts
from semel.errors import InvalidRequest

__all__ = [
    "client_outputs",
    "compiled_text",
    "constrained_field",
    "constraint_key",
    "constraint_text",
    "find_schemas",
    "free_kind",
]

_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FREE_KINDS: Final = ("regex", "grammar")
_SCHEMAS: Final = ("schema", "json_schema")
_FORMATS: Final = ("json_schema", "structural_tag", "json_object")


def constrained_field(submission: Submission) -> str | None:
    """Return the field of the request that its answer is held to; None if there is nothing that could be compiled."""
    parsing = submission.parsing
    if parsing is not None and (parsing.response_format or {}).get("type") in _FORMATS:
        return "response_format"
    outputs = submission.sampling.get("structured_outputs")
    if isinstance(outputs, Mapping):
        kind = next((kind for kind in _KINDS if outputs.get(kind) is not None), "")
        of_both = parsing is None and kind in ("json", "json_object", "structural_tag")
        return f"response_format or structured_outputs.{kind}" if of_both else f"structured_outputs.{kind}"
    return "tools" if parsing is not None and parsing.tools else None


def client_outputs(submission: Submission) -> Any:
    """Return the client's own constraints in the shape of vLLM's `StructuredOutputsParams`; None without any."""
    form = (submission.parsing.response_format if submission.parsing is not None else None) or {}
    named: dict[str, Any] = dict.fromkeys(_KINDS)
    match form.get("type"):
        case "json_schema":
            named["json"] = (form.get("json_schema") or {}).get("schema")
        case "structural_tag":
            named["structural_tag"] = _json(form)
        case _ if isinstance(outputs := submission.sampling.get("structured_outputs"), Mapping):
            named |= {kind: outputs[kind] for kind in _KINDS if kind in outputs}
        case _:
            return None
    return SimpleNamespace(**named)


def free_kind(outputs: Any) -> str | None:
    """Find a regular expression or grammar, also in a structural tag: `regex`, `grammar`, or None."""
    if outputs is None:
        return None
    for kind in _FREE_KINDS:
        if getattr(outputs, kind) is not None:
            return kind
    if outputs.structural_tag is None:
        return None
    nodes = _nodes_in(constraint_text(outputs, "structural_tag"), "structural_tag")
    return next((node["type"] for node in nodes if node.get("type") in _FREE_KINDS), None)


def find_schemas(submission: Submission, outputs: Any, field: str | None, text: str) -> Iterator[tuple[str, str]]:
    """Yield each schema by itself, with the name of where it stands."""
    if field == "tools":
        parsing = submission.parsing
        assert parsing is not None
        for index, tool in enumerate(parsing.tools or ()):
            if _is_compiled(tool, parsing.tool_choice):
                yield f"tools[{index}]", _json(tool["function"].get("parameters"))
    elif outputs.structural_tag is None:
        yield field or "", text
    else:
        for schema in _schemas_in(outputs.structural_tag, field):
            yield f"{field}: a schema", _json(schema)


def _is_compiled(tool: Mapping[str, Any], choice: str | Mapping[str, Any]) -> bool:
    if isinstance(choice, Mapping):
        return bool(choice["function"]["name"] == tool["function"]["name"])
    return choice == "required" or bool(tool["function"].get("strict"))


def _schemas_in(tag: str, field: str | None) -> Iterator[Any]:
    for node in _nodes_in(tag, field):
        yield from (node[name] for name in _SCHEMAS if name in node)


def _nodes_in(tag: str, field: str | None) -> Iterator[dict[str, Any]]:
    """Yield every object in a structural tag, but for those in its schemas."""
    try:
        nodes = [json.loads(tag)]
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field}: the structural tag is not JSON") from None
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            yield node
            nodes += [value for name, value in node.items() if name not in _SCHEMAS]
        elif isinstance(node, list):
            nodes += node


def constraint_text(outputs: Any, field: str | None = None) -> str:
    """Return what is compiled, as a text; its size is what counts."""
    for name in ("json", "regex", "choice", "grammar", "structural_tag"):
        if (value := getattr(outputs, name)) is not None:
            try:
                return value if isinstance(value, str) else _json(value)
            except (RecursionError, TypeError, ValueError):
                raise InvalidRequest(f"{field}: it is not JSON") from None
    return ""


def compiled_text(outputs: Any) -> tuple[str, str]:
    """Return what is compiled, and as what."""
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    if outputs.json is not None:
        return "json", outputs.json if isinstance(outputs.json, str) else json.dumps(outputs.json)
    if outputs.regex is not None:
        return "regex", outputs.regex
    if outputs.choice is not None:
        return "grammar", choice_as_grammar(outputs.choice)
    if outputs.grammar is not None:
        return "lark" if grammar_is_likely_lark(outputs.grammar) else "grammar", outputs.grammar
    if outputs.structural_tag is not None:
        return "structural_tag", outputs.structural_tag
    return "json", '{"type": "object"}'


def constraint_key(outputs: Any) -> bytes:
    """Return a key that is equal for equal constraints."""
    kind = next((kind for kind in _KINDS if getattr(outputs, kind) is not None), "")
    options = (outputs.disable_any_whitespace, outputs.disable_additional_properties, outputs.whitespace_pattern)
    return hash_parts([kind.encode(), constraint_text(outputs).encode(), repr(options).encode()]).digest()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
