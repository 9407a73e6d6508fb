"""Compatibility of workers: what of their contracts has to be the same within one fleet. Pure.

Frontends and workers may run different patches of the libraries that decode and transform, as long as the major and
minor versions are the same and every probe gives the same result (`semel.processing.probes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Final, Literal

import msgspec
from msgspec import UNSET

from semel.core import AnswerSettings, Contract, Probes
from semel.processing.fingerprint import minor_version
from semel.processing.probes import probe_names

__all__ = ["Difference", "RefusalReason", "cell_difference", "contract_id", "first_difference", "processing_difference"]

RefusalReason = Literal[
    "aliases",
    "answers",
    "cell",
    "chat_template",
    "fingerprint",
    "generation_config",
    "key",
    "limits",
    "model",
    "parsers",
    "probes",
    "protocol",
    "target",
    "versions",
    "weights",
]
"""The reason for which a worker is not used, for metrics: a closed list."""

_MAY_DIFFER: Final = frozenset(
    {"adapters", "cache_bytes", "cell"}
)  # every other field changes answers, also a later one
_ID_BYTES: Final = 6

_REMEDIES: Final[Mapping[str, tuple[RefusalReason, str]]] = {
    "model": ("model", "serve the same model, or give it the same --served-model-name"),
    "target": ("target", "start both with the same --dtype, --mm-processor-kwargs and flags that change rendering"),
    "aliases": ("aliases", "give both the same --served-model-name"),
    "fields": ("model", "serve the same model"),
    "max_items": ("limits", "start both with the same --limit-mm-per-prompt"),
    "max_embeds": ("limits", "start both with the same --max-num-batched-tokens"),
    "max_tokens": ("limits", "start both with the same --max-model-len"),
    "pooling": ("answers", "start both with the same --runner, --convert and --pooler-config"),
    "weights": ("weights", "give both the same weights, --revision, --load-format and --quantization"),
    "tool_call_parser": ("parsers", "start both with the same --tool-call-parser"),
    "enable_auto_tool_choice": ("parsers", "start both with --enable-auto-tool-choice, or neither"),
    "tool_strict_level": ("parsers", "start both with the same --tool-strict-level"),
    "reasoning_parser": ("parsers", "start both with the same --reasoning-parser"),
    "parser_plugins": ("parsers", "give both the same files of --tool-parser-plugin and --reasoning-parser-plugin"),
    "generation_config": (
        "generation_config",
        "give both the same generation_config.json, --generation-config and --override-generation-config",
    ),
    "chat_template": ("chat_template", "give both the same chat template in the model folder"),
}
_PROCESSOR_REMEDY: Final = (
    "start both with the same model folder, the same --processor and the same major and minor versions of "
    "transformers, torch and pillow"
)
_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "audio": ("av",),
    "video": ("av",),
    "feature": ("transformers", "torchvision", "torch", "numpy"),
}
_IMAGE_LIBRARIES: Final = ("pillow",)
_NAMES: Final[Mapping[str, str]] = {"av": "PyAV", "pillow": "Pillow"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A reason for which a worker is not used; the text, for the log, also says what to do."""

    reason: RefusalReason
    text: str

    def __str__(self) -> str:
        return self.text


def cell_difference(ours: str | None, worker: Contract) -> Difference | None:
    """Compare the cells of a frontend and a worker. A missing name fits all, so that a running fleet can be named."""
    if ours is None or worker.cell is UNSET or worker.cell == ours:
        return None
    remedy = "give a frontend the workers of its own cell, or start both with the same --cell"
    text = f"it belongs to cell {_excerpt(worker.cell)}, this frontend to {ours!r}: {remedy}"
    return Difference("cell", text)


def contract_id(contract: Contract) -> str:
    """Return a short hash of what has to be the same for equal answers; patches of libraries may differ."""
    compared = {
        field.name: value
        for field in fields(Contract)
        if field.name not in _MAY_DIFFER | {"probes"} and (value := getattr(contract, field.name)) is not UNSET
    }
    encoded = msgspec.json.encode(compared, order="deterministic")
    return blake2b(encoded, digest_size=_ID_BYTES).hexdigest()


def first_difference(fleet: Contract, worker: Contract) -> Difference | None:
    """Return why a worker may not serve with the fleet's others; None if it answers as they do."""
    for name in (field.name for field in fields(Contract) if field.name not in _MAY_DIFFER):
        ours, its = getattr(fleet, name), getattr(worker, name)
        if ours == its:
            continue
        if name in ("fingerprint", "probes"):
            return processing_difference(
                (fleet.fingerprint, fleet.probes), (worker.fingerprint, worker.probes), here="in the fleet"
            )
        if isinstance(ours, AnswerSettings):
            return _answers_difference(ours, its)
        return _difference(name, ours, its)
    return None


def processing_difference(
    ours: tuple[str, Probes | None], its: tuple[str, Probes | None], *, here: str = "here"
) -> Difference:
    """Return why two processors with different fingerprints make different features, as far as their probes tell.

    `here` says where ours is: in this frontend, or in the other workers of the fleet.
    """
    known, other = ours[1], its[1]
    if known is not None and other is not None:
        if (found := _version_difference(known, other, here)) is not None:
            return found
        if known.catalogue == other.catalogue and (number := known.first_difference(other)) is not None:
            return _probe_difference(known, other, number, here)
    text = f"the worker's processor ({its[0][:12]}) is not the one {here} ({ours[0][:12]}): {_PROCESSOR_REMEDY}"
    return Difference("fingerprint", text)


def _answers_difference(ours: AnswerSettings, its: AnswerSettings) -> Difference | None:
    for name in (field.name for field in fields(AnswerSettings)):
        if (mine := getattr(ours, name)) != (other := getattr(its, name)):
            return _difference(name, mine, other)
    return None


def _difference(name: str, ours: object, its: object) -> Difference:
    reason, remedy = _REMEDIES.get(name, ("answers", "start both with the same flags"))
    label = name.replace("_", " ")
    return Difference(reason, f"its {label} is {_excerpt(its)}, the fleet's is {_excerpt(ours)}: {remedy}")


def _version_difference(ours: Probes, its: Probes, here: str) -> Difference | None:
    for package in sorted({*ours.versions, *its.versions}):
        mine, other = ours.versions.get(package), its.versions.get(package)
        if minor_version(mine) != minor_version(other):
            both = f"{_NAMES.get(package, package)} {mine or 'none'} {here}, {other or 'none'} there"
            return Difference("versions", f"{both}: install the same major and minor version")
    return None


def _probe_difference(ours: Probes, its: Probes, number: int, here: str) -> Difference:
    name = probe_names()[number]
    libraries = _LIBRARIES.get(name.partition(" ")[0], _IMAGE_LIBRARIES)
    verb = "make" if libraries is _LIBRARIES["feature"] else "decode"
    found = [
        f"{_NAMES.get(package, package)} {ours.versions.get(package)} {here}, {its.versions.get(package)} there"
        for package in libraries
        if ours.versions.get(package) != its.versions.get(package)
    ]
    same = f"{_NAMES.get(libraries[0], libraries[0])} {ours.versions.get(libraries[0])} {here} and there"
    who = " and ".join(found) or same
    remedy = "install the same versions" if found else "another build, or another kind of CPU: make them alike"
    return Difference("probes", f"{who} {verb} {name!r} differently: {remedy}")


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
