"""Tiny real models: published architectures and processors, random weights, ordinary model folders.

`build` writes one folder. The same family gives the same bytes, in every process. A family is its sizes, its special
tokens and the gain of each weight: a `Declaration` in a module with its kin. `tokenizer`, `text`, `weights` and
`folder` are common to all of them. The weights are scaled so that another image or clip gives another greedy text; the
text itself means nothing. `FAMILIES` also says how vLLM serves each of them.

torch and transformers are imported while building, never by importing this package.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from semel.errors import ConfigError
from semel.lab.testing.models import (
    cohere,
    deepseek,
    gemma,
    gemma3,
    glm,
    idefics3,
    internvl,
    lfm2,
    llava,
    minicpm,
    mistral,
    omni,
    paddleocr,
    qwen2_audio,
    qwen2_vl,
    qwen3,
    whisper,
)
from semel.lab.testing.models.declaration import Serving, TinyModel

__all__ = ["FAMILIES", "Serving", "TinyModel", "build"]

_KIN = (
    *(cohere, deepseek, gemma, gemma3, glm, idefics3, internvl, lfm2, llava, minicpm, mistral, omni, paddleocr),
    *(qwen2_audio, qwen2_vl, qwen3, whisper),
)

FAMILIES: Mapping[str, TinyModel] = MappingProxyType(
    dict(sorted((one.family, one.tiny_model()) for kin in _KIN for one in kin.FAMILIES))
)


def build(family: str, directory: Path) -> Path:
    """Write the model of `family` to `directory` and return it.

    The folder appears complete or not at all. A directory that already contains exactly this model stays unchanged; one
    with any other content is refused.
    """
    model = FAMILIES.get(family)
    if model is None:
        raise ConfigError(f"unknown model family {family!r}: choose one of {', '.join(FAMILIES)}")
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        model.write(staged)
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
