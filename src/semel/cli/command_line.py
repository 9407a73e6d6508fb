"""The words of a command line as vLLM's users write them, before typer takes them apart.

Lists of values, underscores, `--config FILE`, and flags of vLLM's server: each becomes the flags that the command has,
or a finding. vLLM's engine flags stay as they are. A value of a secret flag is in no message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.cli.checks.finding import Finding
from semel.core.flag import Flag
from semel.engine.vllm.compat.server_flags import ServerFlag, server_flag
from semel.errors import ConfigError

__all__ = ["CommandLine"]

_WHAT: Final = "flags"
_CONFIG: Final = "--config"
_MODEL: Final = "--model"
_ONE_RANK: Final = ("--data-parallel-rank", "-dpn", "--enable-expert-parallel", "-ep", "--workers")
"""With these, vLLM's `--data-parallel-size` does not mean replicas, or the replicas are counted by semel's own flag."""


@dataclass(slots=True)
class CommandLine:
    """One command line, expanded."""

    flags: Sequence[Flag]
    """Those of the command."""

    takes_engine_flags: bool
    knows_server_flags: bool = True
    """Flags of vLLM's server and `--config` mean something to the command."""

    words: list[str] = field(default_factory=list)
    """For typer."""

    findings: list[Finding] = field(default_factory=list)
    """A warning for each flag of vLLM's server that is ignored or mapped, a problem for each that is refused."""

    def read(self, words: Sequence[str]) -> None:
        """Expand a command line; the file that `--config` names counts less than the line itself."""
        line, path = _split_config(words) if self.knows_server_flags else (words, None)
        self._expand(line)
        own, others, model = self._split()
        if path is not None:
            for words in _config_words(path, line).values():
                self._expand(words)
            of_file, others_of_file, model_of_file = self._split()
            own, others, model = [*of_file, *own], [*others_of_file, *others], model or model_of_file
        self.words = [*own, *model, *others]

    def _split(self) -> tuple[list[str], list[str], list[str]]:
        """Split what was expanded so far: the command's own flags, vLLM's, and the model if it is named."""
        names = self._own
        own = [word for word in self.words if word.partition("=")[0] in names]
        others = [word for word in self.words if word.partition("=")[0] not in names]
        self.words = []
        if others and not others[0].startswith("-"):
            return own, others[1:], others[:1]
        for number, word in enumerate(others):
            name, has_value, value = word.partition("=")
            if name == _MODEL:  # vLLM's older way to name it
                count = 1 if has_value else 2
                return own, [*others[:number], *others[number + count :]], [value or others[number + 1]]
        return own, others, []

    @property
    def _own(self) -> Mapping[str, Flag]:
        return {one.spelling: one for one in self.flags if not one.is_positional}

    def _expand(self, words: Sequence[str]) -> None:
        rest, own = list(words), self._own
        has_ranks = any(word.partition("=")[0].replace("_", "-") in _ONE_RANK for word in words)
        while rest:
            word = rest.pop(0)
            name, has_value, value = word.partition("=")
            spelling = name.replace("_", "-") if name.startswith("--") else name
            values = [value] if has_value else []
            if (one := own.get(spelling)) is not None:
                self._own_flag(one, values, rest)
            elif spelling.startswith("--no-") and (other := own.get(f"--{spelling[5:]}")) and other.kind is bool:
                self.words = [one for one in self.words if one != other.spelling]
            elif (row := self._row(spelling)) is not None and not (has_ranks and row.target == "--workers"):
                self._server_flag(row, spelling, values, rest, word)
            elif spelling.startswith("--no-") and self._row(f"--{spelling[5:]}") is not None:
                continue  # what semel does without the flag
            else:
                self.words.append(word)

    def _own_flag(self, one: Flag, values: list[str], rest: list[str]) -> None:
        if one.kind is bool:
            self.words.append("=".join([one.spelling, *values]))
            return
        if not values and (not rest or self._is_flag(rest[0])):
            raise ConfigError(f"{one.spelling} needs a value")
        has_value = bool(values)
        if not has_value:
            values.append(rest.pop(0))
        if one.is_list and (one.is_secret or not has_value):
            values += _take_values(rest)
        self.words += [f"{one.spelling}={value}" for value in values]

    def _is_flag(self, word: str) -> bool:
        name = word.partition("=")[0].replace("_", "-")
        return name.startswith("--") and (name in self._own or self._row(name) is not None)

    def _row(self, spelling: str) -> ServerFlag | None:
        return server_flag(spelling) if self.knows_server_flags else None

    def _server_flag(self, row: ServerFlag, spelling: str, values: list[str], rest: list[str], word: str) -> None:
        is_others = row.handling == "taken" or row.target not in ("", *self._own)
        if row.is_engines and self.takes_engine_flags and is_others:
            self.words.append(word)
            return
        if row.values != "switch" and not values and rest and not self._is_flag(rest[0]):
            values = [rest.pop(0), *(_take_values(rest) if row.values == "several" else ())]
        if row.handling == "mapped" and row.target in self._own:
            self.words += [f"{row.target}={value}" for value in values]
            self._warn(f"{spelling}: with semel, {row.note}")
        elif row.handling == "ignored":
            self._warn(f"{spelling} is ignored: {row.note}")
        elif row.handling == "refused":
            if not values or not set(values) <= set(row.default):
                self._refuse(f"{spelling} cannot be used", row.note)
        else:
            place = "worker" if row.is_engines else "frontend"
            self._refuse(f"{spelling} is not for this command", f"give it to `semel {place}` or `semel serve`")

    def _warn(self, text: str) -> None:
        self.findings.append(Finding(_WHAT, "warning", text))

    def _refuse(self, text: str, remedy: str) -> None:
        self.findings.append(Finding(_WHAT, "problem", f"{text}: {remedy}"))


def _take_values(rest: list[str]) -> list[str]:
    count = next((number for number, word in enumerate(rest) if word.startswith("-")), len(rest))
    values, rest[:count] = rest[:count], []
    return values


def _split_config(words: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """Return the words without `--config FILE`, and the file."""
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name != _CONFIG:
            continue
        if not has_value and number + 1 == len(words):
            raise ConfigError(f"{_CONFIG} needs a value: a YAML file with flags")
        rest = words[number + (1 if has_value else 2) :]
        if any(word.partition("=")[0] == _CONFIG for word in rest):
            raise ConfigError(f"{_CONFIG} is there twice: name one file")
        return [*words[:number], *rest], Path(value or words[number + 1])
    return words, None


def _config_words(path: Path, line: Sequence[str]) -> dict[str, list[str]]:
    """Read the flags of a YAML file as words, by flag; without those that the line has itself."""
    written = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in line}
    return {
        spelling: _words(spelling, value, path)
        for key, value in _read_yaml(path).items()
        if (spelling := f"--{str(key).replace('_', '-').removeprefix('--')}") not in written
    }


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    import yaml

    load: Callable[[str], Any] = yaml.safe_load
    try:
        found = load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_CONFIG} {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)  # not the error's own words: they have a line of the file
        raise ConfigError(f"{_CONFIG} {path}: is no YAML{f', line {mark.line + 1}' if mark else ''}") from None
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{_CONFIG} {path}: must have one `FLAG: VALUE` in each line, without dashes before the flag")
    return found or {}


def _words(spelling: str, value: object, path: Path) -> list[str]:
    match value:
        case None | []:
            return []
        case bool():
            return [spelling if value else f"--no-{spelling[2:]}"]
        case list():
            return [spelling, *map(_text, value)]
        case dict():
            return [spelling, json.dumps(value)]
        case str() | int() | float():
            return [f"{spelling}={value}"]
    raise ConfigError(f"{_CONFIG} {path}: {spelling[2:]} must be text, a number, true, false, a list or an object")


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
