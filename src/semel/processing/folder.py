"""Model folders: where a model's files are, by its path or by its name on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from semel.errors import ConfigError

__all__ = ["find_folder", "read_config"]

_PATTERNS: Final = ("*.json", "*.jinja", "*.model", "*.txt")
"""Everything but weights: what rendering and preprocessing read."""


def find_folder(model: str, *, revision: str | None = None) -> Path:
    """A model's folder: the path itself, or what the hub's client has of it or fetches (without the weights)."""
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{model!r} is neither a folder nor a model that the hub gives us; "
            f"`semel testing model qwen2-vl DIR` makes one to try"
        ) from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """A model folder's `config.json`."""
    path = folder / "config.json"
    try:
        config: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not a model folder: {path.name} is missing or not JSON") from error
    return config
