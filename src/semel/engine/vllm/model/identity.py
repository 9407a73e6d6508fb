"""Identity of an engine's encoder: a hash of everything that may change a bit of its outputs.

Engines with the same identity may use each other's encoder outputs. It covers the encoder's weights as they lie in the
model's files, its configuration, and how and on what vLLM runs it. The folder's name and the revision are no part of
it: they say nothing about what is in the files.

Which tensors are the language model's, the model's own table of names says (`hf_to_vllm_mapper`). What is not certain
is hashed as well, and so are the embeddings of tokens, which some encoders put between their own outputs: a difference
too many only costs an encode.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3

from semel.core import hash_parts
from semel.engine.vllm.compat.versions import installed_version

__all__ = ["encoder_identity", "hash_weights", "identity_parts"]

_DOMAIN: Final = b"semel.encoder.1"
_LANGUAGE_MODEL: Final = "language_model."
_LOAD_FORMATS: Final = ("auto", "hf", "safetensors", "fastsafetensors")
"""Those in which vLLM reads the safetensors files of the folder, and nothing else."""

_LENGTH_BYTES: Final = 8
_MAX_HEADER: Final = 100 << 20
_CHUNK: Final = 16 << 20
_NOT_OF_THE_ENCODER: Final = ("text_config", "transformers_version")

logger = logging.getLogger(__name__)


def encoder_identity(vllm_config: Any, folder: Path) -> bytes | None:
    """Return the identity of an engine's encoder; None, with a line in the log, if it cannot be known.

    Reads the encoder's weights: for a thread, at the speed of the disk.
    """
    try:
        weights = _weights(vllm_config, folder)
    except (LookupError, OSError, TypeError, ValueError) as error:
        logger.warning("encoder outputs are not shared with other workers: %s", error)
        return None
    parts = json.dumps(identity_parts(vllm_config), sort_keys=True, default=str)
    return hash_parts([_DOMAIN, weights, parts.encode()]).digest()


def identity_parts(vllm_config: Any) -> dict[str, Any]:
    """Return everything but the weights."""
    import torch
    from vllm.platforms import current_platform

    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    config = {  # without what begins with a line, such as the folder
        name: value
        for name, value in model.hf_config.to_dict().items()
        if name not in _NOT_OF_THE_ENCODER and not name.startswith("_")
    }
    return {
        "architecture": model.architecture,
        "config": config,
        "dtype": str(model.dtype),
        "quantisation": str(model.quantization),
        "encoder": _encoder_settings(model.multimodal_config),
        "tensor parallel": vllm_config.parallel_config.tensor_parallel_size,
        "compilation": [
            str(compilation.mode),
            str(compilation.backend),
            sorted(compilation.custom_ops),
            compilation.compile_mm_encoder,
            compilation.cudagraph_mm_encoder,
        ],
        "vllm": installed_version(),
        "torch": [torch.__version__, str(torch.version.cuda), torch.get_float32_matmul_precision()],
        "device": [current_platform.device_type, current_platform.get_device_name(), _capability(current_platform)],
        "processor": _processor() if current_platform.is_cpu() else platform.machine(),
    }


def hash_weights(folder: Path, is_language_model: Callable[[str], bool]) -> bytes:
    """Return the hash of all tensors in a folder's safetensors files that are not the language model's, by name."""
    tensors = sorted(
        (tensor for path in folder.glob("*.safetensors") for tensor in _tensors(path)),
        key=lambda tensor: (tensor.name, tensor.path.name),
    )
    if not tensors:
        raise ValueError(f"there are no safetensors files in {folder}")
    hasher = blake3()
    for tensor in tensors:
        if not is_language_model(tensor.name):
            described = json.dumps([tensor.name, tensor.description, tensor.nbytes]).encode()
            hasher.update(len(described).to_bytes(_LENGTH_BYTES, "little") + described)
            for chunk in tensor.content():
                hasher.update(chunk)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class _Tensor:
    path: Path
    name: str
    description: tuple[str, tuple[int, ...]]
    start: int
    nbytes: int

    def content(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(self.nbytes, _CHUNK)))
        left = self.nbytes
        with self.path.open("rb") as file:
            file.seek(self.start)
            while left:
                read = file.readinto(buffer[: min(left, _CHUNK)])
                if not read:
                    raise ValueError(f"{self.path} ends before its tensor {self.name}")
                yield buffer[:read]
                left -= read


def _tensors(path: Path) -> Iterator[_Tensor]:
    with path.open("rb") as file:
        header, start = _header(file, path)
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            yield _Tensor(path, name, (entry["dtype"], tuple(entry["shape"])), start + first, end - first)


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > _MAX_HEADER:
        raise ValueError(f"{path} is no safetensors file")
    return json.loads(file.read(length)), _LENGTH_BYTES + length


def _weights(vllm_config: Any, folder: Path) -> bytes:
    from vllm.model_executor.model_loader import get_model_architecture

    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in _LOAD_FORMATS:
        raise ValueError(f"with --load-format {load.load_format} it is not known what the encoder's weights are")
    if getattr(model, "model_weights", None):
        raise ValueError("the weights are not on this host's disk")
    return hash_weights(folder, _language_model_of(get_model_architecture(model)[0]))


def _language_model_of(model_class: Any) -> Callable[[str], bool]:
    """Return whether a tensor of a model's files belongs to its language model, and to nothing that an encoder uses."""
    mapper = getattr(model_class, "hf_to_vllm_mapper", None)

    def is_language_model(name: str) -> bool:
        mapped = name if mapper is None else mapper.map_name(name)
        return mapped is not None and mapped.startswith(_LANGUAGE_MODEL) and "embed" not in mapped

    return is_language_model


def _encoder_settings(config: Any) -> dict[str, Any]:
    """vLLM's own hash of what it counts, and what it does not."""
    scales = config.mm_encoder_fp8_scale_path
    return {
        "hash": config.compute_hash(),
        "tensor parallel": config.mm_encoder_tp_mode,
        "attention": [str(config.mm_encoder_attn_backend), str(config.mm_encoder_attn_dtype)],
        "scales": None if scales is None else blake3(Path(scales).read_bytes()).hexdigest(),
        "pruning": config.video_pruning_rate,
    }


def _capability(current_platform: Any) -> str:
    return str(current_platform.get_device_capability())


def _processor() -> list[str]:
    """Return the kind of processor: its instructions decide how sums are added up."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return [platform.machine(), _first(lines, "model name"), " ".join(sorted(_first(lines, "flags").split()))]


def _first(lines: Iterable[str], name: str) -> str:
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
