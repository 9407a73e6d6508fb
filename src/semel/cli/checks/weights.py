"""The weights of a model folder: that they are there, whole, and of the model that `config.json` describes.

Only headers are read, so that it takes milliseconds whatever their size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from semel.cli.checks.finding import Finding
from semel.core.flag import GIB

__all__ = ["check_weights"]

_WHAT: Final = "weights"
_INDEX: Final = "model.safetensors.index.json"
_OTHERS: Final = ("*.bin", "*.pt", "*.pth", "*.gguf")
_POINTER: Final = b"version https://git-lfs"
_MAX_HEADER_BYTES: Final = 100_000_000
_EMBEDDING: Final = "embed_tokens.weight"
_NOT_TEXT: Final = ("vision", "visual", "audio", "encoder")
_PLAIN: Final = frozenset({"F64", "F32", "F16", "BF16"})


def check_weights(folder: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Report what is wrong with the weights of a folder, or that nothing is."""
    files = sorted(folder.glob("*.safetensors"))
    if missing := [name for name in _indexed(folder) if not (folder / name).is_file()]:
        some = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        yield _problem(f"{folder} lacks {len(missing)} of its files of weights: {some}", "download them again")
        return
    if not files:
        if not any(any(folder.glob(pattern)) for pattern in _OTHERS):
            yield _problem(f"{folder} has no weights, no *.safetensors", "download the model again, with its weights")
        return
    for path in files:
        if (fault := _file_fault(path)) is not None:
            yield fault
            return
    headers = [header for path in files if (header := _header(path)) is not None]
    size = (
        f"{len(files)} file{'s' if len(files) > 1 else ''}, {sum(path.stat().st_size for path in files) / GIB:.2f} GiB"
    )
    yield from _misfits(folder, config, headers) or [Finding(_WHAT, "ok", size)]


def _problem(detail: str, remedy: str) -> Finding:
    return Finding(_WHAT, "problem", detail, remedy)


def _indexed(folder: Path) -> Sequence[str]:
    """Return the files that the index of a folder names."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        return sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ()


def _file_fault(path: Path) -> Finding | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(8, len(_POINTER)))
    if start.startswith(_POINTER):
        return _problem(f"{path} is a pointer of Git LFS, not the weights", f"`git lfs pull` in {path.parent}")
    header_bytes = int.from_bytes(start[:8], "little")
    if len(start) < 8 or header_bytes > _MAX_HEADER_BYTES:
        return _problem(f"{path} is no safetensors file: {size:,} bytes of something else", "download it again")
    header = _header(path)
    ends = [entry["data_offsets"][1] for name, entry in (header or {}).items() if name != "__metadata__"]
    needed = 8 + header_bytes + max(ends, default=0)
    if header is None or size < needed:
        return _problem(f"{path} is cut off: it has {size:,} of {needed:,} bytes", "download it again")
    return None


def _header(path: Path) -> Mapping[str, Any] | None:
    """Read the header of a safetensors file: dtype, shape and place of each tensor; None if it is cut off."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: Mapping[str, Any] = json.loads(file.read(length))
        except ValueError:
            return None
    return header


def _misfits(folder: Path, config: Mapping[str, Any], headers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Token embeddings that are not of the size that the config says: config and weights are of different models."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    expected = [text.get("vocab_size"), text.get("hidden_size")] if text else [None, None]
    if not all(isinstance(one, int) for one in expected):
        return []
    for header in headers:
        for name, entry in header.items():
            if not name.endswith(_EMBEDDING) or any(part in name for part in _NOT_TEXT):
                continue
            if entry["dtype"] in _PLAIN and len(entry["shape"]) == 2 and entry["shape"] != expected:
                return [
                    _problem(
                        f"the weights of {folder} do not fit its config.json: {name} is "
                        f"{entry['shape'][0]:,} × {entry['shape'][1]:,}, and vocab_size × hidden_size is "
                        f"{expected[0]:,} × {expected[1]:,}",
                        "take both from the same model",
                    )
                ]
    return []
