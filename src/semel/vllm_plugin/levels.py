"""The levels of the door, which of them are on, and the line that says so.

A level is a module with `install()`, which hooks it into vLLM in this process and returns what the line says of it. It
raises `LevelOff` with the reason where it cannot work. Any other fault is the door's own: the level stays off with one
line, and vLLM runs as it would without it.

The first process of a server reads vLLM's source for the names that semel uses, which takes 1.6 s of CPU, and writes
the line. It leaves its verdict in the environment for the processes that it starts: they neither check nor write again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final

from semel.engine.vllm.compat.door_names import DOOR_NAMES
from semel.engine.vllm.compat.names import NAMES, to_release
from semel.engine.vllm.compat.source import SourceTree
from semel.engine.vllm.compat.versions import TESTED, installed_version, missing_names

__all__ = ["LEVELS", "VERDICT", "Door", "LevelOff", "open_door", "parse_levels", "shut_reason"]

LEVELS: Final[Mapping[str, str]] = {
    "images": "semel.vllm_plugin.images",
    "renderer": "semel.vllm_plugin.renderer",
    "repair": "semel.vllm_plugin.repair",
    "engine": "semel.vllm_plugin.engine_parts",
    "worker": "semel.vllm_plugin.worker",
}
"""The modules of the levels, in the order in which they are installed."""

VERDICT: Final = "_SEMEL_VERDICT"
"""The environment variable in which a server's first process leaves vLLM's version, `SEMEL`, and why the door is shut.

Below it may be a vLLM of another environment, which has to be checked itself.
"""

# vLLM's own handler writes what comes when vLLM has configured its logs, in its format.
logger = logging.getLogger("vllm").getChild("semel")


class LevelOff(Exception):
    """A level that cannot work here; its text is the reason."""


@dataclass(slots=True)
class Door:
    """The levels that were asked for: what the ones that are on do, and why the others are off."""

    on: dict[str, str] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Return the one line that an operator reads."""
        says = "; ".join(self.on.values()) or "nothing is on"
        off = ", ".join(f"{level} ({reason})" for level, reason in self.off.items())
        return f"semel: {says}" + (f"; off: {off}" if off else "")


def parse_levels(setting: str) -> list[str]:
    """Return the levels that `SEMEL` names: all for 1, else a list with commas. Raise `ValueError` for another word."""
    if setting == "1":
        return list(LEVELS)
    named = [word.strip() for word in setting.split(",") if word.strip()]
    if unknown := [word for word in named if word not in LEVELS]:
        raise ValueError(f"SEMEL={setting} names {unknown[0]!r}: set 1, or some of {', '.join(LEVELS)}")
    return [level for level in LEVELS if level in named]


def open_door(setting: str) -> Door:
    """Install the levels that `SEMEL` names and that can work here. Raise nothing."""
    door = Door()
    inherited, _, reason = os.environ.get(VERDICT, "").partition("\n")
    checked = f"{installed_version()} {setting}"
    is_first = inherited != checked
    if is_first:
        reason = shut_reason(setting)
        os.environ[VERDICT] = f"{checked}\n{reason}"
    if not reason:
        for level in parse_levels(setting):
            _install(door, level)
    if is_first and reason:
        _write(logging.WARNING, f"semel: the door stays shut, and vLLM runs as it is: {reason}")
    elif is_first:
        _write(logging.INFO, door.line())
    return door


def _write(level: int, line: str) -> None:
    """Log a line. `vllm serve` loads plug-ins before it configures its logs, when an INFO line would go nowhere."""
    if logger.hasHandlers():
        logger.log(level, "%s", line)
    else:
        sys.stderr.write(f"{line}\n")


def _install(door: Door, level: str) -> None:
    try:
        door.on[level] = import_module(LEVELS[level]).install()
    except LevelOff as reason:
        door.off[level] = str(reason)
    except Exception as error:
        logger.debug("semel: where the level %s failed", level, exc_info=True)
        door.off[level] = f"a fault of its own: {type(error).__name__}: {error}"


def shut_reason(setting: str) -> str:
    """Return why nothing can be hooked into the installed vLLM; empty if all is as it was tested."""
    try:
        parse_levels(setting)
        return _misfit(installed_version())
    except Exception as error:  # noqa: BLE001 (whatever it is, the server would run without semel)
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _misfit(installed: str) -> str:
    release = to_release(installed)
    if release not in TESTED:
        return (
            f"vLLM {installed or 'of an unknown version'} is installed, and it was tested with {' and '.join(TESTED)}"
        )
    names = (*DOOR_NAMES, *NAMES)
    tree = SourceTree.installed("vllm")
    missing = names if tree is None else missing_names(tree, release, names)
    return f"vLLM {installed} has no {missing[0]} ({missing[0].purpose})" if missing else ""
