"""Flags of a worker: vLLM's own, under their own names: those of its engine, and those of its server for parsing."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from semel.engine.vllm.adapters import check_adapters
from semel.engine.vllm.compat.internals import (
    ENCODER_CACHE,
    GUARDED_WORKER,
    LAZY_TRANSFER_SCHEDULER,
    LAZY_TRANSFER_WORKER,
    SCHEDULER,
    encoder_arguments,
    takes_late_items,
)
from semel.engine.vllm.compat.names import to_release
from semel.engine.vllm.compat.versions import PLANNING_SINCE, TESTED, check_vllm, installed_version
from semel.engine.vllm.model.encoder_size import check_encoder_cache
from semel.engine.vllm.model.rendering import check_rendering_flags
from semel.engine.vllm.requests.parsing import ParserFlags
from semel.engine.vllm.requests.pooling import check_pooling
from semel.engine.vllm.tier.config import TierConfig, check_tier, settle_tier
from semel.errors import ConfigError

__all__ = [
    "check_parallel",
    "check_planning",
    "check_runner",
    "configuration_refusals",
    "create_config",
    "engine_help",
    "parse_engine_flags",
    "plug_in",
    "take_adapter_flags",
    "take_parser_flags",
]

_GRAMMAR_BACKEND: Final = "xgrammar"
_REPLICAS: Final = (
    "For a dense model start one worker for each replica, without any --data-parallel flag: frontends spread requests "
    "over all workers that they know. For a mixture of experts start one worker for each rank, each with "
    "--data-parallel-size, a --data-parallel-rank of its own, and the same --data-parallel-address and "
    "--data-parallel-rpc-port"
)
_NAMES_BACKEND: Final = re.compile(r"""--structured[-_]outputs[-_]config(\.backend|[ =].*["']backend["'])""")

logger = logging.getLogger(__name__)


def take_parser_flags(flags: Sequence[str]) -> tuple[ParserFlags, list[str]]:
    """Split off the flags that name parsers of answers, which are not the engine's but its server's."""
    parser = _Flags(add_help=False, allow_abbrev=False)
    parser.add_argument("--tool-call-parser", "--tool_call_parser")
    parser.add_argument("--enable-auto-tool-choice", "--enable_auto_tool_choice", action="store_true")
    parser.add_argument("--tool-strict-level", "--tool_strict_level", default="auto")
    parser.add_argument("--tool-parser-plugin", "--tool_parser_plugin", default="")
    found, others = parser.parse_known_args(list(flags))
    parsers = ParserFlags(**vars(found))
    if parsers.enable_auto_tool_choice and not parsers.tool_call_parser:
        raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser: name the parser of the model's calls")
    return parsers, others


def take_adapter_flags(flags: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Split off `--lora-modules`, which is not the engine's but its server's; vLLM's own code reads its values."""
    if not any(flag.replace("_", "-").startswith("--lora-modules") for flag in flags):
        return [], list(flags)
    from vllm.entrypoints.launchers.cli_args import LoRAParserAction

    parser = _Flags(add_help=False, allow_abbrev=False)
    parser.add_argument("--lora-modules", "--lora_modules", nargs="+", action=LoRAParserAction)
    found, others = parser.parse_known_args(list(flags))
    return found.lora_modules or [], others


class _Flags(argparse.ArgumentParser):
    """A parser of flags that raises an error of semel's, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise ConfigError(message)


def engine_help() -> str:
    """Return all of vLLM's engine flags, as its own parser describes them; its own `--help` shows only their groups."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(usage="MODEL [vLLM's engine flags]"))
    return argparse.ArgumentParser.format_help(parser)


def parse_engine_flags(
    model: str,
    flags: Sequence[str],
    *,
    encoder_planning: bool = False,
    ship_resident_items: bool = False,
    encoder_cache_embeddings: int | None = None,
    embedding_tier: TierConfig | None = None,
    metrics: str | None = None,
) -> Any:
    """Parse the flags that follow a model on the command line into vLLM's `AsyncEngineArgs`.

    semel's encoder cache is plugged in unless the flags name another one; its encoder planning only when asked for; its
    lazy transfer wherever semel's worker can stand for vLLM's, unless vLLM's is asked for or the flags name another
    scheduler or worker (the engine switches it off where it saves nothing); its worker on every CPU, unless the flags
    name another one. Grammars are xgrammar's unless the flags say otherwise. `encoder_cache_embeddings` is the size of
    the encoder cache, vLLM's if nothing is said, `embedding_tier` the host's memory behind it, and `metrics` the path
    of an `EncoderPage` for the totals of both. What semel cannot serve is refused here, or by `create_config`, before
    anything is loaded.
    """
    check_vllm()
    if encoder_planning:
        check_planning(installed_version())
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(usage="semel worker MODEL [any engine flag of vLLM]"))
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    check_parallel(arguments)
    check_runner(arguments.runner)
    _check_tracing(arguments)
    check_rendering_flags(arguments)
    _fix_grammar_backend(arguments, flags)
    plugs = encoder_arguments(
        _present(metrics=metrics, embeddings=encoder_cache_embeddings),
        with_scheduler=encoder_planning,
        with_lazy_transfer=not ship_resident_items and takes_late_items(current_platform),
    )
    plug_in(arguments, plugs)
    if embedding_tier is not None:
        check_tier(arguments, installed_version())
        arguments.ec_transfer_config = embedding_tier.arguments["ec_transfer_config"]
    arguments.scheduler_cls = arguments.scheduler_cls or LAZY_TRANSFER_SCHEDULER  # it also limits what grammars cost
    if encoder_cache_embeddings is not None and not _has_our_cache(arguments):
        raise ConfigError(
            "--encoder-cache-embeddings sets the size of semel's encoder cache: leave it out, or name no "
            "other one in --ec-manager-config"
        )
    needs_ours = current_platform.is_cpu() or (embedding_tier is not None and takes_late_items(current_platform))
    if arguments.worker_cls == "auto" and needs_ours:
        # On a CPU vLLM's dies of seeds. A worker that takes late items would have the scheduler send them.
        arguments.worker_cls = GUARDED_WORKER if ship_resident_items else LAZY_TRANSFER_WORKER
    return arguments


def create_config(arguments: Any) -> Any:
    """Create vLLM's `VllmConfig` of its `AsyncEngineArgs`. What vLLM refuses is a `ConfigError`."""
    from vllm.usage.usage_lib import UsageContext

    with configuration_refusals(arguments):
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    check_runner(config.model_config.runner_type)
    if config.model_config.runner_type == "pooling":
        check_pooling(config.model_config)
    check_encoder_cache(config)
    check_adapters(config)
    settle_tier(config)
    return config


@contextmanager
def configuration_refusals(arguments: Any) -> Iterator[None]:
    """Tell what vLLM refuses of its flags as the operator's to change. It still does while it makes an `AsyncLLM`."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        logger.debug("where vLLM refuses its configuration", exc_info=True)
        advice = f"\n{_REPLICAS}" if arguments.data_parallel_size > 1 else ""
        raise ConfigError(f"vLLM refuses its configuration: {_reason(error)}{advice}") from error


def check_planning(version: str) -> None:
    """Refuse to plan the encoder of a vLLM whose scheduler tells a step's inputs in another form."""
    if to_release(version) in TESTED[: TESTED.index(PLANNING_SINCE)]:
        raise ConfigError(
            f"--encoder-planning needs vLLM {PLANNING_SINCE}, and {version} is installed: its scheduler does not know "
            "the items that repeat in a step. Install it, or leave the flag out"
        )


def check_parallel(arguments: Any) -> None:
    """Refuse several engines: one worker embeds one, or one rank of a data-parallel group."""
    size = arguments.data_parallel_size
    if size > 1 and arguments.data_parallel_rank is None:
        raise ConfigError(
            f"--data-parallel-size {size} in one worker would hide its engines behind one item cache. {_REPLICAS}"
        )


def check_runner(runner: str) -> None:
    """Refuse an engine that neither generates nor pools: nothing could be asked of it."""
    if runner not in ("auto", "generate", "pooling"):
        raise ConfigError(
            f"vLLM would run this model as a {runner} model, and semel has no routes for that: start with --runner "
            "generate or --runner pooling, whichever the model can"
        )


def _reason(error: Exception) -> str:
    """Return what vLLM says, without the values that pydantic shows with it."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors(include_url=False))
    return str(error) or type(error).__name__


def _check_tracing(arguments: Any) -> None:
    """vLLM makes its spans of its statistics, and without these its first answer would end it."""
    if arguments.otlp_traces_endpoint is not None and arguments.disable_log_stats:
        raise ConfigError("--otlp-traces-endpoint needs the engine's statistics: leave --disable-log-stats out")


def _fix_grammar_backend(arguments: Any, flags: Sequence[str]) -> None:
    """One backend for all grammars: with vLLM's auto, the first request would choose it for all others."""
    is_named = _NAMES_BACKEND.search(" ".join(flags)) is not None
    if arguments.structured_outputs_config.backend == "auto" and not is_named:
        arguments.structured_outputs_config.backend = _GRAMMAR_BACKEND


def plug_in(arguments: Any, plugs: Mapping[str, Any]) -> None:
    """Fill in our parts, unless flags name others; to our own cache under other settings, only what they leave open."""
    config = _as_mapping(arguments.ec_manager_config)
    if config.get("encoder_cache_manager_cls") is None:
        arguments.ec_manager_config = plugs["ec_manager_config"]
    elif config["encoder_cache_manager_cls"] == ENCODER_CACHE:
        merged = {**plugs["ec_manager_config"]["manager_config"], **(config.get("manager_config") or {})}
        arguments.ec_manager_config = {"encoder_cache_manager_cls": ENCODER_CACHE, "manager_config": merged}
    has_no_worker = arguments.worker_cls == "auto"
    if arguments.scheduler_cls is None and (has_no_worker or plugs.get("scheduler_cls") != LAZY_TRANSFER_SCHEDULER):
        arguments.scheduler_cls = plugs.get("scheduler_cls")
    if has_no_worker and arguments.scheduler_cls in (SCHEDULER, LAZY_TRANSFER_SCHEDULER):
        arguments.worker_cls = plugs.get("worker_cls", "auto")


def _present(**settings: Any) -> dict[str, Any]:
    """Return those settings about which something is said."""
    return {name: value for name, value in settings.items() if value is not None}


def _has_our_cache(arguments: Any) -> bool:
    return _as_mapping(arguments.ec_manager_config).get("encoder_cache_manager_cls") == ENCODER_CACHE


def _as_mapping(config: Any) -> Mapping[str, Any]:
    """Return the flag's value, which vLLM's parser has made an object of its own or left as it was."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    return {name: getattr(config, name, None) for name in ("encoder_cache_manager_cls", "manager_config")}
