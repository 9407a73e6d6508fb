"""Rejections of items whose encoder output does not fit its place in the prompt, on their way to the scheduler.

It begins in vLLM's worker processes (`encoder_guard`), goes to the scheduler with the output of the step, which ends
the requests that show the item, and from there to the client of the engine as the stop reason of an error: vLLM's own
messages have a place for it at every stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Self

from semel.engine.vllm.compat.internals import num_embeds

__all__ = ["Rejection", "read_not_finite", "read_rejections", "with_rejections"]

_ATTRIBUTE: Final = "semel_rejections"
_NOT_FINITE: Final = "semel_not_finite"
_REASON: Final = "semel-encoder"
_FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Rejection:
    """An item whose encoder output cannot be used."""

    identifier: str
    """The digest under which vLLM knows the item."""
    modality: str
    embeds: int
    """The embeddings that the item has room for in the prompt."""
    rows: int | None
    """The embeddings that the encoder made of it; None if it failed."""

    def __str__(self) -> str:
        if self.rows is None:
            return f"the encoder failed on the {self.modality} feature: its tensors contradict each other"
        return (
            f"the encoder made {self.rows:,} embeddings of the {self.modality} feature, its layout has {self.embeds:,}"
        )

    @classmethod
    def of_reason(cls, reason: object) -> Self | None:
        """Return what the stop reason of an error says; None if that is something else."""
        match reason.split(":", 4) if isinstance(reason, str) else ():
            case [kind, modality, embeds, rows, identifier] if kind == _REASON:
                return cls(identifier, modality, int(embeds), None if rows == _FAILED else int(rows))
        return None

    @property
    def reason(self) -> str:
        """It as a stop reason."""
        rows = _FAILED if self.rows is None else self.rows
        return f"{_REASON}:{self.modality}:{self.embeds}:{rows}:{self.identifier}"

    def concerns(self, features: Iterable[Any]) -> Any | None:
        """Return which of a request's items must not be used as it was encoded: the first; None if there is none.

        A place that has room for as many embeddings as there were never got the output that was cut to another size.
        """
        for feature in features:
            if feature.identifier == self.identifier and num_embeds(feature) != self.rows:
                return feature
        return None


def with_rejections(output: Any, rejections: tuple[Rejection, ...], not_finite: int = 0) -> Any:
    """Add rejections of items to the output of a step for vLLM's scheduler, now or when it is there.

    `not_finite` is how many encoder outputs of earlier steps had values that are not finite.
    """
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if not isinstance(output, AsyncModelRunnerOutput):
        output = copy(output)  # vLLM may share it, if it is empty
        setattr(output, _ATTRIBUTE, rejections)
        setattr(output, _NOT_FINITE, not_finite)
        return output

    class Awaited(AsyncModelRunnerOutput):  # type: ignore[misc]
        """An output that is still being computed."""

        def get_output(self) -> Any:
            """Wait for it."""
            return with_rejections(output.get_output(), rejections, not_finite)

    return Awaited()


def read_rejections(output: Any) -> tuple[Rejection, ...]:
    """Return what `with_rejections` has added to the output of a step."""
    rejections: tuple[Rejection, ...] = getattr(output, _ATTRIBUTE, ())
    return rejections


def read_not_finite(output: Any) -> int:
    """Return the number of encoder outputs that `with_rejections` has added to the output of a step."""
    count: int = getattr(output, _NOT_FINITE, 0)
    return count
