"""Flags: each is declared once, on the field of the settings section that it fills.

A section is a frozen dataclass next to its component. `flag` makes one of its fields a flag, with a default, bounds,
help and a group; `GROUP` of a section is that of its flags without one. A field whose type is a section contains that
section's flags. The command line, `--help`, the reference page and the tests are generated from `flags_of`. Values
only: this module uses no parser and no component.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

__all__ = [
    "GIB",
    "GROUPS",
    "KIB",
    "MAX_PORT",
    "MIB",
    "REQUIRED",
    "Flag",
    "Group",
    "arguments_of",
    "fill",
    "flag",
    "flags_of",
    "same_flag",
    "section",
]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
MAX_PORT: Final = 65_535

Group = Literal[
    "Server",
    "Keys",
    "Media",
    "Media store",
    "Preprocessing",
    "Caches",
    "Encoder cache",
    "Embedding store",
    "Structured outputs",
    "Worker",
    "Fleet",
    "TLS",
    "CORS",
    "Draining",
    "Limits",
    "Connections",
    "Admin",
    "Logs, metrics and traces",
    "Host",
    "Batch",
    "Measurement",
    "Output",
]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)
"""In the order of `--help` and the reference page."""

Unit = Literal["", "bytes", "GiB", "seconds", "pixels"]
Number = int | float

REQUIRED: Final[Any] = MISSING
"""The default of a flag that must be set."""

_KEY: Final = "semel.flag"
_GROUP: Final = "GROUP"
_SIZES: Final = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:ib)?|b)?", re.IGNORECASE)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag or argument of a command."""

    name: str
    """Without dashes: `max-body-bytes`."""

    help: str
    group: Group
    path: tuple[str, ...] = ()
    """The field names that lead from a command's settings to the value."""

    kind: type = str
    """The type of one value: int, float, str, bool or Path."""

    default: Any
    """As written on a command line, in the flag's unit; `REQUIRED` if there is none."""

    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_positional: bool = False
    min: Number | None = None
    max: Number | None = None
    unit: Unit = ""
    scale: int = 1
    """The field's value is the flag's value times this."""

    default_text: str = ""
    """The behaviour without the flag, if the default does not show it."""

    is_secret: bool = False
    """True if its values must not be shown in a message."""

    is_common: bool = False
    """True if the help of a command with many flags shows it."""

    @property
    def key(self) -> str:
        """The name as an identifier."""
        return self.name.replace("-", "_")

    @property
    def spelling(self) -> str:
        """The flag as written on a command line, without its value."""
        return self.name.upper() if self.is_positional else f"--{self.name}"

    @property
    def is_required(self) -> bool:
        """Return whether the command refuses to run without it."""
        return self.default is REQUIRED

    @property
    def placeholder(self) -> str:
        """The placeholder of the value in `--help`."""
        if self.kind is bool:
            return ""
        if self.choices:
            return "|".join(self.choices)
        if self.unit == "bytes":
            return "SIZE"
        if self.unit in ("seconds", "GiB"):
            return "SECONDS" if self.unit == "seconds" else "GIB"
        return {int: "N", float: "NUMBER", Path: "PATH"}.get(self.kind, "TEXT")

    @property
    def bounds(self) -> str:
        """The allowed values, in words; empty if all are allowed."""
        if self.min is not None and self.max is not None:
            return f"from {self.min} to {self.max}"
        if self.min is not None:
            return f"at least {self.min}"
        return "" if self.max is None else f"at most {self.max}"

    @property
    def readable_default(self) -> str:
        """The default in readable form: `256 MiB`, `120 s`; empty if there is none."""
        if self.default_text or self.is_required:
            return self.default_text
        match self.default:
            case None | False | ():
                return ""
            case tuple():
                return ", ".join(map(str, self.default))
            case bool():
                return "on"
            case int() | float() if self.unit == "bytes":
                return _size_text(int(self.default))
            case int() | float():
                unit = {"seconds": " s", "GiB": " GiB"}.get(self.unit, "")
                return f"{self.default:.15g}{unit}"
        return str(self.default)

    def parse(self, text: str) -> Any:
        """Parse one value of a command line. A `ValueError` names the flag, the value and what is allowed."""
        try:
            value = self._convert(text)
        except (ValueError, OverflowError):
            value = None
        if value is None or not self._is_inside(value):
            raise ValueError(f"{self.spelling} {text}: must be {self._description()}")
        return value

    def _convert(self, text: str) -> Any:
        if self.choices:
            return text if text in self.choices else None
        if self.unit == "bytes":
            return _size(text)
        if self.kind is float:
            number = float(text)
            return None if math.isnan(number) or (self.scale != 1 and math.isinf(number)) else number
        return self.kind(text)

    def _is_inside(self, value: Any) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    def _description(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        nouns = {"bytes": "a number of bytes or a size such as 256MiB", "seconds": "a number of seconds"}
        noun = nouns.get(self.unit) or {int: "a whole number", float: "a number"}.get(self.kind, "text")
        separator = " " if self.bounds.startswith("from") else ", "
        return f"{noun}{separator}{self.bounds}" if self.bounds else noun


def flag(
    default: _T,
    name: str = "",
    *,
    help: str,  # noqa: A002 the usual name in parsers
    group: Group | None = None,
    min: Number | None = None,  # noqa: A002
    max: Number | None = None,  # noqa: A002
    unit: Unit = "",
    default_text: str = "",
    is_positional: bool = False,
    is_secret: bool = False,
    is_common: bool = False,
) -> _T:
    """Declare a field as a flag.

    `name` is needed if it differs from the field's name, `group` if it differs from the section's `GROUP`. A flag in
    GiB fills a field in bytes.
    """
    declared = Flag(
        name=name,
        default=default,
        help=help,
        group=cast("Group", group),
        min=min,
        max=max,
        unit=unit,
        default_text=default_text,
        is_positional=is_positional,
        is_secret=is_secret,
        is_common=is_common,
    )
    return field(default=default, metadata={_KEY: declared})


def same_flag(other: type, name: str, *, default: Any = MISSING) -> Any:
    """Declare a field as the same flag as a field of another section, with its default or another one."""
    (found,) = [one for one in fields(other) if one.name == name]
    declared: Flag = found.metadata[_KEY]
    named = replace(declared, name=declared.name or name.replace("_", "-"), group=_group(declared, other))
    return field(default=found.default if default is MISSING else default, metadata={_KEY: named})


def section(kind: type[_T]) -> _T:
    """Declare a field as a section; its flags have their defaults unless the section is filled."""
    return field(default_factory=kind)


def flags_of(kind: type) -> tuple[Flag, ...]:
    """Return all flags of a section and its inner sections, in the order of their fields."""
    hints = get_type_hints(kind)
    found: list[Flag] = []
    for one in fields(kind):
        if _KEY in one.metadata:
            found.append(_resolve(one, hints[one.name], kind))
        elif is_dataclass(hints[one.name]):
            inner = flags_of(cast("type", hints[one.name]))
            found += [replace(flag, path=(one.name, *flag.path)) for flag in inner]
    return tuple(found)


def fill(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return a section with these flag values, by key; a flag without a value has its default."""
    tree: dict[str, Any] = {}
    for one in flags_of(kind):
        if one.key in values:
            value = values[one.key]
            node = tree
            for step in one.path[:-1]:
                node = node.setdefault(step, {})
            node[one.path[-1]] = int(value * one.scale) if one.scale != 1 else value
    return _build(kind, tree)


def arguments_of(flags: tuple[Flag, ...], values: Mapping[str, Any]) -> list[str]:
    """Flags and their values as command-line arguments."""
    arguments: list[str] = []
    for one in flags:
        match values.get(one.key):
            case None | False:
                continue
            case True:
                arguments.append(one.spelling)
            case list() | tuple() as several:
                arguments += [f"{one.spelling}={value}" for value in several]
            case value:
                arguments.append(f"{one.spelling}={value}")
    return arguments


def _resolve(one: Field[Any], hint: Any, section: type) -> Flag:
    """Complete a declared flag with what its field and its section say."""
    declared: Flag = one.metadata[_KEY]
    kind, choices, is_list = _kind(hint)
    scale = GIB if declared.unit == "GiB" else 1
    default: Any = one.default
    return replace(
        declared,
        name=declared.name or one.name.replace("_", "-"),
        group=_group(declared, section),
        path=(one.name,),
        kind=float if scale != 1 else kind,
        default=default / scale if scale != 1 else default,
        choices=choices,
        is_list=is_list,
        scale=scale,
    )


def _group(declared: Flag, section: type) -> Group:
    own: object = declared.group
    return cast("Group", own or getattr(section, _GROUP))


def _kind(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """Return the type of one value, its choices, and whether the flag takes several values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (hint,) = [one for one in arguments if one is not type(None)]
        return _kind(hint)
    if origin is tuple:
        return arguments[0], (), True
    return (str, arguments, False) if origin is Literal else (hint, (), False)


def _build(kind: type[_T], tree: Mapping[str, Any]) -> _T:
    hints = get_type_hints(kind)
    return kind(
        **{
            name: _build(hints[name], value) if isinstance(value, dict) and is_dataclass(hints[name]) else value
            for name, value in tree.items()
        }
    )


def _size(text: str) -> int:
    """Parse a number of bytes: `268435456`, `256MiB`, `256M`; units are powers of 1024."""
    if (found := _SIZE.fullmatch(text.strip())) is None:
        return int(text)
    number, unit = found.groups(default="")
    return int((float(number) if "." in number else int(number)) * _SIZES[unit.lower()])


def _size_text(nbytes: int) -> str:
    for size, unit in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} bytes"
