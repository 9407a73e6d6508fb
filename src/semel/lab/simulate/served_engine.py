"""An `EngineModel` behind the `Engine` protocol, with an item cache: what a simulated worker serves.

It checks what it is given: a feature has its digest in it, and an answer's tokens are numbered. So a feature under a
wrong digest and a token that is lost, repeated or out of order are seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from zlib import crc32

from semel.core import Contract, Digest, Feature, FeatureInfo, LruMap, Output, Submission
from semel.encoder.plan import Request
from semel.engine import ItemCacheWatcher
from semel.engine.progress import AwakeClock, StepWatch
from semel.errors import EngineFailed, FeatureMissing
from semel.lab.simulate.engine import EngineModel, Job

__all__ = ["DIGEST_FIELD", "ModelledEngine", "ModelledStream"]

DIGEST_FIELD = "digest"
"""The tensor of a simulated feature that has its digest in it."""


class ModelledStream:
    """The answer to one submission: its tokens are 1, 2, 3 and so on."""

    def __init__(self, engine: ModelledEngine, job: Job) -> None:
        self.job = job
        self._engine = engine
        self._outputs: deque[Output] = deque()
        self._tokens = 0
        self._changed = asyncio.Event()

    def push(self) -> None:
        """One more token."""
        self._tokens += 1
        made, last = self._tokens, self.job.answer_tokens
        cached = self.job.cached if made == 1 else None
        reason = "length" if made >= last else None
        self._outputs.append(Output(0, "", (made,), finish_reason=reason, cached_tokens=cached))
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield one token at a time."""
        sent = 0
        while sent < self.job.answer_tokens:
            while self._outputs:
                sent += 1
                yield self._outputs.popleft()
            if sent < self.job.answer_tokens:
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        """Stop generating."""
        self._engine.end(self)


class ModelledEngine:
    """An item cache as vLLM's, which evicts the least recently used, before a model of the engine core."""

    def __init__(self, contract: Contract, model: EngineModel) -> None:
        self.contract = contract
        self.model = model
        self.is_broken = False
        """Whether it fails every request at once."""

        self.submissions = 0
        self._loop = asyncio.get_running_loop()
        self.progress = StepWatch(AwakeClock(self._loop.time))
        self._items: LruMap[Digest, FeatureInfo] = LruMap(contract.cache_bytes, lambda info: info.nbytes)
        self._watchers: list[ItemCacheWatcher] = []
        self._streams: dict[Job, ModelledStream] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def cached(self) -> frozenset[Digest]:
        """The items in its cache."""
        return frozenset(self._items)

    def holds(self, digest: Digest) -> bool:
        """Return whether an item is cached."""
        return digest in self._items

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return what is known of a cached item."""
        return self._items.peek(digest)

    def watch(self, watcher: ItemCacheWatcher) -> None:
        """Report the cached items and every change to the watcher."""
        self._watchers.append(watcher)
        for digest, info in self._items.items():
            watcher.hold(digest, info)

    async def prepare(self, submission: Submission) -> Submission:
        """Nothing takes long."""
        return submission

    async def submit(self, submission: Submission) -> ModelledStream:
        """Queue a request whose items are here or come with it."""
        self.submissions += 1
        if self.is_broken:
            raise EngineFailed("the engine fails every request, as the simulation asks")
        digests = dict.fromkeys(item.digest for item in submission.prompt.items)
        if missing := [one for one in digests if one not in submission.features and one not in self._items]:
            raise FeatureMissing(missing)
        for digest in digests:
            self._hold(digest, submission.features.get(digest))
        stream = ModelledStream(self, _job_of(submission))
        self._streams[stream.job] = stream
        self.model.add(stream.job)
        self.progress.set_requests(len(self._streams))
        if self._timer is None:
            self._begin()
        return stream

    def end(self, stream: ModelledStream) -> None:
        """A request has ended, or is given up."""
        if self._streams.pop(stream.job, None) is not None:
            self.model.remove(stream.job)
            self.progress.set_requests(len(self._streams))

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        """Cache an item without a request."""
        if digest in self._items or feature.nbytes > self.contract.cache_bytes:
            return False
        self._hold(digest, feature)
        return True

    async def reset(self) -> None:
        """Remove all items."""
        for digest in list(self._items):
            self._items.pop(digest)
            self._tell_gone(digest)

    async def close(self) -> None:
        """End it."""
        self.kill()

    def kill(self) -> None:
        """Make no more steps."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._timer = None
        if (seconds := self.model.begin()) is not None:
            self._timer = self._loop.call_later(seconds, self._finish)

    def _finish(self) -> None:
        self.progress.step()
        tokens = set(self.model.answering)
        tokens.update(self.model.finish())
        for job in sorted(tokens, key=lambda job: job.order):
            self._streams[job].push()
            if job.generated >= job.answer_tokens:
                del self._streams[job]
        self.progress.set_requests(len(self._streams))
        self._begin()

    def _hold(self, digest: Digest, feature: Feature | None) -> None:
        if self._items.get(digest) is not None or feature is None:
            return
        if bytes(feature.tensors[DIGEST_FIELD].data) != digest:
            raise AssertionError("a feature came under the digest of another")
        info = FeatureInfo.of(feature)
        for evicted in self._items.put(digest, info):
            self._tell_gone(evicted)
        if digest in self._items:
            for watcher in self._watchers:
                watcher.hold(digest, info)

    def _tell_gone(self, digest: Digest) -> None:
        for watcher in self._watchers:
            watcher.drop(digest)


def _job_of(submission: Submission) -> Job:
    prompt = submission.prompt
    request = Request(submission.request_id, prompt.timeline, [item.digest for item in prompt.items])
    answer_tokens = submission.sampling["max_tokens"]
    assert isinstance(answer_tokens, int)
    salt = crc32((submission.cache_salt or "").encode())
    return Job(request, len(prompt.token_ids), answer_tokens, hash((salt, prompt.token_ids[0])))
