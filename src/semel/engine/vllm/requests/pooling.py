"""Pooling: what vLLM does instead of generating if it runs a model with `--runner pooling`.

A request of such a model has pooling parameters in place of sampling parameters, and one output, a tensor. The engine
core tells a failure as a tensor too (`plugins.pooling_failures`): vLLM has no other place for it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, cast

from semel.core import POOLING_TASKS, Output, PoolingModel, PoolingOutput, PoolingTask
from semel.engine.vllm.compat.names import to_release
from semel.engine.vllm.compat.versions import PLANNING_SINCE, TESTED, installed_version
from semel.engine.vllm.plugins.pooling_failures import failure_reason
from semel.engine.vllm.requests.sampling import checked, refusals
from semel.engine.vllm.requests.stream import VllmStream, failures
from semel.errors import ConfigError, InvalidRequest

__all__ = ["PoolingStream", "check_pooling", "describe_pooling", "pooling_params"]

_FIELDS: Final = frozenset({"task", "dimensions", "use_activation"})
"""The pooling parameters that are a client's to say."""

_PROMPTS: Final = "config_sentence_transformers.json"


def pooling_params(requested: Mapping[str, Any]) -> Any:
    """Return vLLM's pooling parameters for one request."""
    from vllm.pooling_params import PoolingParams

    if unknown := requested.keys() - _FIELDS:
        raise InvalidRequest(f"{', '.join(sorted(unknown))}: not of a model that pools; leave it out")
    with refusals():
        return checked(PoolingParams, PoolingParams(**requested))


def check_pooling(config: Any) -> None:
    """Refuse what semel does not serve of a model that pools. `config` is vLLM's `ModelConfig`."""
    if to_release(installed_version()) in TESTED[: TESTED.index(PLANNING_SINCE)]:
        raise ConfigError(f"--runner pooling needs vLLM {PLANNING_SINCE}, and {installed_version()} is installed")
    if config.pooler_config is not None and config.pooler_config.enable_chunked_processing:
        raise ConfigError(
            "--pooler-config.enable_chunked_processing is not served: a prompt is pooled as a whole. Leave it out, and "
            "have clients cut longer texts"
        )


def describe_pooling(config: Any, tasks: Sequence[str], folder: Path) -> PoolingModel | None:
    """Return what a running engine pools, by vLLM's `ModelConfig` and the tasks of its model; None if it generates."""
    if config.runner_type != "pooling":
        return None
    check_pooling(config)
    task = config.get_pooling_task(tuple(tasks))
    supported = tuple(one for one in POOLING_TASKS if one in tasks)
    if task not in supported:
        raise ConfigError(
            f"vLLM would serve this model for {task!r}, and semel serves {', '.join(POOLING_TASKS)}: name one that the "
            "model has with --pooler-config.task, or serve it with `vllm serve`"
        )
    names = getattr(config.hf_config, "id2label", None) or {}
    count = int(getattr(config.hf_config, "num_labels", 0) or 0)
    classifies = task in ("classify", "token_classify")
    return PoolingModel(
        cast("PoolingTask", task),
        supported,
        labels=tuple(names.get(number) for number in range(count)) if classifies else (),
        scores=task in ("embed", "token_embed")
        or (task == "classify" and count == 1 and not _has_score_template(config)),
        pair_form="pair" if config.use_sep_token else "joined",
        instructions=_instructions(config.hf_config, folder),
        config={
            one.name: value
            for one in fields(config.pooler_config)
            if isinstance(value := getattr(config.pooler_config, one.name), bool | int | float | str | list)
        },
    )


class PoolingStream(VllmStream):
    """The answer to a submission that pools: one output."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield it."""
        import torch

        with failures():
            result = self._collector.get_nowait() or await self._collector.get()
            self._finished = result.finished
            data = result.outputs.data
            if result.error is not None or not data.numel():
                raise self._failure(None)
            if (reason := failure_reason(data)) is not None:
                raise self._failure(reason)
            numbers = data.detach().to("cpu", torch.float32).contiguous()
            pooling = PoolingOutput(tuple(numbers.shape), numbers.numpy().tobytes())
            yield Output(0, "", (), finish_reason="stop", cached_tokens=result.num_cached_tokens, pooling=pooling)


def _has_score_template(config: Any) -> bool:
    """Return whether a model's code writes the prompts of pairs: a frontend has no such code."""
    from vllm.model_executor.model_loader import get_model_architecture

    return bool(getattr(get_model_architecture(config)[0], "supports_score_template", False))


def _instructions(hf_config: Any, folder: Path) -> dict[str, str]:
    """Return a model's instructions: of its configuration, or as sentence-transformers writes them."""
    found = getattr(hf_config, "task_instructions", None)
    if not found and (path := folder / _PROMPTS).is_file():
        found = json.loads(path.read_text()).get("prompts")
    items = found.items() if isinstance(found, Mapping) else ()
    return {name: text for name, text in items if isinstance(text, str)}
