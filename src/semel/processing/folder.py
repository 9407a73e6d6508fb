"""Model folders: where a model's and its tokenizer's files are, by a path or by a name on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from semel.core import Rendering
from semel.errors import ConfigError

__all__ = ["code_files", "find_folder", "find_tokenizer", "read_config", "runs_code"]

_PATTERNS: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Everything but weights: what rendering and preprocessing read."""

_CODE: Final = "*.py"
_CONFIGS: Final = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
_AS_IT_IS: Final = Rendering()


def find_folder(model: str, rendering: Rendering = _AS_IT_IS) -> Path:
    """Return a model's folder: the path itself, or what the hub's client has of it or fetches (without the weights)."""
    return _find(model, rendering.revision, with_code=rendering.trust_remote_code)


def find_tokenizer(folder: Path, rendering: Rendering) -> Path:
    """Return the folder of the tokenizer: the model's, unless the engine was started with another one."""
    if rendering.tokenizer is None:
        return folder
    return _find(rendering.tokenizer, rendering.tokenizer_revision, with_code=rendering.trust_remote_code)


def runs_code(folder: Path, rendering: Rendering) -> bool:
    """Return whether code of the model folder runs instead of transformers' own."""
    if not rendering.trust_remote_code:
        return False
    configs = (path.read_text(encoding="utf-8") for name in _CONFIGS if (path := folder / name).is_file())
    return any('"auto_map"' in config for config in configs)


def code_files(folder: Path) -> list[Path]:
    """Return the code files of a model folder, in an order that is the same everywhere."""
    return sorted(folder.rglob(_CODE), key=lambda path: path.relative_to(folder).as_posix())


def _find(model: str, revision: str | None, *, with_code: bool) -> Path:
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [*_PATTERNS, _CODE] if with_code else [*_PATTERNS]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{model!r} is neither a folder nor a model that the hub gives us; "
            f"`semel testing model qwen2-vl DIR` makes one to try"
        ) from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return a model folder's `config.json`."""
    path = folder / "config.json"
    if not path.is_file() and (folder / "params.json").is_file():
        raise ConfigError(
            f"{folder} has a model in Mistral's own format (params.json, no config.json), which semel does not render: "
            "serve a version that is converted to Hugging Face's format"
        )
    try:
        config: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not a model folder: {path.name} is missing or not JSON") from error
    return config
