"""Definitions of a package, read from its source without importing it: of the installed vLLM, or of a wheel.

A name is found where it is defined: through imports from one module of the package into another, in the body of a
class, in its bases, and in its methods, which set attributes of the instance.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

__all__ = ["Definition", "SourceTree"]


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of a name in a source tree."""

    parameters: tuple[str, ...] | None
    """Those of a function, of a class those of its constructor or else its fields; None of anything else."""

    takes_any: bool
    """True if it takes keywords that it does not name, or its parameters are not known."""

    code: ast.AST = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The source of a package."""

    package: str
    read: Callable[[str], str | None]
    """The text of a file, by its path below the folder that has the package."""

    _modules: dict[str, ast.Module | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def installed(cls, package: str) -> Self | None:
        """Read an installed package, without importing it; None if there is none."""
        found = find_spec(package)
        if found is None or not found.submodule_search_locations:
            return None
        folder = Path(next(iter(found.submodule_search_locations))).parent

        def read(path: str) -> str | None:
            file = folder / path
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return cls(package, read)

    def find(self, module: str, path: str) -> Definition | None:
        """Return what `path` is in a module: a name, or a name, a dot and an attribute; None if it is not there."""
        name, _, attribute = path.partition(".")
        if (found := self._in_module(module, name, set())) is None:
            return None
        home, node = found
        if not attribute:
            return self._definition(home, node)
        part = self._in_class(home, node, attribute) if isinstance(node, ast.ClassDef) else None
        return None if part is None else self._definition(home, part)

    def locate(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module that defines a name which another one has, and the definition; None if it is not there."""
        return self._in_module(module, name, set())

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self.read(f"{path}.py")
            if text is None:
                text = self.read(f"{path}/__init__.py")
            self._modules[name] = None if text is None else _parse(text)
        return self._modules[name]

    def _in_module(self, module: str, name: str, seen: set[tuple[str, str]]) -> tuple[str, ast.AST] | None:
        """Return the module that defines a name which this one has, and the definition."""
        tree = self._module(module)
        if tree is None or (module, name) in seen:
            return None
        seen.add((module, name))
        for node in _statements(tree.body):
            if name in _names_of(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._in_module(self._origin(module, node), alias.name, seen)
        submodule = self._module(f"{module}.{name}")
        return None if submodule is None else (f"{module}.{name}", submodule)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        parent = parts[: len(parts) - node.level + is_package]
        return ".".join([*parent, *([node.module] if node.module else [])])

    def _in_class(self, module: str, node: ast.ClassDef, attribute: str) -> ast.AST | None:
        for statement in _statements(node.body):
            if attribute in _names_of(statement):
                return statement
        for method in (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)):
            for part in ast.walk(method):
                if _sets(part, attribute):
                    return part
        for home, base in self._bases(module, node):
            if (found := self._in_class(home, base, attribute)) is not None:
                return found
        return None

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            found = self._in_module(module, name.id, set()) if isinstance(name, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def _definition(self, module: str, node: ast.AST) -> Definition:
        parameters, takes_any = self._parameters(module, node)
        return Definition(parameters, takes_any, node)

    def _parameters(self, module: str, node: ast.AST) -> tuple[tuple[str, ...] | None, bool]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            return tuple(name for name in found if name not in ("self", "cls")), node.args.kwarg is not None
        if not isinstance(node, ast.ClassDef):
            return None, True
        if (constructor := self._in_class(module, node, "__init__")) is not None:
            return self._parameters(module, constructor)
        return tuple(self._fields(module, node)), False

    def _fields(self, module: str, node: ast.ClassDef) -> Iterator[str]:
        for home, base in self._bases(module, node):
            yield from self._fields(home, base)
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield part.target.id


def _parse(text: str) -> ast.Module:
    """Parse without garbage collection: one that logs a forgotten task's traceback would parse too, and Python 3.11
    cannot do both at once (SystemError, python/cpython#106905)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_on:
            gc.enable()


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and what is below conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [part for handler in getattr(node, "handlers", ()) for part in handler.body]
            yield from _statements([*node.body, *getattr(node, "orelse", ()), *handlers])


def _names_of(node: ast.stmt) -> set[str]:
    """Return what a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets: list[Any] = list(node.targets) if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {target.id for target in flat if isinstance(target, ast.Name)}


def _sets(node: ast.AST, attribute: str) -> bool:
    targets: list[Any] = list(node.targets) if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign | ast.NamedExpr):
        targets = [node.target]
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == attribute
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
        for part in flat
    )
