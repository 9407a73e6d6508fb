"""Errors and warnings of a command: a line for each thing that is wrong, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

__all__ = ["print_error", "print_warning"]


def print_error(message: str, command: str = "semel") -> None:
    """Print an error to standard error, in the form that the command line asks for."""
    _print(logging.ERROR, message, command)


def print_warning(message: str) -> None:
    """Print a warning likewise."""
    _print(logging.WARNING, message, "semel")


def _print(level: int, message: str, command: str) -> None:
    if _wants_json(sys.argv):
        from semel.telemetry.logs import log_to_stderr

        log_to_stderr("json")  # unless that is done
        logging.getLogger("semel").log(level, "%s", message)
        return
    sys.stderr.write("".join(f"{command}: {line}\n" for line in message.splitlines()))


def _wants_json(words: Sequence[str]) -> bool:
    """Return whether the log is to be JSON, also if the rest of the command line cannot be read."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    return any(one == "--log-format=json" or (one, value) == ("--log-format", "json") for one, value in pairs)
