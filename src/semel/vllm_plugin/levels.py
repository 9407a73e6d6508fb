"""The levels of the door, which of them are on, and the line that says so.

A level is a module with `install()`, which hooks it into vLLM in this process and returns what the line says of it. It
raises `LevelOff` with the reason where it cannot work. Any other fault is the door's own: the level stays off with one
line, and vLLM runs as it would without it.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final

from semel.engine.vllm.compat.door_names import DOOR_NAMES
from semel.engine.vllm.compat.names import to_release
from semel.engine.vllm.compat.source import SourceTree
from semel.engine.vllm.compat.versions import TESTED, installed_version, missing_names

__all__ = ["LEVELS", "Door", "LevelOff", "open_door", "parse_levels", "shut_reason"]

LEVELS: Final[Mapping[str, str]] = {
    "images": "semel.vllm_plugin.images",
    "renderer": "semel.vllm_plugin.renderer",
    "repair": "semel.vllm_plugin.repair",
    "engine": "semel.vllm_plugin.engine_parts",
    "worker": "semel.vllm_plugin.worker",
}
"""The modules of the levels, in the order in which they are installed."""

# vLLM's own handler writes it, in its format.
logger = logging.getLogger("vllm.semel")


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


def parse_levels(asked: str) -> list[str]:
    """Return the levels that `SEMEL` names: all for 1, else a list with commas. Raise `ValueError` for another word."""
    if asked == "1":
        return list(LEVELS)
    named = [word.strip() for word in asked.split(",") if word.strip()]
    if unknown := [word for word in named if word not in LEVELS]:
        raise ValueError(f"SEMEL={asked} names {unknown[0]!r}: set 1, or some of {', '.join(LEVELS)}")
    return [level for level in LEVELS if level in named]


def open_door(asked: str) -> Door:
    """Install the levels that are asked for and can work here. Raise nothing."""
    door = Door()
    try:
        if reason := shut_reason(asked):
            logger.warning("semel: the door stays shut, and vLLM runs as it is: %s", reason)
            return door
        for level in parse_levels(asked):
            _install(door, level)
        if multiprocessing.parent_process() is None:
            logger.info("%s", door.line())
    except Exception as error:  # noqa: BLE001 (whatever it is, the server would run without semel)
        logger.warning("semel: the door stays shut, and vLLM runs as it is: %s", error)
    return door


def _install(door: Door, level: str) -> None:
    try:
        door.on[level] = import_module(LEVELS[level]).install()
    except LevelOff as reason:
        door.off[level] = str(reason)
    except Exception as error:
        logger.debug("semel: where the level %s failed", level, exc_info=True)
        door.off[level] = f"a fault of its own: {type(error).__name__}: {error}"


def shut_reason(asked: str) -> str:
    """Return why nothing can be hooked into the installed vLLM; empty if all is as it was tested."""
    try:
        parse_levels(asked)
    except ValueError as error:
        return str(error)
    installed = installed_version()
    release = to_release(installed)
    if release not in TESTED:
        return (
            f"vLLM {installed or 'of an unknown version'} is installed, and it was tested with {' and '.join(TESTED)}"
        )
    tree = SourceTree.installed("vllm")
    missing: Iterable[object] = DOOR_NAMES if tree is None else missing_names(tree, release, DOOR_NAMES)
    return "".join(f"vLLM {installed} has no {name}" for name in list(missing)[:1])
