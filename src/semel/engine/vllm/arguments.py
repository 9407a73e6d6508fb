"""Flags of a worker: vLLM's own, under their own names: those of its engine, and those of its server for parsing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from semel.engine.vllm.compat import (
    ENCODER_CACHE,
    RECEIVING_WORKER,
    SCHEDULER,
    SHIPPING_SCHEDULER,
    encoder_arguments,
    is_tested,
)
from semel.engine.vllm.parsing import ParserFlags
from semel.engine.vllm.rendering import check_rendering_flags
from semel.errors import ConfigError

__all__ = ["engine_help", "parse_engine_flags", "take_parser_flags"]

_GRAMMAR_BACKEND: Final = "xgrammar"
_NAMES_BACKEND: Final = re.compile(r"""--structured[-_]outputs[-_]config(\.backend|[ =].*["']backend["'])""")


def take_parser_flags(flags: Sequence[str]) -> tuple[ParserFlags, list[str]]:
    """The flags that name parsers of answers, which are not the engine's but its server's; and all the others."""
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


class _Flags(argparse.ArgumentParser):
    """Tells what is wrong as we do, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise ConfigError(message)


def engine_help() -> str:
    """All of vLLM's engine flags, as its own parser describes them; its own `--help` shows only their groups."""
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
    metrics: str | None = None,
) -> Any:
    """vLLM's `AsyncEngineArgs` for a model and the flags that followed it on the command line.

    semel's encoder cache is plugged in unless the flags name another one; its encoder planning only when asked for; its
    shipping where it was tested, unless vLLM's is asked for or the flags name another scheduler or worker; its worker
    on every CPU, unless the flags name another one. Grammars are xgrammar's unless the flags say otherwise.
    `metrics` is the path of an `EncoderPage` for the cache's totals.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(usage="semel worker MODEL [any engine flag of vLLM]"))
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    _check_parallel(arguments)
    _check_tracing(arguments)
    check_rendering_flags(arguments)
    _fix_grammar_backend(arguments, flags)
    if is_tested("encoder cache", "linear release of cached items, encoder cache metrics, encoder planning"):
        plugs = encoder_arguments(
            {} if metrics is None else {"metrics": metrics},
            with_scheduler=encoder_planning,
            with_shipping=not ship_resident_items and current_platform.is_cpu(),  # not run on others yet
        )
        _plug_in(arguments, plugs)
        if arguments.worker_cls == "auto" and current_platform.is_cpu():
            arguments.worker_cls = RECEIVING_WORKER  # vLLM's dies of seeds there
    return arguments


def _check_parallel(arguments: Any) -> None:
    """One worker embeds one engine; of a data-parallel group, one rank."""
    if arguments.data_parallel_size > 1 and arguments.data_parallel_rank is None:
        raise ConfigError(
            f"--data-parallel-size {arguments.data_parallel_size} in one worker would hide its engines behind one "
            "item cache: start one worker per rank, each with --data-parallel-rank"
        )


def _check_tracing(arguments: Any) -> None:
    """vLLM makes its spans of its statistics, and without these its first answer would end it."""
    if arguments.otlp_traces_endpoint is not None and arguments.disable_log_stats:
        raise ConfigError("--otlp-traces-endpoint needs the engine's statistics: leave --disable-log-stats out")


def _fix_grammar_backend(arguments: Any, flags: Sequence[str]) -> None:
    """One backend for all grammars: with vLLM's auto, the first request would choose it for all others."""
    is_named = _NAMES_BACKEND.search(" ".join(flags)) is not None
    if arguments.structured_outputs_config.backend == "auto" and not is_named:
        arguments.structured_outputs_config.backend = _GRAMMAR_BACKEND


def _plug_in(arguments: Any, plugs: Mapping[str, Any]) -> None:
    """Our parts, unless the flags name others; to our own cache under other settings, only what they leave open."""
    config = _as_mapping(arguments.ec_manager_config)
    if config.get("encoder_cache_manager_cls") is None:
        arguments.ec_manager_config = plugs["ec_manager_config"]
    elif config["encoder_cache_manager_cls"] == ENCODER_CACHE:
        merged = {**plugs["ec_manager_config"]["manager_config"], **(config.get("manager_config") or {})}
        arguments.ec_manager_config = {"encoder_cache_manager_cls": ENCODER_CACHE, "manager_config": merged}
    has_no_worker = arguments.worker_cls == "auto"
    if arguments.scheduler_cls is None and (has_no_worker or plugs.get("scheduler_cls") != SHIPPING_SCHEDULER):
        arguments.scheduler_cls = plugs.get("scheduler_cls")
    if has_no_worker and arguments.scheduler_cls in (SCHEDULER, SHIPPING_SCHEDULER):
        arguments.worker_cls = plugs.get("worker_cls", "auto")


def _as_mapping(config: Any) -> Mapping[str, Any]:
    """The flag's value, which vLLM's parser has made an object of its own or left as it was."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    return {name: getattr(config, name, None) for name in ("encoder_cache_manager_cls", "manager_config")}
