"""Workloads by name and from files: a trace of requests (JSON lines), or the settings of a workload (JSON)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from semel.errors import ConfigError
from semel.lab.simulate.workload import (
    Ask,
    Catalogue,
    Chats,
    Documents,
    Screens,
    Script,
    Talks,
    Traffic,
    Viral,
    Workload,
)

__all__ = ["NAMES", "Trace", "load_workload", "read_trace", "write_trace"]

_SCRIPTS: Final[Mapping[str, type[Any]]] = {
    "catalogue": Catalogue,
    "conversations": Chats,
    "agents": Screens,
    "documents": Documents,
    "viral": Viral,
    "diurnal": Chats,
}
_PEAK: Final = 2.5

NAMES: Final = tuple(_SCRIPTS)
"""The workloads that there are."""


@dataclass(frozen=True)
class Trace:
    """Requests as they were recorded."""

    recorded: tuple[Ask, ...]

    def asks(self, rng: Random) -> Iterator[Ask]:  # noqa: ARG002
        """Return the requests, in order of time."""
        return iter(self.recorded)


def load_workload(name_or_file: str, *, rate: float, seconds: float) -> Workload:
    """Return a workload by its name, or from a file: `.jsonl` is a trace, `.json` has the settings of a workload."""
    path = Path(name_or_file)
    if name_or_file in _SCRIPTS:
        return _talks(name_or_file, {}, rate, seconds)
    if not path.is_file():
        known = ", ".join(NAMES)
        raise ConfigError(f"--workload {name_or_file!r} is neither a file nor one of {known}")
    try:
        if path.suffix == ".jsonl":
            return Trace(tuple(ask for ask in read_trace(path) if ask.at_s < seconds))
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--workload {path}: {error}") from error
    name = settings.pop("workload", "conversations")
    if name not in _SCRIPTS:
        raise ConfigError(f"--workload {path}: {name!r} is not one of {', '.join(NAMES)}")
    return _talks(name, settings, rate, seconds)


def _talks(name: str, settings: Mapping[str, Any], rate: float, seconds: float) -> Talks:
    kind = _SCRIPTS[name]
    traffic = Traffic(rate, seconds, peak=_PEAK if name == "diurnal" else 1.0)
    own, shared = {one.name for one in fields(kind)}, {one.name for one in fields(Traffic)}
    if unknown := sorted(set(settings) - own - shared):
        raise ConfigError(f"the workload {name!r} has no setting {unknown[0]!r}; it has {sorted(own | shared)}")
    script: Script = kind(**{key: _value(settings[key]) for key in own & set(settings)})
    return Talks(script, replace(traffic, **{key: settings[key] for key in shared & set(settings)}))


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def read_trace(path: Path) -> Iterator[Ask]:
    """Yield the requests of a trace: a JSON object on each line, with the fields of `Ask`, in order of time."""
    decoder = msgspec.json.Decoder(Ask)
    last_s = 0.0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                ask = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            if ask.at_s < last_s:
                raise ConfigError(f"{path}, line {number}: at_s {ask.at_s} is before {last_s}; sort the trace")
            last_s = ask.at_s
            yield ask


def write_trace(path: Path, asks: Iterable[Ask]) -> int:
    """Write requests as a trace. Returns their number."""
    with path.open("wb") as out:
        return sum(bool(out.write(msgspec.json.encode(ask) + b"\n")) for ask in asks)
