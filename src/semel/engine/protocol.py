"""What semel asks of an engine, and the values that go in and out.

An engine gets prompts that are rendered and features that are preprocessed; it never sees a URL, a message or a pixel
that semel has not checked. An engine keeps items in a cache of its own and tells what it holds; an item that it holds
is referred to by its digest. The one implementation is `semel.engine.vllm`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from semel.core import Contract, Digest, Feature, FeatureInfo, Output, Submission
from semel.engine.progress import StepWatch

__all__ = ["Engine", "ItemCacheWatcher", "Stream"]


class Stream(Protocol):
    """The answer to a submission, as it is generated. Whoever has one closes it."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs, until the last one has a finish reason for every sequence.

        Raises `FeatureMissing` before the first of them if items that went by reference were not there after all: the
        submission can be made again, with their features.
        """
        ...

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        ...


class ItemCacheWatcher(Protocol):
    """Is told what an engine's item cache holds: every insertion and every removal, in order, as it happens."""

    def hold(self, digest: Digest, holding: FeatureInfo) -> None:
        """The item is held from now on."""
        ...

    def drop(self, digest: Digest) -> None:
        """The item is gone."""
        ...


class Engine(Protocol):
    """Generates text from submissions.

    Every method may be called from any task of one event loop. A submission that breaks the contract is refused with
    `FeatureRejected` and leaves no trace in the engine.
    """

    @property
    def contract(self) -> Contract:
        """What this engine expects."""
        ...

    @property
    def progress(self) -> StepWatch:
        """Its steps, and how long it is busy without one."""
        ...

    def holds(self, digest: Digest) -> bool:
        """Whether the engine's item cache holds the item, as far as this process knows."""
        ...

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """What is known of an item that is held."""
        ...

    def watch(self, watcher: ItemCacheWatcher) -> None:
        """Tell the watcher of everything that is held, and from now on of every change."""
        ...

    async def prepare(self, submission: Submission) -> Submission:
        """Do what may take long and needs no place in the engine. Returns what to submit, or refuses it."""
        ...

    async def submit(self, submission: Submission) -> Stream:
        """Check a submission and hand it to the engine, which needs it no more when this returns.

        Raises `FeatureMissing` if an item without a feature is not held or could not stay until its turn; nothing has
        changed then.
        """
        ...

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        """Put an item into the engine's item cache, without a request.

        False if it was held already, does not fit, or there is no cache. A feature that breaks the contract is refused
        with `FeatureRejected`.
        """
        ...

    async def reset(self) -> None:
        """Forget all cached items, embeddings and prefixes. Requests in flight are answered."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...

    def kill(self) -> None:
        """End the engine's processes at once, also stopped ones: nothing is awaited. `close` is called all the same."""
        ...
