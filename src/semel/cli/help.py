"""`--help`: flags in their groups, no name ever cut, sizes and bounds in words. Text in, text out.

A command with many flags shows the common ones; `--help=all`, `--help=GROUP` and `--help=WORD` show the others.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from semel.core.flag import GROUPS, Flag

__all__ = ["MAX_COMMON_FLAGS", "columns", "command_help", "group_help", "matching", "usage_of"]

MAX_COMMON_FLAGS: Final = 25
"""Flags of a command that its help shows without being asked for more."""

_MAX_CHARS: Final = 100
_INDENT: Final = 2
_HELP_AT: Final = 30


def columns() -> int:
    """Count the characters of a line of help."""
    return max(40, min(_MAX_CHARS, shutil.get_terminal_size((80, 24)).columns))


def command_help(
    path: str,
    purpose: str,
    flags: Sequence[Flag],
    *,
    engine_flags: bool = False,
    topic: str = "",
    others: Sequence[str] = (),
) -> str:
    """Write the help of a command. `engine_flags`: it takes vLLM's as well.

    `topic` is "all", a group or a word; without one, the common flags are listed. `others` are vLLM's flags for it.
    """
    width = columns()
    usage = " ".join([path, *usage_of(flags, engine_flags=engine_flags)])
    blocks = [_wrap(f"Usage: {usage}", width, hang=" " * 7), _wrap(purpose, width)]
    listed = matching(flags, topic)
    for group in GROUPS:
        members = [one for one in listed if one.group == group]
        if members:
            blocks.append("\n".join([f"{group}:", *_rows(((_name(one), _meaning(one)) for one in members), width)]))
    if others:
        blocks.append(_wrap(f"vLLM's engine flags: {', '.join(others)}", width, hang="  "))
    if len(listed) < len(flags):
        groups = ", ".join(group for group in GROUPS if any(one.group == group for one in flags))
        blocks.append(
            _wrap(
                f"{len(listed)} of {len(flags)} flags. --help=all shows all of them, --help=WORD those with a word "
                f"in them, --help=GROUP a group: {groups}.",
                width,
            )
        )
    if engine_flags:
        blocks.append(
            _wrap(
                "vLLM's engine flags are taken too, under their own names, for instance --served-model-name, "
                f"--max-model-len or --tensor-parallel-size. `{path} --help=engine` lists them (takes some seconds).",
                width,
            )
        )
    return "\n\n".join(blocks)


def matching(flags: Sequence[Flag], topic: str = "") -> list[Flag]:
    """Find the flags of a topic: "all", a group by its first letters, or a word in a flag's name or help."""
    if topic == "all" or (not topic and len(flags) <= MAX_COMMON_FLAGS):
        return list(flags)
    if not topic:
        return [one for one in flags if one.is_common]
    word = topic.lower()
    grouped = [one for one in flags if one.group.lower().startswith(word)]
    return grouped or [one for one in flags if word in f"{one.spelling} {one.help}".lower()]


def usage_of(flags: Sequence[Flag], *, engine_flags: bool) -> list[str]:
    """List what follows the name of a command."""
    arguments = [one.spelling if one.is_required else f"[{one.spelling}]" for one in flags if one.is_positional]
    required = [_name(one) for one in flags if one.is_required and not one.is_positional]
    options = ["[OPTIONS]"] if any(not one.is_positional for one in flags) else []
    return [*arguments, *required, *options, *(["[VLLM'S FLAGS]"] if engine_flags else [])]


def group_help(path: str, purpose: str, commands: Iterable[tuple[str, str]]) -> str:
    """Write the help of a command that has commands of its own."""
    width = columns()
    listed = "\n".join(["Commands:", *_rows(commands, width)])
    more = _wrap(f"`{path} COMMAND --help` says what a command takes.", width)
    return "\n\n".join([f"Usage: {path} COMMAND", _wrap(purpose, width), listed, more])


def _name(one: Flag) -> str:
    several = " ..." if one.is_list else ""
    return one.spelling if one.is_positional else f"{one.spelling} {one.placeholder}{several}".strip()


def _meaning(one: Flag) -> str:
    notes = []
    if one.is_required and not one.is_positional:
        notes.append("required")
    if one.readable_default:
        notes.append(f"default: {one.readable_default}")
    if one.min is not None and one.max is not None:
        notes.append(one.bounds)
    return f"{one.help} [{'; '.join(notes)}]" if notes else one.help


def _rows(pairs: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    """Lay names and what they mean out in two columns; a name that is too long has a line of its own."""
    for name, meaning in pairs:
        lines = textwrap.wrap(meaning, width - _HELP_AT, break_long_words=False, break_on_hyphens=False) or [""]
        head = " " * _INDENT + name
        if len(head) + 2 <= _HELP_AT:
            head = head.ljust(_HELP_AT) + lines.pop(0)
        yield head.rstrip()
        yield from (" " * _HELP_AT + line for line in lines)


def _wrap(text: str, width: int, hang: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
