"""Engine flags: vLLM's own, under their own names, read by vLLM's own parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.engine.vllm.compat import encoder_arguments, is_tested
from semel.errors import ConfigError

__all__ = ["parse_engine_flags"]


def parse_engine_flags(
    model: str, flags: Sequence[str], *, encoder_planning: bool = False, metrics: str | None = None
) -> Any:
    """vLLM's `AsyncEngineArgs` for a model and the flags that followed it on the command line.

    semel's encoder cache is plugged in unless the flags name another one; its encoder planning only when asked for.
    `metrics` is the path of an `EncoderPage` for the cache's totals.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(usage="semel worker MODEL [any engine flag of vLLM]"))
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    _check_parallel(arguments)
    if is_tested("encoder cache", "linear release of cached items, encoder cache metrics"):
        settings = {} if metrics is None else {"metrics": metrics}
        _plug_in(arguments, flags, encoder_arguments(settings, with_scheduler=encoder_planning))
    return arguments


def _check_parallel(arguments: Any) -> None:
    """One worker embeds one engine; of a data-parallel group, one rank."""
    if arguments.data_parallel_size > 1 and arguments.data_parallel_rank is None:
        raise ConfigError(
            f"--data-parallel-size {arguments.data_parallel_size} in one worker would hide its engines behind one "
            "item cache: start one worker per rank, each with --data-parallel-rank"
        )


def _plug_in(arguments: Any, flags: Sequence[str], plugs: Mapping[str, Any]) -> None:
    for name, value in plugs.items():
        if f"--{name.replace('_', '-')}" not in {flag.partition("=")[0].partition(".")[0] for flag in flags}:
            setattr(arguments, name, value)
