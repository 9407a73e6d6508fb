"""The contract of a running vLLM engine: what it expects of features, and what its answers depend on.

Workers of a fleet state in it the weights, parsers and sampling defaults that change their answers, so that two that
would answer differently are never mixed. Of weights the headers, sizes and a few samples are read, never all bytes: a
model has hundreds of gigabytes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from semel.core import AnswerSettings, Contract, Rendering, hash_parts
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.parsing import ParserFlags
from semel.engine.vllm.requests.sampling import Defaults
from semel.processing.folder import find_tokenizer
from semel.processing.probes import proven_fingerprint, run_probes
from semel.processing.processor import Processor
from semel.render.chat.template import hash_templates

__all__ = ["answer_settings", "build_contract", "hash_weights"]


_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_HASH_BYTES: Final = 16
_MAX_HEADER_BYTES: Final = 64 << 20
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4_096


def answer_settings(llm: Any, flags: ParserFlags, folder: Path, rendering: Rendering) -> AnswerSettings:
    """Return those of a running `AsyncLLM` and the flags that name its parsers."""
    config, structured = llm.model_config, llm.vllm_config.structured_outputs_config
    defaults = Defaults.from_config(config)
    plugins = (flags.tool_parser_plugin, structured.reasoning_parser_plugin)
    is_dummy = llm.vllm_config.load_config.load_format == "dummy"
    return AnswerSettings(
        weights=hash_weights(folder, config.revision, str(config.quantization), is_dummy=is_dummy),
        tool_call_parser=flags.tool_call_parser,
        enable_auto_tool_choice=flags.enable_auto_tool_choice,
        tool_strict_level=flags.tool_strict_level,
        reasoning_parser=structured.reasoning_parser or None,
        parser_plugins={Path(name).name: _hash_file(Path(name)) for name in plugins if name},
        generation_config={**defaults.parameters, "max_answer": defaults.max_answer},
        chat_template=hash_templates(folder, find_tokenizer(folder, rendering)),
    )


def hash_weights(folder: Path, revision: str | None, quantization: str, *, is_dummy: bool = False) -> str:
    """Hash a folder's weights: names, sizes, headers and samples; the revision, and what they are quantized to."""
    parts = [str(revision).encode(), quantization.encode(), b"dummy" if is_dummy else b""]
    for path in sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)}):
        parts += [path.name.encode(), str(path.stat().st_size).encode(), *_excerpts(path)]
    return hash_parts((b"semel.weights.1", *parts)).hexdigest(length=_HASH_BYTES)


def _excerpts(path: Path) -> Iterator[bytes]:
    """Read a safetensors file's header, and a few samples of any file: another training has other numbers in them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            yield file.read(min(length, _MAX_HEADER_BYTES))
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // max(1, _SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def _hash_file(path: Path) -> str:
    return hash_parts((path.read_bytes(),)).hexdigest(length=_HASH_BYTES) if path.is_file() else ""


def build_contract(
    llm: Any,
    model: VllmModel,
    processor: Processor,
    folder: Path,
    parsers: ParserFlags,
    *,
    cache_bytes: int,
    aliases: tuple[str, ...],
) -> Contract:
    """Build the contract of an `AsyncLLM` whose features come from this processor of a model folder. Takes a second."""
    config, probes = llm.model_config, run_probes(processor)
    return Contract(
        model=config.served_model_name or config.model,
        fingerprint=proven_fingerprint(processor.fingerprint, probes),
        target=model.target,
        fields={modality: model.fields(modality) for modality in model.max_items},
        max_items=model.max_items,
        max_embeds=llm.input_processor.mm_encoder_cache_size,
        max_tokens=config.max_model_len,
        cache_bytes=cache_bytes,
        needs_seal=model.needs_seal,
        aliases=aliases,
        probes=probes,
        answers=answer_settings(llm, parsers, folder, model.target.rendering),
    )
