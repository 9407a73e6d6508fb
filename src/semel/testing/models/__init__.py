"""Tiny real models: published architectures and processors, random weights, ordinary model folders.

`build` writes one folder. The same family gives the same bytes, in every process. Each family is a module with its
sizes, its special tokens and the gain of each weight; `tokenizer`, `text`, `weights` and `folder` are common to all of
them. The weights are scaled so that another image or clip gives another greedy text; the text itself means nothing.

torch and transformers are imported while building, never by importing this package.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from semel.errors import ConfigError
from semel.testing.models import gemma3, idefics3, llava, qwen2_5_vl, qwen2_audio, qwen2_vl, whisper

__all__ = ["FAMILIES", "build"]

FAMILIES: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {
        "gemma3": gemma3.write,
        "idefics3": idefics3.write,
        "llava": llava.write,
        "qwen2-audio": qwen2_audio.write,
        "qwen2-vl": qwen2_vl.write,
        "qwen2.5-vl": qwen2_5_vl.write,
        "whisper": whisper.write,
    }
)


def build(family: str, directory: Path) -> Path:
    """Write the model of `family` to `directory` and return it.

    The folder appears complete or not at all. A directory that already contains exactly this model stays unchanged; one
    with any other content is refused.
    """
    write = FAMILIES.get(family)
    if write is None:
        raise ConfigError(f"unknown model family {family!r}: choose one of {', '.join(FAMILIES)}")
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        write(staged)
        _publish(staged, directory)
    return directory


def _publish(staged: Path, directory: Path) -> None:
    try:
        staged.replace(directory)  # works for an absent or an empty directory only
    except OSError as error:
        if not directory.is_dir():
            raise ConfigError(f"cannot write a model to {directory}: {error.strerror}") from error
        if _contents(staged) != _contents(directory):
            raise ConfigError(f"{directory} holds other files: name an empty or a new directory") from error


def _contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }
