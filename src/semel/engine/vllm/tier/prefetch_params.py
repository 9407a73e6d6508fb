"""Prefetched outputs on their way to the engine core: as the `ec_transfer_params` of a request.

Only a worker writes them (`VllmEngine.submit`), and the engine core reads them as if anybody could have: a number that
is none, blocks outside of the staging part or too few of them would end the engine for everybody, or give away what is
there. A request of which any part is wrong has no prefetched outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.core import Digest, Form, PrefetchedOutput, form_bytes
from semel.engine.vllm.tier.page import LEASE_SLOTS

__all__ = ["Staging", "prefetch_params", "set_prefetched"]

_EC_PARAMS: Final = "ec_transfer_params"
"""vLLM's name, in the `extra_args` of its sampling parameters."""

_PREFETCHED: Final = "arrivals"
_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Staging:
    """The part of the tier's memory that is not the host cache's."""

    first: int
    """Its first block."""
    blocks: int
    block_bytes: int

    def parse(self, params: Any) -> tuple[PrefetchedOutput, ...]:
        """Return what a request brings; raises ValueError if it is not what `prefetch_params` writes."""
        if not isinstance(params, Mapping) or list(params) != [_PREFETCHED]:
            raise ValueError("these are not semel's parameters")
        found = params[_PREFETCHED]
        if not isinstance(found, Sequence) or len(found) > LEASE_SLOTS:
            raise ValueError("the prefetched outputs are no list, or too long")
        try:
            prefetched_outputs = tuple(self._prefetched(one) for one in found)
        except TypeError as error:
            raise ValueError("a prefetched output has other parts") from error
        if len({one.digest for one in prefetched_outputs}) != len(prefetched_outputs) or len(
            {one.lease for one in prefetched_outputs}
        ) != len(found):
            raise ValueError("one digest or lease comes twice")
        return prefetched_outputs

    def _prefetched(self, values: Any) -> PrefetchedOutput:
        lease, digest, extents, form, epoch = values
        if _whole(lease) < LEASE_SLOTS:
            raise ValueError("no lease has this number")
        return PrefetchedOutput(
            lease, Digest(bytes.fromhex(digest)), self._extents(extents, form), _form(form), _whole(epoch)
        )

    def _extents(self, values: Any, form: Any) -> tuple[tuple[int, int], ...]:
        extents = tuple((_whole(first), _whole(count)) for first, count in values)
        blocks = [block for first, count in extents for block in (first, first + count - 1)]
        if not extents or min(count for _, count in extents) < 1:
            raise ValueError("a prefetched output without blocks")
        if min(blocks) < self.first or max(blocks) >= self.first + self.blocks:
            raise ValueError("blocks outside of the staging part")
        if sum(count for _, count in extents) * self.block_bytes < form_bytes(_form(form)):
            raise ValueError("too few blocks")
        return extents


def prefetch_params(prefetched_outputs: Sequence[PrefetchedOutput]) -> dict[str, Any]:
    """Return what travels with a request."""
    return {
        _PREFETCHED: [
            [one.lease, one.digest.hex(), [list(extent) for extent in one.extents], list(one.form), one.epoch]
            for one in prefetched_outputs
        ]
    }


def set_prefetched(params: Any, prefetched_outputs: Sequence[PrefetchedOutput]) -> None:
    """Put them into vLLM's sampling parameters, and nothing else under that name.

    With several answers vLLM makes as many requests, which would share what is for one: these have none.
    """
    extra = {name: value for name, value in (params.extra_args or {}).items() if name != _EC_PARAMS}
    if prefetched_outputs and params.n == 1:
        extra[_EC_PARAMS] = prefetch_params(prefetched_outputs)
    params.extra_args = extra or None


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX:
        raise ValueError(f"{value!r} is not a number of blocks, leases or rows")
    return value


def _form(values: Any) -> Form:
    rows, columns, dtype = values
    if not isinstance(dtype, str):
        raise TypeError("no dtype")
    return _whole(rows), _whole(columns), dtype
