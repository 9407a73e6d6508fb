"""Flags of vLLM that change prompts or features, and what becomes of each.

Every field of vLLM's `ModelConfig` and `MultiModalConfig` stands in one of three tables: it travels in the contract and
frontends honour it, it changes no prompt and no feature, or it is refused when a worker starts. A test compares the
tables with vLLM's own fields, so a field of a new vLLM has to be looked at before it can do any harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from semel.core import Rendering
from semel.errors import ConfigError

__all__ = ["FORWARDED", "HARMLESS", "REFUSED", "check_rendering_flags", "model_aliases", "read_rendering"]

FORWARDED: Final = frozenset(
    {
        *("code_revision", "config_format", "dtype", "hf_overrides", "interleave_mm_strings", "language_model_only"),
        *("limit_mm_per_prompt", "limit_per_prompt", "max_model_len", "media_io_kwargs", "mm_device_do_normalize"),
        *("mm_processor_kwargs", "model", "model_impl", "revision", "served_model_name", "tokenizer", "tokenizer_mode"),
        *("tokenizer_revision", "trust_remote_code"),
    }
)
"""They are in the contract: in its target, its limits or its names. A frontend names the model itself."""

HARMLESS: Final = frozenset(
    {
        # What vLLM works out by itself.
        *("hf_config", "hf_text_config", "is_submodel_config", "multimodal_config", "spec_target_max_model_len"),
        *("word_embeddings_untied_by_checkpoint",),
        # Weights, sampling, kernels, memory.
        *("allow_deprecated_quantization", "disable_cascade_attn", "disable_sliding_window", "enable_cumem_allocator"),
        *("enable_nccl_comm_suspend", "enable_sleep_mode", "enable_trace_replay", "enforce_eager", "generation_config"),
        *("hf_token", "logits_processors", "logprobs_mode", "max_logprobs", "model_weights"),
        *("override_generation_config", "quantization", "quantization_config", "return_sampling_mask", "seed"),
        *("sleep_mode_backend", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "use_fp64_gumbel"),
        # Tasks that semel has no route for.
        *("convert", "io_processor_plugin", "pooler_config", "runner"),
        # Of vLLM's own server and its caches, whose work semel does: fetching, hashing, rendering.
        *("allowed_local_media_path", "allowed_media_domains", "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb"),
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc"),
        *("renderer_num_workers",),
        # How the encoder computes, not what it gets.
        *("allow_missing_mm_embeddings", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_only"),
        *("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path"),
        *("mm_encoder_tp_mode", "skip_mm_profiling"),
    }
)
"""No prompt and no feature depends on them."""

_NO_EMBEDDINGS: Final = "semel takes no embeddings as input; leave it out"
_PRUNING: Final = "semel does not prune the tokens of videos yet; leave it out"

REFUSED: Final[Mapping[str, str]] = {
    "enable_mm_embeds": _NO_EMBEDDINGS,
    "enable_prompt_embeds": _NO_EMBEDDINGS,
    "hf_config_path": "frontends read the config of the model folder; put that config.json into a copy of the folder",
    "mm_processor_device": "semel preprocesses on CPUs, in its frontends; leave it out",
    "model_class_overrides": "frontends would not know the class; register it with a plug-in of vLLM instead",
    "skip_tokenizer_init": "semel's answers are texts; leave it out",
    "video_pruning_method": _PRUNING,
    "video_pruning_rate": _PRUNING,
}
"""They change rendering in ways that frontends cannot follow: the reasons, and what to do."""

_EQUIVALENT: Final[Mapping[str, Sequence[object]]] = {"mm_processor_device": ("cpu",), "video_pruning_rate": (0.0,)}
"""Values of them that ask for what semel does anyway."""

_MODES: Final = frozenset({"auto", "hf"})
_MISTRAL: Final = (
    "the model is in Mistral's own format (tekken.json, params.json), which semel does not render; if its folder has "
    "config.json and tokenizer.json too, start with --tokenizer-mode hf --config-format hf --load-format hf; "
    "otherwise serve a version that is converted to Hugging Face's format"
)
_MEDIA_OPTIONS: Final[Mapping[str, Mapping[str, Sequence[object]]]] = {
    "audio": {"audio_backend": ()},
    "image": {"image_mode": ("RGB",), "rgba_background_color": ([255, 255, 255], (255, 255, 255))},
}
"""Values of `--media-io-kwargs`: any value where there is none here, since semel decodes by itself; else these."""


def check_rendering_flags(arguments: Any) -> None:
    """Refuse flags of an engine that frontends could not follow; `arguments` are vLLM's `AsyncEngineArgs`."""
    plain = type(arguments)(model=arguments.model)
    for name, reason in REFUSED.items():
        value = getattr(arguments, name)
        if value != getattr(plain, name) and value not in _EQUIVALENT.get(name, ()):
            raise ConfigError(f"{_flag(name)}: {reason}")
    _check_media_options(arguments.media_io_kwargs or {})
    if not isinstance(arguments.hf_overrides or {}, Mapping):
        raise ConfigError("--hf-overrides: only a JSON object can be told to frontends, not a function")
    _check_format(arguments)


def read_rendering(config: Any) -> Rendering:
    """Return what frontends have to know of an engine's flags; `config` is vLLM's `ModelConfig`."""
    if config.tokenizer_mode not in _MODES:
        raise ConfigError(
            f"vLLM renders the chats of this model by code of its own (--tokenizer-mode {config.tokenizer_mode}), "
            "which semel does not have; start with --tokenizer-mode hf if the model has a chat template"
        )
    has_own = config.tokenizer == config.model
    multimodal = config.get_multimodal_config() if config.is_multimodal_model else None
    return Rendering(
        tokenizer=None if has_own else str(config.tokenizer),
        tokenizer_revision=None if has_own else config.tokenizer_revision,
        tokenizer_mode=config.tokenizer_mode,
        revision=config.revision,
        code_revision=config.code_revision,
        trust_remote_code=bool(config.trust_remote_code),
        config_format=str(getattr(config.config_format, "value", config.config_format)),
        model_impl=str(getattr(config.model_impl, "value", config.model_impl)),
        hf_overrides=dict(config.hf_overrides or {}) or None,
        media_io_kwargs=None if multimodal is None else _without_empty(multimodal.media_io_kwargs),
        interleave_mm_strings=bool(multimodal is not None and multimodal.interleave_mm_strings),
    )


def model_aliases(arguments: Any) -> tuple[str, ...]:
    """Return the names of `--served-model-name` but the first, which vLLM's own config keeps."""
    names = arguments.served_model_name
    return tuple(dict.fromkeys(names[1:])) if isinstance(names, list) else ()


def _check_media_options(options: Mapping[str, Mapping[str, object]]) -> None:
    for modality, own in options.items():
        if modality == "video":  # vLLM's own loader takes them
            continue
        known = _MEDIA_OPTIONS.get(modality, {})
        for name, value in own.items():
            if name not in known or (known[name] and value not in known[name]):
                raise ConfigError(
                    f"--media-io-kwargs: semel decodes {modality} by itself and does not know {name}={value!r}; "
                    "leave it out"
                )


def _check_format(arguments: Any) -> None:
    """Refuse a model whose chats only mistral_common can render."""
    formats = {name: _value(getattr(arguments, name)) for name in ("config_format", "load_format", "tokenizer_mode")}
    if "mistral" in formats.values():
        raise ConfigError(_MISTRAL)
    places = {
        "config_format": (arguments.model, arguments.revision, ["params.json"]),
        "tokenizer_mode": (
            arguments.tokenizer or arguments.model,
            arguments.tokenizer_revision or arguments.revision,
            ["tekken.json", "tokenizer.model.v*"],
        ),
    }
    for name, place in places.items():
        if formats[name] == "auto" and _is_mistral(*place):
            raise ConfigError(_MISTRAL)


def _is_mistral(model: str, revision: str | None, files: list[str]) -> bool:
    """Return whether vLLM would choose Mistral's format by itself."""
    from vllm.transformers_utils.repo_utils import any_pattern_in_repo_files, is_mistral_model_repo

    try:
        return bool(is_mistral_model_repo(model, revision) and any_pattern_in_repo_files(model, files, revision))
    except Exception:  # noqa: BLE001 - what cannot be looked at, vLLM refuses itself, in its own words
        return False


def _without_empty(options: Mapping[str, Mapping[str, object]]) -> Mapping[str, Mapping[str, object]] | None:
    return {modality: dict(own) for modality, own in options.items() if own} or None


def _value(setting: Any) -> str:
    return str(getattr(setting, "value", setting))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
