"""A count of encoder outputs with NaN or infinity in them, which never waits for the device.

The device is asked, and the answer is read in a later step, once its copy is on the host. A step that encodes queues
two small operations per item and one copy; other steps look at one event at most. Such outputs are used as vLLM uses
them: features are checked before the engine, so it is the model, its weights or its dtype that overflows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from semel.telemetry.logs import SampledLog

__all__ = ["MAX_PENDING", "FiniteOutputs"]

MAX_PENDING: Final = 64
"""Steps whose answers are not there yet; of more, the oldest are not counted."""

_PREFIX: Final = 12

logger = logging.getLogger(__name__)


class _Answer(NamedTuple):
    """One flag for each output of a step, on the host once it is there."""

    identifiers: tuple[str, ...]
    flags: torch.Tensor
    is_there: Callable[[], bool]


class FiniteOutputs:
    """The outputs of a worker process's encoder, by whether all of their values are finite."""

    def __init__(
        self, to_host: Callable[[torch.Tensor], tuple[torch.Tensor, Callable[[], bool]]] | None = None
    ) -> None:
        self._to_host = to_host or _copy_to_host
        self._pending: deque[_Answer] = deque(maxlen=MAX_PENDING)
        self._log = SampledLog(logger, logging.WARNING)

    def ask(self, identifiers: Sequence[str], outputs: Sequence[torch.Tensor]) -> None:
        """Have the device look at the outputs of a step."""
        flags = [torch.isfinite(output).all() for output in outputs]
        if flags:
            self._pending.append(_Answer(tuple(identifiers), *self._to_host(torch.stack(flags))))

    def take(self) -> int:
        """Count the outputs with values that are not finite, of which that is known since the last call."""
        count = 0
        while self._pending and self._pending[0].is_there():
            answer = self._pending.popleft()
            for identifier, is_finite in zip(answer.identifiers, answer.flags.tolist(), strict=True):
                if not is_finite:
                    count += 1
                    self._log.log("the encoder made NaN or infinity of the item %s…", identifier[:_PREFIX])
        return count


def _copy_to_host(flags: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Begin to copy flags, and return the copy with what says whether it is complete."""
    if flags.device.type == "cpu":
        return flags, lambda: True
    copy = torch.empty_like(flags, device="cpu", pin_memory=True)
    copy.copy_(flags, non_blocking=True)
    event = torch.Event(flags.device.type)
    event.record()
    return copy, event.query
