"""semel's parts of the engine, where the user has named no other ones: the door's level `engine`.

Encoder cache, guard of the encoder and late transfer as `semel worker` has them, and with `SEMEL_TIER_GB` host memory
for encoder outputs. They are filled into vLLM's arguments while it makes its configuration of them, and taken out again
then. If it cannot be made with them, it is made without, of the arguments as they were: vLLM changes them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Final

from semel.vllm_plugin.hooks import hook
from semel.vllm_plugin.levels import LevelOff, logger

__all__ = ["create_engine_config", "install"]

_TIER: Final = "SEMEL_TIER_GB"
_FILLED: Final = ("ec_manager_config", "scheduler_cls", "worker_cls", "ec_transfer_config")
"""The arguments of vLLM that are filled in."""

_DRAFTS: Final = "speculative_config"
"""The argument into which vLLM writes configurations that it has made."""


def install() -> str:
    """Hook the parts into vLLM's configuration."""
    from vllm.engine.arg_utils import EngineArgs

    from semel.vllm_plugin.metrics import show_metrics

    show_metrics()
    hook(EngineArgs, "create_engine_config", create_engine_config)
    return "encoder cache, guard and late transfer where no flag names another" + (
        f", host tier of {os.environ[_TIER]} GiB" if _TIER in os.environ else ""
    )


def create_engine_config(own: Any, arguments: Any, *args: Any, **kwargs: Any) -> Any:
    """Create vLLM's configuration with all parts that it can have; a line says which, and why not others."""
    named = {name: getattr(arguments, name) for name in _FILLED}
    before = _copied(vars(arguments))
    off = [f"--{name.replace('_', '-')} names another" for name, value in named.items() if _is_named(value)]
    for with_tier in (True, False) if _TIER in os.environ else (False,):
        try:
            on = _fill_in(arguments, with_tier=with_tier)
            config = own(arguments, *args, **kwargs)
            _check(config)
        except LevelOff as reason:
            off = [str(reason)]
            _restore(arguments, before)
            break
        except Exception as error:  # noqa: BLE001 (vLLM's own way follows, and raises if the user's flags are wrong)
            off.append(f"{_TIER}: {_reason(error)}" if with_tier else _reason(error))
            _restore(arguments, before)
        else:
            logger.info("semel: engine parts: %s%s", ", ".join(on), "".join(f"; off: {reason}" for reason in off))
            return config
        finally:
            for name, value in named.items():
                setattr(arguments, name, value)
    config = own(arguments, *args, **kwargs)
    logger.info("semel: engine parts are off: %s", "; ".join(off))
    return config


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy arguments as far as vLLM changes them when it makes a configuration."""
    copied = {name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in values.items()}
    return copied | {_DRAFTS: copy.deepcopy(values[_DRAFTS])} if _DRAFTS in values else copied


def _restore(arguments: Any, before: Mapping[str, Any]) -> None:
    """Set all arguments as they were."""
    vars(arguments).clear()
    vars(arguments).update(_copied(before))


def _fill_in(arguments: Any, *, with_tier: bool) -> list[str]:
    """Fill in what is not named; returns the parts that are on."""
    from vllm.platforms import current_platform

    from semel.engine.vllm.arguments import plug_in
    from semel.engine.vllm.compat.internals import (
        ENCODER_CACHE,
        LAZY_TRANSFER_SCHEDULER,
        LAZY_TRANSFER_WORKER,
        PLAIN_SCHEDULER,
        encoder_arguments,
        takes_late_items,
    )
    from semel.vllm_plugin.metrics import add_encoder_page

    _refuse(arguments)
    page = add_encoder_page(arguments)
    plug_in(arguments, encoder_arguments(page, with_lazy_transfer=takes_late_items(current_platform)))
    if with_tier:
        _add_tier(arguments)
    if arguments.scheduler_cls == LAZY_TRANSFER_SCHEDULER:
        arguments.scheduler_cls = PLAIN_SCHEDULER
    cache = arguments.ec_manager_config
    has_cache = isinstance(cache, dict) and cache["encoder_cache_manager_cls"] == ENCODER_CACHE
    parts = {
        "encoder cache": has_cache,
        "late transfer": arguments.scheduler_cls == PLAIN_SCHEDULER,
        "guard": arguments.worker_cls == LAZY_TRANSFER_WORKER,
        f"host tier of {os.environ.get(_TIER)} GiB": with_tier,
        "encoder metrics": has_cache and bool(page),
    }
    return [part for part, is_on in parts.items() if is_on] or ["none"]


def _refuse(arguments: Any) -> None:
    """Refuse an engine in which the parts cannot work, and one in which they are already."""
    if str(arguments.scheduler_cls or "").startswith("semel."):
        raise LevelOff("--scheduler-cls names one of semel's already")
    if arguments.data_parallel_size > 1 and arguments.data_parallel_rank is None:
        raise LevelOff("data parallel inside one server (--data-parallel-size)")
    if arguments.runner not in ("auto", "generate"):
        raise LevelOff(f"a {arguments.runner} model")
    if arguments.ec_transfer_config is not None:
        raise LevelOff("--ec-transfer-config names a connector")


def _add_tier(arguments: Any) -> None:
    from semel.core.flag import GIB
    from semel.engine.vllm.compat.versions import installed_version
    from semel.engine.vllm.tier.config import TierConfig, check_tier
    from semel.engine.vllm.tier.shared_file import create_file, descriptor_path
    from semel.errors import ConfigError
    from semel.vllm_plugin.metrics import is_ray_up

    if is_ray_up():
        raise ConfigError("Ray may start the engine on another machine, or after the end of this process")
    check_tier(arguments, installed_version())
    nbytes = int(float(os.environ[_TIER]) * GIB)
    region = descriptor_path(create_file("semel-embedding-tier"))  # it lasts as long as this process
    arguments.ec_transfer_config = TierConfig(nbytes, region).arguments["ec_transfer_config"]


def _check(config: Any) -> None:
    """Refuse a model for which the parts are not made; fit the host tier to the others."""
    from semel.engine.vllm.tier.config import settle_tier

    model = config.model_config
    if model.runner_type != "generate":
        raise LevelOff(f"a {model.runner_type} model")
    if not model.supports_multimodal_inputs:
        raise LevelOff("a model of text only")
    if getattr(config, "diffusion_config", None) is not None:
        raise LevelOff("a diffusion model")
    settle_tier(config)


def _is_named(value: Any) -> bool:
    """Return whether the user has named something; vLLM's settings of an encoder cache are there without one, too."""
    return getattr(value, "encoder_cache_manager_cls", value) not in (None, "auto")


def _reason(error: Exception) -> str:
    text = str(error).replace("--embedding-tier-gb", _TIER)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
