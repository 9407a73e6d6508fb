"""The proof's way into vLLM's processes: a call of the engine core, and the encoder outputs of a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from semel.errors import EngineDead, EngineFailed

__all__ = ["call_core", "call_workers", "encoder_outputs", "take_calls"]

_UTILITY: Final = "semel_probe"
_TIMEOUT_S: Final = 60.0


def take_calls() -> None:
    """Let the embedding process call the `probe` of semel's scheduler, in this engine core.

    vLLM looks such calls up in the class, by their names.
    """
    from vllm.v1.engine.core import EngineCore

    def probe(core: Any, command: str, names: Sequence[str]) -> dict[str, int]:
        counts: dict[str, int] = core.scheduler.probe(command, names)
        return counts

    setattr(EngineCore, _UTILITY, probe)


async def call_core(llm: Any, command: str, names: Sequence[str] = ()) -> dict[str, int]:
    """Call it."""
    with _failures():
        counts: dict[str, int] = await llm.engine_core.call_utility_async(_UTILITY, command, list(names))
    return counts


async def call_workers(llm: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of semel's worker in every worker process; returns their answers in the order of their ranks."""
    with _failures():
        answers: list[Any] = await llm.collective_rpc(method, timeout=_TIMEOUT_S, args=arguments)
    return answers


@contextmanager
def _failures() -> Iterator[None]:
    """Raise what vLLM raises as our own errors; of a call that fails it says so in an `Exception`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("the engine has died while it was probed; its log says why") from error
    except Exception as error:
        raise EngineFailed(f"the engine cannot be probed: {error}") from error


def encoder_outputs(worker: Any) -> Mapping[str, Any]:
    """Return the encoder outputs that are on the device of a worker process, by identifier."""
    cache = worker.model_runner.encoder_cache
    outputs: Mapping[str, Any] = cache.encoder_outputs if worker.use_v2_model_runner else cache
    return outputs
