"""The threads in which submissions are checked and become vLLM's input, so that no event loop waits for it.

One thread builds items. It takes turns between the requests: one with thousands of items has them built a slice at a
time, and others need not wait for all of them. What is done with all items of a request at once, if they are many, is
done by another thread, one request after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from semel.aio import at_once, in_slices
from semel.core import Contract, Digest, Feature, Submission
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.inputs import build_item, check_prompt, check_shapes, engine_input, new_features
from semel.engine.vllm.requests.item_cache import ItemCache

__all__ = ["FEW_ITEMS", "BuiltInput", "ItemBuilder"]

FEW_ITEMS: Final = 64
"""So many items are checked on the event loop: it takes less time than a thread's turn."""

_TURN_S: Final = 0.005

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BuiltInput:
    """A submission as vLLM takes it."""

    prompt: Any
    items: dict[Digest, Any]
    """vLLM's items of the features that came with the submission."""


class ItemBuilder:
    """The builder of vLLM's inputs from submissions, which are checked first."""

    def __init__(self, contract: Contract, model: VllmModel, cache: ItemCache) -> None:
        self.contract = contract
        self._model = model
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semel-items")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="semel-requests")
        """For what takes no turns, so that nobody's items wait for a large request."""

    async def build(self, submission: Submission) -> BuiltInput:
        """Check a submission, build its new items, and make an input of it."""
        if not submission.prompt.items:
            check_prompt(submission, self.contract, self._model, self._cache)
            return BuiltInput(engine_input(submission, {}), {})
        check = partial(check_prompt, submission, self.contract, self._model, self._cache)
        await self.run(check, len(submission.prompt.items))
        items: dict[Digest, Any] = {}
        if submission.features:
            features = deque(new_features(submission).items())
            while features:
                await self._in_thread(partial(self._build_some, features, items), self._thread)
        shapes = check_shapes(submission, items, self._model)
        if len(submission.prompt.items) <= FEW_ITEMS:
            at_once(shapes)  # a pause, however short, would let a later submission pass
        else:
            await in_slices(shapes)
        make = partial(engine_input, submission, items)
        return BuiltInput(await self.run(make, len(submission.prompt.items)), items)

    async def run(self, work: Callable[[], _T], items: int) -> _T:
        """Do something for a request with so many items: for a few at once, for many in a thread."""
        return work() if items <= FEW_ITEMS else await self._in_thread(work, self._beside)

    def drop(self, items: dict[Digest, Any]) -> None:
        """Let items go, which takes 4 µs each, without holding up the event loop."""
        if len(items) > FEW_ITEMS:
            with suppress(RuntimeError):  # at the end there is no thread any more
                self._beside.submit(_empty, items)

    def close(self) -> None:
        """End the threads; what they do is dropped."""
        self._thread.shutdown(wait=False)
        self._beside.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], _T], thread: ThreadPoolExecutor) -> _T:
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def _build_some(self, features: deque[tuple[Digest, Feature]], items: dict[Digest, Any]) -> None:
        """Build items for one turn. A single one takes one turn, however long: submissions keep their order."""
        end = time.monotonic() + _TURN_S
        while features:
            digest, feature = features.popleft()
            items[digest] = build_item(feature, self.contract, self._model)
            if time.monotonic() >= end:
                return


def _empty(items: dict[Digest, Any]) -> None:
    while items:
        items.popitem()
