"""An engine without a model, for the edge cases that a real one shows only by accident.

Its answer is a function of its input: the prompt's tokens and, for every item, the bytes of the feature that it found
under the item's digest. A wrong feature, or one that changed meanwhile, gives a wrong answer. A test can make it lose
an item silently, as an engine core whose cache has drifted does, refuse requests, fail, hang, die, and answer slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from struct import pack
from typing import Final, Literal, get_args

from blake3 import blake3

from semel.core import Contract, Digest, Feature, FeatureInfo, LruMap, Output, PoolingOutput, Prompt, Submission
from semel.engine import ItemCacheWatcher
from semel.engine.progress import StepWatch
from semel.errors import EngineDead, EngineFailed, FeatureMissing, InvalidRequest

__all__ = ["EchoEngine", "EchoStream", "EngineFault", "echo", "echo_vector"]

EngineFault = Literal["submission", "first_token", "second_token", "no_token_left", "hang", "death", "late_death"]
"""Where an engine fails a request: when it gets it, or instead of a token. Or its structured output leaves no second
token, or the engine makes no step from then on, or dies of it: instead of the first token, or of the second."""

_HANG_S: Final = 0.05
_FAULTY_TOKEN: Final[Mapping[EngineFault, int]] = {"second_token": 2, "no_token_left": 2, "late_death": 2}


def echo(prompt: Prompt, features: Mapping[Digest, Feature]) -> tuple[int, ...]:
    """Return the answer of an `EchoEngine`: four tokens."""
    hasher = blake3(",".join(map(str, prompt.token_ids)).encode())
    for item in prompt.items:
        for name, tensor in sorted(features[item.digest].tensors.items()):
            hasher.update(name.encode())
            hasher.update(tensor.data)
    return tuple(hasher.digest(4))


def echo_vector(prompt: Prompt, features: Mapping[Digest, Feature], numbers: int = 4) -> tuple[float, ...]:
    """Return what an `EchoEngine` pools: as many numbers, of the same hash as its tokens."""
    return tuple((token + number) / 256 for number, token in zip(range(numbers), cycle(echo(prompt, features))))


class EchoStream:
    """The answer to one submission."""

    def __init__(
        self,
        engine: EchoEngine,
        tokens: tuple[int, ...],
        missing: list[Digest],
        fault: EngineFault | None = None,
        pooled: PoolingOutput | None = None,
    ) -> None:
        self.tokens = tokens
        self.missing = missing
        """Items that the engine core has lost."""

        self._engine = engine
        self._fault = fault
        self._pooled = pooled
        self._pause_s = engine.pause_s
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield one token at a time."""
        if self.missing:
            raise FeatureMissing(self.missing)
        with self._engine.answering():
            for number, token in enumerate(self.tokens, 1):
                await asyncio.sleep(self._pause_s)
                if self._fault is not None and number == _FAULTY_TOKEN.get(self._fault, 1):
                    await _suffer(self._fault)
                await self._engine.step()
                if self._pooled is not None:
                    yield Output(0, "", (), finish_reason="stop", cached_tokens=0, pooling=self._pooled)
                    return
                yield Output(0, "", (token,), finish_reason="stop" if number == len(self.tokens) else None)

    async def close(self) -> None:
        """Nothing runs that would need an abort."""
        self.closed = True


class EchoEngine:
    """Caches items up to a number of bytes and evicts the least recently used first, as vLLM's item cache does."""

    def __init__(self, contract: Contract, *, pause_s: float = 0.0) -> None:
        self.contract = contract
        self.pause_s = pause_s
        self.submissions = 0
        self.last: Submission | None = None
        """The latest submission, without its features."""

        self.salts: set[str | None] = set()
        """The salts of all prefixes."""

        self.fault: EngineFault | None = None
        """Where it fails every request from now on. The sampling parameter `fail` says the same of one request."""

        self.progress = StepWatch()
        self.hangs = False
        """Whether it makes no step, for any request."""

        self.pooled_shape: tuple[int, ...] = ()
        """The shape of what it pools; empty for one vector of four numbers."""

        self.killed = False
        self.client_queries = 0
        """Lookups of items whose tensors clients sent, as vLLM's `vllm:mm_cache_queries_total` counts them."""

        self.client_hits = 0
        self._answers = 0
        self.lost: set[Digest] = set()
        """Items that the engine core has lost although this process lists them as cached."""

        self._items: LruMap[Digest, Feature] = LruMap(contract.cache_bytes, lambda feature: feature.nbytes)
        self._watchers: list[ItemCacheWatcher] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def nbytes(self) -> int:
        """The bytes of the cached items."""
        return self._items.weight

    def holds(self, digest: Digest) -> bool:
        """Return whether an item is cached."""
        return digest in self._items

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return what is known of a cached item."""
        feature = self._items.peek(digest)
        return None if feature is None else FeatureInfo.of(feature)

    def watch(self, watcher: ItemCacheWatcher) -> None:
        """Report the cached items and every change to the watcher."""
        self._watchers.append(watcher)
        for digest, feature in self._items.items():
            watcher.hold(digest, FeatureInfo.of(feature))

    async def prepare(self, submission: Submission) -> Submission:
        """Nothing takes long."""
        return submission

    async def submit(self, submission: Submission) -> EchoStream:
        """Answer from the submission's features and the cached ones."""
        await asyncio.sleep(self.pause_s)
        if submission.sampling.get("refuse"):
            raise InvalidRequest("refused, as asked")
        fault = self.fault or submission.sampling.get("fail")
        if fault == "submission":
            raise _failure()
        digests = dict.fromkeys(item.digest for item in submission.prompt.items)
        found = {d: one for d in digests if (one := submission.features.get(d) or self._items.peek(d)) is not None}
        if missing := [digest for digest in digests if digest not in found]:
            raise FeatureMissing(missing)
        self.submissions += 1
        self.last = replace(submission, features={})
        self.salts.add(submission.cache_salt)
        self._count(submission)
        lost = [digest for digest in digests if digest in self.lost and digest not in submission.features]
        for digest in lost:
            self._drop(digest)
        self.lost.difference_update(digests)
        for digest in digests:
            if digest not in lost:
                self._hold(digest, found[digest])
        if lost:
            return EchoStream(self, (), lost, _fault(fault))
        pooled = self._pool(submission.prompt, found) if "task" in submission.sampling else None
        return EchoStream(self, echo(submission.prompt, found), lost, _fault(fault), pooled)

    @property
    def injection_refusal(self) -> str:
        """Return why it caches nothing; empty if it does."""
        return "" if self.contract.cache_bytes else "the engine's item cache is off"

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        """Cache an item without a request."""
        if digest in self._items or feature.nbytes > self.contract.cache_bytes:
            return False
        self._hold(digest, feature)
        return True

    async def reset(self) -> None:
        """Remove all items."""
        for digest in list(self._items):
            self._drop(digest)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A request is under way inside."""
        self._answers += 1
        self.progress.set_requests(self._answers)
        try:
            yield
        finally:
            self._answers -= 1
            self.progress.set_requests(self._answers)

    def _pool(self, prompt: Prompt, features: Mapping[Digest, Feature]) -> PoolingOutput:
        shape = self.pooled_shape or (4,)
        rows = shape[0] if len(shape) > 1 else 1
        numbers = echo_vector(prompt, features, shape[-1]) * rows
        return PoolingOutput(shape, pack(f"<{len(numbers)}f", *numbers))

    def _count(self, submission: Submission) -> None:
        """Count what the client sent, place by place: an item that is shown twice is a hit the second time."""
        counted: set[Digest] = set()
        for item in submission.prompt.items:
            if item.digest in submission.client_features:
                self.client_queries += 1
                self.client_hits += item.digest in self._items or item.digest in counted
                counted.add(item.digest)

    async def step(self) -> None:
        """Make a step, unless it hangs."""
        while self.hangs:  # noqa: ASYNC110
            await asyncio.sleep(_HANG_S)
        self.progress.step()

    def kill(self) -> None:
        """There is no process to end."""
        self.killed = True

    async def close(self) -> None:
        """Nothing to end."""

    def _hold(self, digest: Digest, feature: Feature) -> None:
        if self._items.get(digest) is not None:
            return
        for evicted in self._items.put(digest, feature):
            self._tell_gone(evicted)
        if digest in self._items:
            for watcher in self._watchers:
                watcher.hold(digest, FeatureInfo.of(feature))

    def _drop(self, digest: Digest) -> None:
        if self._items.pop(digest) is not None:
            self._tell_gone(digest)

    def _tell_gone(self, digest: Digest) -> None:
        for watcher in self._watchers:
            watcher.drop(digest)


def _fault(name: object) -> EngineFault | None:
    return next((fault for fault in get_args(EngineFault) if fault == name), None)


async def _suffer(fault: EngineFault) -> None:
    if fault == "hang":
        await asyncio.Event().wait()
    if fault in ("death", "late_death"):
        raise EngineDead("the engine has died of the request, as asked")
    if fault == "no_token_left":
        raise InvalidRequest("structured_outputs: no token was left that it allows, as asked")
    raise _failure()


def _failure() -> EngineFailed:
    return EngineFailed("the engine failed the request, as asked")
