"""Findings of checks, each a line for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from semel.cli.error_line import print_warning
from semel.errors import ConfigError

__all__ = ["Finding", "Verdict", "problem_of", "refuse", "warn"]

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail}; {self.remedy}" if self.remedy else self.detail


def problem_of(what: str, check: Callable[[], object]) -> Iterator[Finding]:
    """Yield what a call refuses as a problem; nothing if it refuses nothing."""
    try:
        check()
    except ConfigError as error:
        detail, _, remedy = str(error).partition("; ")
        yield Finding(what, "problem", detail, remedy)


def warn(findings: Iterable[Finding]) -> None:
    """Print the warnings among some findings."""
    for found in findings:
        if found.verdict == "warning":
            print_warning(str(found))


def refuse(findings: Iterable[Finding]) -> None:
    """Refuse to start if there is a problem: all of them are reported, each in a line of its own."""
    problems = [str(found) for found in findings if found.verdict == "problem"]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
