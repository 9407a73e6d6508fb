"""vLLM's flags, read from its source: importing its parser takes ten seconds, and a typo should not.

Every flag that the source names is known by its spellings. Its values are checked only where the source says
so plainly: a type, a choice, a bound. Everything else is left to vLLM's own parser.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, Self

from semel.engine.vllm.compat.source import SourceTree

__all__ = ["EngineFlag", "FlagKind", "FlagSource", "server_flags"]

FlagKind = Literal["switch", "integer", "number", "choice", "json", "list", "optional", "text"]

_CLASSES: Final = ("vllm.engine.arg_utils.EngineArgs", "vllm.engine.arg_utils.AsyncEngineArgs")
_ARGUMENTS: Final = _CLASSES[0].rpartition(".")[0]
_SERVER: Final = "vllm.entrypoints.launchers.cli_args.FrontendArgs".rpartition(".")[0]
_TABLES: Final = {
    "--tool-call-parser": "vllm.tool_parsers._TOOL_PARSERS_TO_REGISTER",
    "--reasoning-parser": "vllm.reasoning._REASONING_PARSERS_TO_REGISTER",
}
_COLLECTIONS: Final = frozenset({"list", "tuple", "set"})
_BOUNDS: Final = ("ge", "gt", "le", "lt")
_MAX_DEPTH: Final = 8
_UNBOUNDED: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """One flag of vLLM's, and what its values must be."""

    spellings: tuple[str, ...]
    """With their dashes."""

    kind: FlagKind = "text"
    choices: tuple[str, ...] = ()
    bounds: Mapping[str, float] = field(default_factory=lambda: _UNBOUNDED)
    """By pydantic's names: ge, gt, le, lt."""


class FlagSource:
    """The flags of vLLM's engine by their spellings; none if its source is not as semel knows it."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._calls: dict[str, tuple[ast.Call, ast.AST]] = {}
        for name in _CLASSES:
            module, _, kind = name.rpartition(".")
            found = tree.find(module, f"{kind}.add_cli_args")
            if found is not None:
                for call in _added(found.code):
                    self._calls |= dict.fromkeys(_spellings(call), (call, found.code))

    @classmethod
    def installed(cls) -> Self | None:
        """Return those of the vLLM that is installed; None if there is none."""
        tree = SourceTree.installed("vllm")
        return None if tree is None else cls(tree)

    @property
    def spellings(self) -> Sequence[str]:
        """Every spelling of every flag."""
        return tuple(self._calls)

    def flag(self, spelling: str) -> EngineFlag:
        """Return one flag. Its values are looked up now: for all flags, that reads sixty files."""
        call, code = self._calls[spelling]
        own = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        if "action" in own:
            return EngineFlag(_spellings(call), "switch" if _is_switch(own["action"]) else "optional")
        groups = _groups(code)
        fields = [
            found
            for keyword in call.keywords
            if keyword.arg is None
            for part in ast.walk(keyword.value)
            if (found := _field(part)) is not None and found[0] in groups
        ]
        if own.keys() & {"type", "nargs", "choices"} or len(fields) != 1:
            return EngineFlag(_spellings(call), "optional")
        return self._declared(_spellings(call), groups[fields[0][0]], fields[0][1], is_text=fields[0] in _changed(code))

    def parsers(self, spelling: str) -> tuple[str, ...]:
        """Return the parsers that vLLM has for a flag that names one; none if that is not known."""
        module, _, table = _TABLES[spelling].rpartition(".")
        match self._tree.locate(module, table):
            case _, (ast.Assign(value=ast.Dict(keys=keys)) | ast.AnnAssign(value=ast.Dict(keys=keys))):
                return tuple(str(key.value) for key in keys if isinstance(key, ast.Constant))
        return ()

    def _declared(self, spellings: tuple[str, ...], kind: str, name: str, *, is_text: bool) -> EngineFlag:
        """Return what the field of a configuration class says of its flag. `is_text`: its type is changed by hand."""
        home = self._tree.locate(_ARGUMENTS, kind)
        found = self._tree.find(_ARGUMENTS, f"{kind}.{name}")
        if home is None or found is None or not isinstance(found.code, ast.AnnAssign):
            return EngineFlag(spellings, "optional")
        if is_text:
            return EngineFlag(spellings)
        value, choices = _kind(_atoms(self._tree, home[0], found.code.annotation))
        return EngineFlag(spellings, value, choices, _bounds(found.code.value))


def server_flags(tree: SourceTree) -> dict[str, FlagKind]:
    """List the flags of vLLM's server parser that are not its engine's, by their spellings; none without such a source.

    Most are the fields of a class, whose names the parser spells with dashes; the others it adds itself.
    """
    fields = tree.find(_SERVER, "FrontendArgs")
    parser = tree.find(_SERVER, "make_arg_parser")
    if fields is None or fields.parameters is None or parser is None:
        return {}
    found: dict[str, FlagKind] = {}
    for call in _added(parser.code):
        action = next((keyword.value for keyword in call.keywords if keyword.arg == "action"), None)
        is_switch = action is not None and _is_switch(action)
        found |= dict.fromkeys(_spellings(call), "switch" if is_switch else "text")
    for name in fields.parameters:
        declared = tree.find(_SERVER, f"FrontendArgs.{name}")
        annotation = declared.code.annotation if declared and isinstance(declared.code, ast.AnnAssign) else None
        kind = "text" if annotation is None else _kind(_atoms(tree, _SERVER, annotation))[0]
        found[f"--{name.replace('_', '-')}"] = kind
    return found


def _added(code: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and _spellings(node):
            yield node


def _spellings(call: ast.Call) -> tuple[str, ...]:
    found = [str(part.value) for part in call.args if isinstance(part, ast.Constant)]
    return tuple(one for one in found if one.startswith("-"))


def _groups(code: ast.AST) -> dict[str, str]:
    """Map local names to the configuration classes whose fields they have: `model_kwargs` → `ModelConfig`."""
    groups = {}
    for node in ast.walk(code):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=kind)])
            ):
                groups[name] = kind
    return groups


def _changed(code: ast.AST) -> set[tuple[str, str]]:
    """Return the fields whose keywords are changed by hand: what their values must be is not known."""
    found = set()
    for node in ast.walk(code):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=inner)]) if (found_field := _field(inner)) is not None:
                found.add(found_field)
    return found


def _field(node: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.Subscript(value=ast.Name(id=group), slice=ast.Constant(value=str(name))):
            return group, name
    return None


def _is_switch(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return str(node.value).startswith("store_")
    return getattr(node, "attr", "") == "BooleanOptionalAction"


def _atoms(tree: SourceTree, module: str, node: ast.AST, depth: int = 0) -> list[tuple[str, Any]]:
    """Return what a type is a union of: names of types, and literals with their values."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*_atoms(tree, module, left, depth), *_atoms(tree, module, right, depth)]
        case ast.Constant(value=None):
            return [("None", None)]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [("Literal", tuple(getattr(part, "value", None) for part in parts))]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return _atoms(tree, module, inner, depth)
        case ast.Subscript(value=ast.Name(id=name)):
            return [(name, None)]
        case ast.Name(id=name) if name in ("int", "float", "bool", "str", "dict", *_COLLECTIONS):
            return [(name, None)]
        case ast.Name(id=name) if depth < _MAX_DEPTH:
            return _named(tree, module, name, depth)
        case ast.Attribute():
            return [("class", None)]
    return [("other", None)]


def _named(tree: SourceTree, module: str, name: str, depth: int) -> list[tuple[str, Any]]:
    match tree.locate(module, name):
        case home, (ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value)):
            return _atoms(tree, home, value, depth + 1)
        case _, ast.ClassDef(decorator_list=[_, *_]):
            return [("dataclass", None)]
    return [("other", None)]


def _kind(atoms: Sequence[tuple[str, Any]]) -> tuple[FlagKind, tuple[str, ...]]:
    """Return what vLLM's parser makes of such a type, by the same precedence; text where that is not certain."""
    names = {name for name, _ in atoms}
    if "dataclass" in names:
        return "json", ()
    if "bool" in names:
        return ("optional", ()) if names == {"bool", "str", "None"} else ("switch", ())
    literals = [value for name, value in atoms if name == "Literal"]
    if literals:
        values = literals[0]
        is_closed = not names & {"str", "other"} and all(isinstance(one, str) for one in values)
        return ("choice", tuple(values)) if is_closed and len(literals) == 1 else ("text", ())
    if names & _COLLECTIONS:
        return "list", ()
    if names & {"other", "class"}:
        return "text", ()
    if "int" in names:
        return "integer", ()
    if "float" in names:
        return "number", ()
    if "dict" in names:
        return ("text", ()) if "str" in names else ("json", ())
    return "text", ()


def _bounds(value: ast.expr | None) -> Mapping[str, float]:
    match value:
        case ast.Call(func=ast.Name(id="Field"), keywords=keywords):
            return {
                str(one.arg): float(one.value.value)
                for one in keywords
                if one.arg in _BOUNDS
                and isinstance(one.value, ast.Constant)
                and isinstance(one.value.value, int | float)
            }
    return _UNBOUNDED
