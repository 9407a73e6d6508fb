"""The fingerprint of a processor: equal fingerprints mean equal features for equal media.

It covers everything that changes a feature: the processor's class and backend, its whole config and the model's, the
tokenizer, the major and minor versions of the code that touches pixels and samples, the engine's options, dtype and
normalisation, its flags that change features, and the code files of a model folder whose code runs. What patches of
that code change is covered by the probes (`semel.processing.probes`). It holds nothing that differs between machines of
one fleet: no path, no name of a build. Where an engine's own processor runs the HF processor, its version and class are
covered too, and its name stands before the hash: so a contract says which kind of processor it is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from semel.core import Target, hash_parts
from semel.media import CANON

__all__ = ["PACKAGES", "Within", "fingerprint", "minor_version", "public_version"]

PACKAGES: Final = ("av", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers")
_PARTS: Final = ("image_processor", "video_processor", "feature_extractor")
_TOKENIZER_FILES: Final = ("*.model", "*.tiktoken", "merges.txt", "tokenizer_config.json", "vocab.*")
_PLACES: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


@dataclass(frozen=True, slots=True)
class Within:
    """An engine's own processor, which calls an HF processor."""

    engine: str
    version: str
    processor: str
    """The name of its class."""


def fingerprint(
    processor: Any,
    config: Mapping[str, Any],
    target: Target,
    tokenizer: Path,
    *,
    within: Within | None = None,
    code: Mapping[str, bytes] | None = None,
) -> str:
    """Return the fingerprint of an HF processor, run for a model's engine; its tokenizer decides the tokens of layouts.

    `within` is the engine's own processor, if that is what calls the HF processor; `code` are the files of the model
    folder that run, if any do.
    """
    parts: dict[str, object] = {
        "canon": CANON,
        "classes": _class_names(processor),
        "config": _without_places(config),
        "processor": _without_places(_settings(processor)),
        "target": {
            "dtype": target.dtype,
            "normalisation": target.normalisation,
            "options": dict(target.options or {}),
        },
        "tokenizer": _tokenizer_hash(tokenizer),
        "versions": {package: minor_version(public_version(package)) for package in PACKAGES},
    }
    if changed := target.rendering.of_features:
        parts["rendering"] = changed
    if code:
        parts["code"] = {name: blake3(text).hexdigest() for name, text in code.items()}
    if within is not None:
        parts["within"] = [within.engine, minor_version(within.version), within.processor]
    hasher = hash_parts((b"semel.fingerprint.1", json.dumps(parts, sort_keys=True, default=str).encode()))
    return hasher.hexdigest() if within is None else f"{within.engine}:{hasher.hexdigest()}"


def _tokenizer_hash(path: Path) -> object:
    """Of `tokenizer.json`; where there is none, of the other files that a tokenizer is made of."""
    if path.exists():
        return blake3(path.read_bytes()).hexdigest()
    files = sorted({file for pattern in _TOKENIZER_FILES for file in path.parent.glob(pattern)})
    return {file.name: blake3(file.read_bytes()).hexdigest() for file in files} or None


def _settings(processor: Any) -> object:
    """Return the whole config of a processor; an engine may have processors that keep none besides their parts'."""
    if hasattr(processor, "to_dict"):
        return processor.to_dict()
    parts: Mapping[str, Any] = {name: getattr(processor, name, None) for name in _PARTS}
    return {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}


def _class_names(processor: Any) -> Mapping[str, str]:
    """Return the classes of the processor and of its parts: the backend is one of them."""
    names = {"processor": type(processor).__qualname__}
    for attribute in _PARTS:
        if (part := getattr(processor, attribute, None)) is not None:
            names[attribute] = f"{_module_name(type(part))}.{type(part).__qualname__}"
    return names


def _module_name(kind: type) -> str:
    """Return the module of a class; of code from a model folder without that folder, which differs between machines."""
    name = kind.__module__
    return name.rpartition(".")[2] if name.startswith("transformers_modules.") else name


def minor_version(version: str | None) -> str | None:
    """Return the major and minor numbers of a version: 13.0 of 13.0.1, 2.13 of 2.13.0+cpu."""
    return None if version is None else ".".join(version.partition("+")[0].split(".")[:2])


def public_version(package: str) -> str | None:
    """Return the version of a package without the name of its build; None if it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def _without_places(tree: Any) -> Any:
    """Return a config without what says where it was loaded from or what saved it."""
    if isinstance(tree, Mapping):
        return {key: _without_places(value) for key, value in tree.items() if key not in _PLACES}
    if isinstance(tree, (list, tuple)):
        return [_without_places(value) for value in tree]
    return tree
