"""vLLM's flags on a command line: their names and values, before vLLM is imported.

Only what vLLM's own parser is certain to refuse is a problem here; it has the last word when the worker starts.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from semel.cli.checks.finding import Finding
from semel.engine.vllm.arguments import take_parser_flags
from semel.engine.vllm.compat.flags import EngineFlag, FlagSource
from semel.engine.vllm.compat.server_flags import server_flag
from semel.errors import ConfigError

__all__ = ["EngineFlags", "read_engine_flags"]

_WHAT: Final = "vLLM's flags"
_LEFT_TO_VLLM: Final = "left to vLLM"  # a short flag with its value attached, a file of flags
_OF_THE_SERVER: Final = (
    "--tool-call-parser",
    "--enable-auto-tool-choice",
    "--tool-strict-level",
    "--tool-parser-plugin",
)
_INTEGER: Final = re.compile(r"[+-]?\d+(\.\d+)?[kKmMgGtT]?|auto", re.IGNORECASE)
_SHORT_NUMBER: Final = re.compile(r"\b(\d+(?:\.\d+)?)[kKmMgGtT]\b")
_NONE: Final = frozenset({"", "None"})
_SIGNS: Final = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The flags of a command line that are vLLM's."""

    values: Mapping[str, str] = field(default_factory=dict)
    """By every spelling of a flag; a switch has "True" or "False"."""

    problems: tuple[Finding, ...] = ()

    def text(self, spelling: str) -> str | None:
        """Return the value of a flag, None without it."""
        return self.values.get(spelling)

    def number(self, spelling: str) -> float | None:
        """Return the value of a flag that takes a number; None without it, or if it is no number."""
        text = self.values.get(spelling, "")
        try:
            return float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
        except ValueError:
            return None

    def is_on(self, spelling: str) -> bool:
        """Return whether a switch is on."""
        return self.values.get(spelling) == "True"


def read_engine_flags(flags: Sequence[str], own: Sequence[str] = (), source: FlagSource | None = None) -> EngineFlags:
    """Read vLLM's flags. `own` are the spellings of semel's, which a typo may have meant."""
    source = source or FlagSource.installed()
    if source is None or not source.spellings:
        return EngineFlags()
    try:
        parsers, others = take_parser_flags(list(flags))
    except ConfigError as error:
        return EngineFlags(problems=(Finding(_WHAT, "problem", str(error)),))
    reader = _Reader(source, own)
    reader.read(others)
    problems = [*reader.problems]
    problems += _unknown_parser(source, "--tool-call-parser", parsers.tool_call_parser, parsers.tool_parser_plugin)
    plugin = reader.values.get("--reasoning-parser-plugin")
    problems += _unknown_parser(source, "--reasoning-parser", reader.values.get("--reasoning-parser"), plugin)
    return EngineFlags(reader.values, tuple(Finding(_WHAT, "problem", problem) for problem in problems))


class _Reader:
    """A reader that takes a command line apart as vLLM's parser would."""

    def __init__(self, source: FlagSource, own: Sequence[str]) -> None:
        self._source = source
        self._known = source.spellings
        self._own = own
        self.values: dict[str, str] = {}
        self.problems: list[str] = []

    def read(self, words: Sequence[str]) -> None:
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("-"):
                self.problems.append(f"{word!r} is no flag, and follows none that takes a value")
                continue
            self._read_flag(word, rest)

    def _read_flag(self, word: str, rest: list[str]) -> None:
        name, has_value, value = word.partition("=")
        base, dot, _ = name.partition(".")
        spelling = base.replace("_", "-") if base.startswith("--") else base
        negated = spelling.startswith("--no-") and spelling not in self._known
        found = self._spelling(spelling.replace("--no-", "--", 1) if negated else spelling)
        if found is None:
            if (row := server_flag(spelling)) is None:
                self._unknown(name)
            elif row.handling == "refused":
                self.problems.append(f"{name} cannot be used: {row.note}")
            _drop_values(rest)
            return
        if found == _LEFT_TO_VLLM:
            _drop_values(rest, limit=1)
            return
        flag = self._source.flag(found)
        if flag.kind == "switch":
            self._note(flag, "False" if negated else "True")
            if has_value:
                self.problems.append(f"{name} takes no value: {word}")
            return
        if dot:
            if not has_value:
                _drop_values(rest, limit=1)
            return
        values = [value] if has_value else _take_values(rest, flag)
        self._check(name, flag, values)

    def _spelling(self, spelling: str) -> str | None:
        """Return the known spelling, or `_LEFT_TO_VLLM`; None if nobody knows it."""
        if spelling in self._known:
            return spelling
        is_short = not spelling.startswith("--")
        if is_short:
            starts = [one for one in self._known if not one.startswith("--") and spelling.startswith(one)]
            return _LEFT_TO_VLLM if starts or spelling.startswith("-O") else None
        starts = [one for one in self._known if one.startswith(spelling)]
        return starts[0] if len(starts) == 1 else _LEFT_TO_VLLM if spelling in ("--config", "--help") else None

    def _unknown(self, name: str) -> None:
        spelling = name.replace("_", "-")
        near = difflib.get_close_matches(spelling, [*self._own, *self._known, *_OF_THE_SERVER], 1, cutoff=0.7)
        starts = sorted(one for one in self._known if one.startswith(spelling))
        if starts:
            self.problems.append(f"{name} could be any of {', '.join(starts[:4])}: write it in full")
        elif near:
            self.problems.append(f"unknown flag {name}: did you mean {near[0]}?")
        else:
            self.problems.append(
                f"unknown flag {name}: neither semel nor vLLM's engine has it; `semel serve --help` and "
                "`semel serve --help=engine` list those that there are"
            )

    def _check(self, name: str, flag: EngineFlag, values: Sequence[str]) -> None:
        if not values:
            if flag.kind != "optional":
                self.problems.append(f"{name} needs a value")
            return
        if flag.kind != "list":
            self._note(flag, values[0])
            if (fault := _fault(flag, values[0])) is not None:
                self.problems.append(f"{name} {values[0]}: {fault}")

    def _note(self, flag: EngineFlag, value: str) -> None:
        self.values |= dict.fromkeys(flag.spellings, value)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _INTEGER.fullmatch(word) is not None


def _take_values(rest: list[str], flag: EngineFlag) -> list[str]:
    values: list[str] = []
    while rest and _is_value(rest[0]) and (flag.kind == "list" or not values):
        values.append(rest.pop(0))
    return values


def _drop_values(rest: list[str], limit: int = 1 << 30) -> None:
    while rest and _is_value(rest[0]) and limit:
        rest.pop(0)
        limit -= 1


def _fault(flag: EngineFlag, text: str) -> str | None:
    """Return why vLLM refuses a value; None if it does not, or if we cannot tell."""
    if text in _NONE:
        return None
    if flag.kind == "integer" and not _INTEGER.fullmatch(text.strip()):
        return "must be a whole number, for instance 8192, 8k or 8K"
    if flag.kind == "choice" and text not in flag.choices:
        near = difflib.get_close_matches(text, flag.choices, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}? It must be" if near else "must be"
        return f"{hint} one of {', '.join(flag.choices)}"
    if flag.kind == "json" and not _is_json(text):
        return """must be a JSON object in quotes, for instance '{"image": 2}'"""
    if flag.kind in ("integer", "number"):
        return _out_of_bounds(flag, text)
    return None


def _out_of_bounds(flag: EngineFlag, text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return "must be a number" if flag.kind == "number" else None
    bounds = flag.bounds
    inside = (
        value >= bounds.get("ge", value)
        and value <= bounds.get("le", value)
        and ("gt" not in bounds or value > bounds["gt"])
        and ("lt" not in bounds or value < bounds["lt"])
    )
    if inside:
        return None
    return f"must be {' and '.join(f'{_SIGNS[name]} {limit:g}' for name, limit in bounds.items())}"


def _is_json(text: str) -> bool:
    try:
        json.loads(_SHORT_NUMBER.sub(r"\1", text))
    except ValueError:
        return False
    return True


def _unknown_parser(source: FlagSource, flag: str, name: str | None, plugin: str | None) -> Iterator[str]:
    """Report a parser that vLLM does not have; a plug-in may bring others."""
    known = source.parsers(flag)
    if not name or plugin or not known or name in known:
        return
    near = difflib.get_close_matches(name, known, 3, cutoff=0.4) or [one for one in known if one.startswith(name[:3])]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    yield f"{flag} {name}: vLLM has no such parser; {hint}"
