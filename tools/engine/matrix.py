"""The configurations of vLLM in which semel is held to bare vLLM, as data. `scripts/matrix` runs them.

A GPU user gets other configurations by default than a CPU has, and operators add more. Most of them run on a CPU: by
switches, and by shims that live in `tools/engine/shims` and nowhere else. The V2 model runner runs with Triton's
interpreter on a CPU, not CUDA: what is shown is what semel's parts do there, not what a GPU's kernels do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["IN_CI", "MATRIX", "REFUSED", "SHIMS", "Asked", "Configuration", "Refused", "flags_of"]

Shim = Literal["ASYNC", "TRITON"]
Asked = Literal["image", "audio"]

SHIMS: Final = Path(__file__).resolve().parent / "shims"
SCRATCH: Final = "{scratch}"
"""Stands in a flag for a folder that one engine has for itself."""

_QWEN_SIZES: Final = json.dumps({"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 400}})
_MODEL_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    # At most 400 embeddings of an image, and an encoder cache for 512: pictures come and go.
    "qwen2-vl": (
        *("--mm-processor-kwargs", _QWEN_SIZES, "--max-num-batched-tokens", "512"),
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
    ),
    "llava": ("--max-num-batched-tokens", "256", "--limit-mm-per-prompt", '{"image": 4}'),
    "qwen2-audio": ("--max-num-batched-tokens", "512", "--limit-mm-per-prompt", '{"audio": 4}'),
}
_COMMON: Final = (*("--dtype", "float32", "--seed", "0", "--kv-cache-memory-bytes", "256M", "--max-num-seqs", "32"),)
_SMALL_ITEM_CACHE: Final = ("--mm-processor-cache-gb", "0.006")
_EAGER: Final = ("--enforce-eager",)
_LENGTH: Final = ("--max-model-len", "1024")

_NO_BINDING: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_V2: Final = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
_LITTLE_MEMORY: Final = ("--block-size", "32", "--num-gpu-blocks-override", "40", "--no-scheduler-reserve-full-isl")
"""For 1,280 tokens: requests are preempted."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration, and what is compared in it."""

    name: str
    title: str
    """Its row in the table: what an operator would call it."""

    flags: tuple[str, ...] = ()
    """Of both sides, after those that all configurations have."""

    semel_flags: tuple[str, ...] = ()
    """Of semel's side alone: what bare vLLM does not have, or does not outlive."""

    environment: Mapping[str, str] = field(default_factory=dict)
    shims: tuple[Shim, ...] = ()
    model: str = "qwen2-vl"
    asks: Asked = "image"
    """What its random requests are about. The probes and the planted faults are pictures."""

    item_cache: tuple[str, ...] = _SMALL_ITEM_CACHE
    evicts_items: bool = True
    """Whether items must have been evicted from it."""

    is_eager: bool = True
    encoder_planning: bool = False
    tier_bytes: int = 0
    """Host memory for encoder outputs, on semel's side: those that are evicted must come back from there."""

    has_eagle_head: bool = False
    """Whether the engine's own folder gets a head for drafts."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What vLLM's configuration must say when the engine runs, by its path: that this configuration is what ran."""

    most_requests: int = 100
    """Random requests: the V2 runner takes a tenth of a second for a step."""

    has_several_answers: bool = True
    """Whether some random requests have two answers. Where bare vLLM does not outlive that on a CPU (the V2 runner and
    drafts draw with kernels for a GPU), new items of every request are delivered before it instead."""

    has_priorities: bool = False
    preempts: bool = False
    """Whether requests must have been preempted on semel's side."""

    ships: bool = True
    """Whether large tensors must have been left out of repeats; otherwise everything must have been sent."""

    plants: tuple[str, ...] = ("swapped", "late")
    """Faults that must be found."""

    has_lies: bool = False
    """Whether features that lie are sent past semel's checks: the guard in the worker processes has to end them."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that runs it."""
        shims = {f"SEMEL_SHIM_{name}": "1" for name in (*self.shims, "PLANTS")}
        return {**self.environment, **shims}


@dataclass(frozen=True)
class Refused:
    """Flags that a worker refuses before the engine loads, and words of the reason."""

    name: str
    flags: tuple[str, ...]
    reason: str


_NGRAM: Final = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
)
_EAGLE: Final = json.dumps({"method": "eagle3", "model": f"{SCRATCH}/head", "num_speculative_tokens": 2})
_EC_BOTH: Final = json.dumps(
    {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": SCRATCH},
    }
)
_COST_AWARE: Final = json.dumps(
    {
        "encoder_cache_manager_cls": "semel.engine.vllm.plugins.encoder_cache.EncoderCache",
        "manager_config": {"eviction": "cost-aware"},
    }
)
_TIER_BYTES: Final = 1 << 20
_IS_ASYNC: Final = {"scheduler_config.async_scheduling": True}
_IS_V2: Final = {"use_v2_model_runner": True}

_WITH_DRAFTS: Final = Configuration(
    name="ngram",
    title="ngram drafts, `--no-enable-prefix-caching --disable-chunked-mm-input --scheduling-policy priority`, "
    "encoder planning",
    flags=(
        *("--speculative-config", _NGRAM, "--no-enable-prefix-caching", "--disable-chunked-mm-input"),
        *("--scheduling-policy", "priority"),
    ),
    semel_flags=_LITTLE_MEMORY,
    encoder_planning=True,
    has_several_answers=False,
    has_priorities=True,
    preempts=True,
    facts={
        "speculative_config.num_speculative_tokens": 3,
        "cache_config.enable_prefix_caching": False,
        "scheduler_config.disable_chunked_mm_input": True,
        "scheduler_config.policy": "priority",
    },
)

_WITH_TIER: Final = Configuration(
    name="tier",
    title="embedding tier, `--scheduling-policy priority`, little memory",
    flags=("--scheduling-policy", "priority"),
    semel_flags=_LITTLE_MEMORY,
    tier_bytes=_TIER_BYTES,
    most_requests=200,
    has_priorities=True,
    preempts=True,
)

MATRIX: Final[Mapping[str, Configuration]] = {
    one.name: one
    for one in (
        Configuration(
            name="plain",
            title="V1 runner, synchronous",
            facts={"scheduler_config.async_scheduling": False, "use_v2_model_runner": False},
        ),
        Configuration(
            name="async",
            title="`--async-scheduling`",
            flags=("--async-scheduling",),
            shims=("ASYNC",),
            facts=_IS_ASYNC,
        ),
        Configuration(
            name="v2",
            title="V2 runner",
            environment=_V2,
            shims=("TRITON",),
            facts={**_IS_V2, "scheduler_config.async_scheduling": False},
            most_requests=30,
            has_several_answers=False,
            has_lies=True,
        ),
        Configuration(
            name="v2-async",
            title="V2 runner, `--async-scheduling`: a GPU's default",
            flags=("--async-scheduling",),
            environment=_V2,
            shims=("ASYNC", "TRITON"),
            facts={**_IS_V2, **_IS_ASYNC},
            most_requests=30,
            has_several_answers=False,
            has_lies=True,
        ),
        Configuration(
            name="tp2",
            title="`--tensor-parallel-size 2`",
            flags=("--tensor-parallel-size", "2"),
            environment=_NO_BINDING,
            facts={"parallel_config.tensor_parallel_size": 2, "parallel_config.distributed_executor_backend": "mp"},
        ),
        Configuration(
            name="tp2-async",
            title="`--tensor-parallel-size 2 --async-scheduling`",
            flags=("--tensor-parallel-size", "2", "--async-scheduling"),
            environment=_NO_BINDING,
            shims=("ASYNC",),
            facts={"parallel_config.tensor_parallel_size": 2, **_IS_ASYNC},
        ),
        Configuration(
            name="pp2",
            title="`--pipeline-parallel-size 2`",
            # Eager execution leaves vLLM's stages on a CPU without a buffer that the first request needs.
            flags=("--pipeline-parallel-size", "2", "--compilation-config", '{"mode": 2, "backend": "eager"}'),
            is_eager=False,
            environment=_NO_BINDING,
            facts={"parallel_config.pipeline_parallel_size": 2},
            ships=False,
            plants=(),
        ),
        _WITH_DRAFTS,
        # Both in two engines instead of four, for CI.
        replace(
            _WITH_DRAFTS,
            name="tp2-ngram",
            title=f"`--tensor-parallel-size 2`, {_WITH_DRAFTS.title}, embedding tier",
            tier_bytes=_TIER_BYTES,
            flags=("--tensor-parallel-size", "2", *_WITH_DRAFTS.flags),
            environment=_NO_BINDING,
            facts={**_WITH_DRAFTS.facts, "parallel_config.tensor_parallel_size": 2},
        ),
        Configuration(
            name="eagle3",
            title="EAGLE-3 drafts on LLaVA, encoder planning",
            flags=("--speculative-config", _EAGLE),
            model="llava",
            item_cache=("--mm-processor-cache-gb", "0.0005"),
            has_eagle_head=True,
            has_several_answers=False,
            encoder_planning=True,
            facts={"speculative_config.method": "eagle3"},
            plants=("swapped",),
        ),
        Configuration(
            name="ec",
            title="`--ec-transfer-config` with `ec_both`",
            flags=("--ec-transfer-config", _EC_BOTH),
            facts={"ec_transfer_config.ec_role": "ec_both"},
            ships=False,
            # The pictures were asked about before, and come from the connector's storage: no encoder runs.
            plants=(),
        ),
        _WITH_TIER,
        Configuration(
            name="tier-v2-async",
            title="embedding tier, V2 runner, `--async-scheduling`",
            flags=("--async-scheduling",),
            environment=_V2,
            shims=("ASYNC", "TRITON"),
            facts={**_IS_V2, **_IS_ASYNC},
            most_requests=30,
            has_several_answers=False,
            has_lies=True,
            tier_bytes=_TIER_BYTES,
        ),
        replace(
            _WITH_TIER,
            name="tier-llava",
            title=f"{_WITH_TIER.title}, LLaVA, encoder planning",
            model="llava",
            item_cache=("--mm-processor-cache-gb", "0.0005"),
            encoder_planning=True,
            plants=("swapped",),
        ),
        replace(
            _WITH_TIER,
            name="tier-audio",
            title=f"{_WITH_TIER.title}, Qwen2-Audio, encoder planning",
            model="qwen2-audio",
            asks="audio",
            encoder_planning=True,
            plants=(),
        ),
        Configuration(
            name="shm",
            title="`--mm-processor-cache-type shm`",
            flags=("--mm-processor-cache-type", "shm", "--mm-shm-cache-max-object-size-mb", "8"),
            item_cache=("--mm-processor-cache-gb", "0.25"),
            evicts_items=False,
            facts={"model_config.multimodal_config.mm_processor_cache_type": "shm"},
            ships=False,
            plants=("swapped",),
        ),
        Configuration(
            name="no-prefixes",
            title="`--no-enable-prefix-caching`, little memory",
            flags=("--no-enable-prefix-caching", *_LITTLE_MEMORY),
            preempts=True,
            facts={"cache_config.enable_prefix_caching": False},
        ),
        Configuration(
            name="priority",
            title="`--scheduling-policy priority`",
            flags=("--scheduling-policy", "priority"),
            semel_flags=_LITTLE_MEMORY,
            has_priorities=True,
            preempts=True,
            facts={"scheduler_config.policy": "priority", "cache_config.enable_prefix_caching": True},
        ),
        Configuration(
            name="planning",
            title="`--encoder-planning`, cost-aware encoder cache, `--async-scheduling`",
            flags=("--async-scheduling",),
            semel_flags=("--ec-manager-config", _COST_AWARE),
            shims=("ASYNC",),
            encoder_planning=True,
            facts=_IS_ASYNC,
        ),
    )
}
"""By name. What tells most of a GPU fleet first is up to whoever runs them."""

IN_CI: Final = ("v2-async",)

REFUSED: Final = (
    Refused("data parallel", ("--data-parallel-size", "2"), "--data-parallel-size 2"),
    Refused("statistics off, traces on", ("--otlp-traces-endpoint", "http://x", "--disable-log-stats"), "statistics"),
)


def flags_of(one: Configuration, scratch: Path, *, is_semel: bool) -> list[str]:
    """What follows the model on the command line of one side."""
    flags = (
        *_COMMON,
        *_MODEL_FLAGS[one.model],
        *(_EAGER if one.is_eager else ()),
        *_LENGTH,
        *one.item_cache,
        *one.flags,
        *(one.semel_flags if is_semel else ()),
    )
    return [flag.replace(SCRATCH, str(scratch)) for flag in flags]
