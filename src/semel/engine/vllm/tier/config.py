"""Configuration of the embedding tier in vLLM, and the flags that exclude it.

vLLM imports the connector by the module's name (`ec_connector_module_path`); nothing has to be registered. Its role is
`ec_consumer` with the first model runner, which saves whatever the role, and `ec_both` with the second one: a producer
encodes an item of the largest size when it starts, to learn the width of the encoder's outputs.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from semel.core.flag import GIB
from semel.engine.vllm.compat.internals import ENCODER_CACHE, LAZY_TRANSFER_SCHEDULER, SCHEDULER
from semel.engine.vllm.compat.names import to_release
from semel.engine.vllm.compat.versions import PLANNING_SINCE, TESTED
from semel.engine.vllm.tier.prefetch_params import Staging
from semel.errors import ConfigError

__all__ = [
    "TIER",
    "TIER_MODULE",
    "TierConfig",
    "check_tier",
    "has_tier",
    "settle_tier",
    "tier_block_bytes",
    "tier_ranks",
]

TIER: Final = "EmbeddingTier"
TIER_MODULE: Final = "semel.engine.vllm.tier.connector"

_BYTES: Final = "ec_cpu_bytes"
"""Under vLLM's own name: its copies to and from GPUs read it too."""

_FLAG: Final = "--embedding-tier-gb"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The values of vLLM's `ec_connector_extra_config`."""

    nbytes: int
    """Host memory for encoder outputs."""
    region: str | None = None
    """The file that vLLM's worker processes map; not read on GPUs, where vLLM's own copies make one."""
    eviction: str = "cost-aware"
    """The eviction policy: `cost-aware` or `oldest-released`."""
    page: str | None = None
    """The file through which the embedding process learns what is saved and gone, and on GPUs where the memory is; None
    if nobody wants to know."""
    staging: int = 0
    """Bytes at the end that the engine does not fill: they hold prefetched outputs."""

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings, checked."""
        known = {_BYTES, "region", "eviction", "page", "staging"}
        if unknown := settings.keys() - known:
            raise ConfigError(
                f"ec_connector_extra_config has no {', '.join(sorted(unknown))}: it takes {', '.join(sorted(known))}"
            )
        if not isinstance(nbytes := settings.get(_BYTES), int) or nbytes < 1:
            raise ConfigError(f"{_BYTES} must be a whole number of bytes, not {nbytes!r}")
        eviction = settings.get("eviction", "cost-aware")
        if eviction not in ("cost-aware", "oldest-released"):
            raise ConfigError(f"unknown eviction {eviction!r}: choose one of cost-aware, oldest-released")
        staging = settings.get("staging", 0)
        if type(staging) is not int or not 0 <= staging < nbytes:
            raise ConfigError(f"staging must be a part of the {nbytes:,} bytes of the tier, not {staging!r}")
        return cls(nbytes, settings.get("region"), eviction, settings.get("page"), staging)

    def locate_staging(self, block_bytes: int) -> Staging:
        """Return where the staging part begins, and how large it is. What is before it is the host cache."""
        blocks, staged = self.nbytes // block_bytes, self.staging // block_bytes
        return Staging(blocks - staged, staged, block_bytes)

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments that plug the tier in."""
        settings = {_BYTES: self.nbytes, "region": self.region, "eviction": self.eviction}
        if self.page is not None:
            settings |= {"page": self.page, "staging": self.staging}
        return {
            "ec_transfer_config": {
                "ec_connector": TIER,
                "ec_connector_module_path": TIER_MODULE,
                "ec_role": "ec_consumer",
                "ec_connector_extra_config": settings,
            }
        }


def tier_block_bytes(model_config: Any) -> int:
    """Return the unit of the tier's memory, as vLLM's own copies have it."""
    return int(model_config.get_inputs_embeds_size() * model_config.dtype.itemsize)


def tier_ranks(parallel_config: Any) -> int:
    """Return how many worker processes have every encoder output, and copy."""
    return int(parallel_config.tensor_parallel_size * parallel_config.prefill_context_parallel_size)


def has_tier(vllm_config: Any) -> bool:
    """Return whether an engine has the embedding tier, and no other connector."""
    config = vllm_config.ec_transfer_config
    return config is not None and (config.ec_connector, config.ec_connector_module_path) == (TIER, TIER_MODULE)


def check_tier(arguments: Any, version: str) -> None:
    """Refuse flags that exclude the tier, and a vLLM whose connectors are called otherwise."""
    if to_release(version) in TESTED[: TESTED.index(PLANNING_SINCE)]:
        raise ConfigError(f"{_FLAG} needs vLLM {PLANNING_SINCE}, and {version} is installed: leave the flag out")
    if arguments.ec_transfer_config is not None:
        raise ConfigError(f"{_FLAG} is an encoder-output connector, and --ec-transfer-config names another: choose one")
    if arguments.scheduler_cls not in (None, SCHEDULER, LAZY_TRANSFER_SCHEDULER):
        raise ConfigError(
            f"{_FLAG} needs semel's scheduler, which tells it of changed weights: leave --scheduler-cls out"
        )


def settle_tier(vllm_config: Any) -> None:
    """Fit the tier to an engine; refuse it where it could do harm, and leave it out where it is of no use."""
    if not has_tier(vllm_config):
        return
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for size, flag in (
        (parallel.pipeline_parallel_size, "--pipeline-parallel-size"),
        (parallel.prefill_context_parallel_size, "--prefill-context-parallel-size"),
    ):
        if size > 1:
            raise ConfigError(f"{_FLAG} was not run with {flag} {size}: leave one of them out")
    if parallel.distributed_executor_backend not in ("mp", "uni"):
        raise ConfigError(
            f"{_FLAG} was not run with --distributed-executor-backend {parallel.distributed_executor_backend}"
        )
    if vllm_config.ec_manager_config.encoder_cache_manager_cls != ENCODER_CACHE:
        raise ConfigError(f"{_FLAG} needs semel's encoder cache: name no other one in --ec-manager-config")
    if not model.supports_multimodal_inputs or model.is_encoder_decoder:
        logger.info("the embedding tier is off: this model keeps no encoder outputs")
        vllm_config.ec_transfer_config = None
        return
    if vllm_config.use_v2_model_runner:
        vllm_config.ec_transfer_config.ec_role = "ec_both"
    if not current_platform.is_cpu():
        _check_shared_memory(TierConfig.parse(vllm_config.ec_transfer_config.ec_connector_extra_config).nbytes)
    # A consumer takes embeddings from clients, and counts modalities that are switched off. The tier needs neither.
    model.multimodal_config.enable_mm_embeds = False
    model.multimodal_config.allow_missing_mm_embeddings = False


def _check_shared_memory(nbytes: int) -> None:
    """vLLM's own copies have their region in `/dev/shm`, and would end when it is full."""
    free = shutil.disk_usage("/dev/shm").free  # noqa: S108 - where vLLM has it
    if nbytes > free:
        raise ConfigError(
            f"{_FLAG} {nbytes / GIB:g} does not fit into /dev/shm, where {free / GIB:.1f} GiB are free: choose less, "
            "or start the container with a larger --shm-size"
        )
