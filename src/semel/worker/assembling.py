"""From messages to what an engine takes: submissions with the layouts of their items, features in shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from semel.cache import Borrower, borrowed_feature, with_small_copies
from semel.core import Digest, Feature, Layout, Submission, Trace
from semel.engine import Engine
from semel.errors import FeatureMissing, ProtocolError
from semel.wire.messages import Lend, Submit
from semel.wire.translation import sizes_of, to_layout, to_lease, to_prompt, to_submission

__all__ = ["assemble", "borrow"]

_FEW_ITEMS: Final = 64
"""A prompt with more items is assembled in a thread: it takes about 5 µs for each."""


async def assemble(
    submit: Submit, features: Mapping[Digest, Feature], engine: Engine, trace: Trace | None
) -> Submission:
    """Return the submission of a request whose features are here or in the engine; `FeatureMissing` if some are not."""
    layouts = {digest: feature.layout for digest, feature in features.items()}
    if submit.places:
        layouts |= _held_layouts(engine, (place.digest for place in submit.places if place.digest not in layouts))
    make = partial(to_prompt, submit, layouts.__getitem__, max_tokens=engine.contract.max_tokens)
    prompt = make() if len(submit.places) <= _FEW_ITEMS else await asyncio.to_thread(make)
    return to_submission(submit, prompt, features, trace=trace)


def borrow(borrowers: Borrower | None, lend: Lend) -> Feature:
    """Return a feature in a frontend's shared memory."""
    if borrowers is None:
        raise ProtocolError("this worker has no shared memory with anyone")
    sizes_of(lend)  # names and dtypes are in order
    heads = [(head.name, head.dtype, head.shape) for head in lend.tensors]
    view = borrowers.borrow(to_lease(lend))
    return with_small_copies(borrowed_feature(view, lend.modality, heads, to_layout(lend), lend.origin))


def _held_layouts(engine: Engine, digests: Iterable[Digest]) -> dict[Digest, Layout]:
    found = {digest: engine.holding(digest) for digest in digests}
    if missing := [digest for digest, holding in found.items() if holding is None]:
        raise FeatureMissing(missing)
    return {digest: holding.layout for digest, holding in found.items() if holding is not None}
