"""The model that a command names: a folder with all that is needed, or a name on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, Final

from semel.cli.checks.engine_flags import EngineFlags
from semel.cli.checks.finding import Finding, problem_of
from semel.cli.checks.weights import check_weights
from semel.engine.vllm.compat.source import SourceTree
from semel.engine.vllm.compat.versions import check_processor
from semel.processing.folder import read_config
from semel.processing.processor import ProcessorKind, choose_processor

__all__ = ["check_chat_template", "check_model"]

_WHAT: Final = "model"
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_OWN_LOADERS: Final = frozenset({None, "auto", "safetensors", "hf"})
_TRUE: Final = frozenset({"1", "true"})


def check_model(
    model: str,
    flags: EngineFlags | None = None,
    *,
    trust_remote_code: bool = False,
    processor: ProcessorKind = "hf",
) -> Iterator[Finding]:
    """Report what is wrong with a model. With `flags` of vLLM's an engine will load it; without, a frontend does."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        yield from _check_name(model)
        return
    if faults := list(_check_config(folder)):
        yield from faults
        return
    config = read_config(folder)
    trusts = trust_remote_code or (flags is not None and flags.is_on("--trust-remote-code"))
    problems = [*_check_architecture(folder, config, trusts=trusts)]
    if choose_processor(processor, config) == "vllm":
        problems += problem_of("processor", check_processor)
    if flags is not None:
        problems += _check_tokenizer(folder, flags)
        problems += _check_flags(config, flags)
    yield from problems or [Finding(_WHAT, "ok", f"{folder}: {config.get('model_type') or 'no model_type'}")]
    if flags is not None and flags.text("--load-format") in _OWN_LOADERS:
        yield from check_weights(folder, config)


def check_chat_template(folder: Path, template: str | None) -> Iterator[Finding]:
    """Report a chat template that is named, and is not there or is no template."""
    if template is None or not folder.is_dir():
        return
    from semel.render.chat.template import ChatTemplate

    yield from problem_of("chat template", lambda: ChatTemplate.load(folder, override=template))


def _check_config(folder: Path) -> Iterator[Finding]:
    path = folder / "config.json"
    if path.is_file():
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            yield Finding(_WHAT, "problem", f"{path} is no JSON ({error})", "download it again")
            return
    elif not (folder / "params.json").is_file():
        yield Finding(_WHAT, "problem", f"{folder} is not a model folder: it has no config.json", "check the path")
        return
    yield from problem_of(_WHAT, lambda: read_config(folder))


def _check_name(model: str) -> Iterator[Finding]:
    """Check a model that is no folder here: a path that leads nowhere, or a name on the hub."""
    if model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists():
        detail = f"{model!r} is neither a folder nor a model that the hub gives us"
        yield Finding(_WHAT, "problem", detail, "check the path; `semel testing model qwen2-vl DIR` makes one to try")
        return
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE and not _is_cached(model):
        detail = f"{model!r} is neither a folder nor in the hub's cache, and HF_HUB_OFFLINE keeps it from being fetched"
        yield Finding(_WHAT, "problem", detail, "check the name, or unset HF_HUB_OFFLINE")
        return
    yield Finding(_WHAT, "warning", f"{model} is not a folder", "it is looked up on the hub")


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False


def _check_architecture(folder: Path, config: Mapping[str, Any], *, trusts: bool) -> Iterator[Finding]:
    """Report a type of model that transformers does not know, and that brings no code or may not run it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or _is_known(kind):
        return
    if "auto_map" in config:
        if not trusts:
            detail = f"{folder} brings its own code for model_type {kind!r}, which runs only with --trust-remote-code"
            yield Finding(_WHAT, "problem", detail, "add the flag if you trust the model")
        return
    detail = (
        f"{folder}: config.json has model_type {kind!r}, which transformers {version('transformers')} does not know"
    )
    yield Finding(
        _WHAT, "problem", detail, "is it spelt as the model's authors do? A newer model needs a newer release"
    )


def _is_known(kind: str) -> bool:
    """Return whether transformers, vLLM or a plug-in may know a type: their source names it, or cannot be read."""
    text = _text("transformers", "models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
    if not text or _has_plugins():
        return True
    text += _text("vllm", "transformers_utils/config.py")
    return f'"{kind}"' in text or re.search(rf"\b{re.escape(kind)}=", text) is not None


def _text(package: str, *paths: str) -> str:
    tree = SourceTree.installed(package)
    return "" if tree is None else "\n".join(tree.read(f"{package}/{path}") or "" for path in paths).strip()


def _has_plugins() -> bool:
    """Return whether a package besides vLLM and semel adds to vLLM: models of its own, perhaps."""
    found = (
        one
        for group in entry_points().groups
        if group.endswith(".general_plugins")
        for one in entry_points(group=group)
    )
    return any(one.dist is None or not one.dist.name.startswith(("vllm", "semel")) for one in found)


def _check_tokenizer(folder: Path, flags: EngineFlags) -> Iterator[Finding]:
    if flags.text("--tokenizer") or flags.is_on("--skip-tokenizer-init"):
        return
    if not any((folder / name).exists() for name in _TOKENIZERS):
        detail = f"{folder} has no tokenizer, neither tokenizer.json nor another file of one"
        yield Finding(_WHAT, "problem", detail, "copy it from the model that this one was made of, or name --tokenizer")


def _check_flags(config: Mapping[str, Any], flags: EngineFlags) -> Iterator[Finding]:
    """Report flags that ask for what the model does not have."""
    if flags.text("--hf-overrides") or flags.text("--hf-config-path"):
        return
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    limit, wanted = _max_length(config, text), flags.number("--max-model-len")
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").lower() in _TRUE
    if limit and wanted and wanted > limit and not allowed:
        detail = f"--max-model-len {wanted:.0f} is more than the {limit} tokens that the model takes (config.json)"
        yield Finding(_WHAT, "problem", detail, "choose at most that")
    heads, ranks = text.get("num_attention_heads"), flags.number("--tensor-parallel-size")
    if isinstance(heads, int) and ranks and heads % int(ranks):
        detail = f"--tensor-parallel-size {ranks:.0f} does not divide the model's {heads} attention heads"
        yield Finding(_WHAT, "problem", detail, "choose a size that does")


def _max_length(config: Mapping[str, Any], text: Mapping[str, Any]) -> int | None:
    """Return the tokens that a model takes; None where a rule of its own may raise it."""
    scaled = [part.get(name) for part in (config, text) for name in ("rope_scaling", "rope_parameters")]
    if any(isinstance(one, dict) and one.get("factor") for one in scaled):
        return None
    found = [value for part in (config, text) for name in _LENGTHS if isinstance(value := part.get(name), int)]
    return max(found, default=None)
