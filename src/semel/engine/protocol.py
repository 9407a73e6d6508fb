"""Protocols of an engine, its streams and its host tier, as the rest of semel uses them.

An engine gets prompts that are rendered and features that are preprocessed; it never sees a URL, a message or a pixel
that semel has not checked. An engine keeps items in a cache of its own and tells what it holds; an item that it holds
is referred to by its digest. The one implementation is `semel.engine.vllm`.

`Tier` is the memory of a host for the encoder outputs of its engine, as the process sees it that embeds the engine: it
lends blocks to outputs that it has fetched for requests, and reads outputs that the engine has saved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from semel.core import (
    AdapterChange,
    Contract,
    Digest,
    Feature,
    FeatureInfo,
    Form,
    Output,
    PrefetchedOutput,
    Submission,
)
from semel.engine.progress import StepWatch
from semel.engine.tier_events import TierEvent

__all__ = [
    "CachedOutput",
    "Engine",
    "EngineAdapters",
    "EngineControl",
    "ItemCacheWatcher",
    "PauseMode",
    "StagedOutput",
    "Stream",
    "Tier",
    "WeightUpdate",
]

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests that run when an engine pauses. Those that come later wait for it to go on."""

WeightUpdate = Literal[
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
]
"""A step of vLLM's protocol of weight transfer."""


class Stream(Protocol):
    """The answer to a submission, as it is generated. Its owner closes it."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """Return the outputs, until the last one has a finish reason for every sequence.

        Raises `FeatureMissing` before the first of them if items that went by reference were not there after all: the
        submission can be made again, with their features.
        """
        ...

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        ...


class ItemCacheWatcher(Protocol):
    """A watcher of an engine's item cache: it gets every insertion and every removal, in order, as it happens."""

    def hold(self, digest: Digest, holding: FeatureInfo) -> None:
        """Take note that an item is held from now on."""
        ...

    def drop(self, digest: Digest) -> None:
        """Take note that an item is gone."""
        ...


class Engine(Protocol):
    """A generator of text from submissions, or of pooling outputs if its contract says so.

    Every method may be called from any task of one event loop. A submission that breaks the contract is refused with
    `FeatureRejected` and leaves no trace in the engine.
    """

    @property
    def contract(self) -> Contract:
        """The features and prompts that this engine expects."""
        ...

    @property
    def progress(self) -> StepWatch:
        """Its steps, and how long it is busy without one."""
        ...

    def holds(self, digest: Digest) -> bool:
        """Return whether the engine's item cache holds the item, as far as this process knows."""
        ...

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return what is known of an item that is held."""
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


class EngineControl(Protocol):
    """Pause, sleep and new weights of an engine, by the names of vLLM's server.

    After a call that may have changed a weight nothing is used that was made with the weights of before. A call that
    fails in the engine raises `EngineFailed`.
    """

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Let the engine make no more steps: `abort` its requests, `wait` until they have ended, or `keep` them."""
        ...

    async def resume(self) -> None:
        """Let the engine go on."""
        ...

    async def is_paused(self) -> bool:
        """Return whether the engine makes no steps."""
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause (0), and move the weights to the host's memory (1) or discard them (2)."""
        ...

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        """Take the memory with these tags back, or all; returns whether the engine goes on."""
        ...

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps at any level, 0 included."""
        ...

    async def release_kv_cache_memory(self) -> None:
        """Give the memory of the KV cache back."""
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests as they are; their answers say `abort`."""
        ...

    async def update_weights(self, step: WeightUpdate, info: Any = None) -> None:
        """Do a step of vLLM's protocol of weight transfer."""
        ...

    async def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None
    ) -> list[Any]:
        """Call a method of all worker processes, if it is an allowed one; an `InvalidRequest` names these."""
        ...

    async def set_weight_version(self, version: str) -> None:
        """Name the weights."""
        ...

    async def weight_version(self) -> str:
        """Return the name of the weights."""
        ...

    async def weight_checksums(self) -> list[Mapping[str, str]]:
        """Return the checksums of the parameters in each worker process."""
        ...

    def world_size(self, *, include_dp: bool) -> int:
        """Return the number of worker processes."""
        ...

    async def forget_prefixes(self, *, in_connector: bool) -> None:
        """Forget the prefixes, in a connector as well if asked for."""
        ...

    async def forget_items(self) -> None:
        """Forget the items."""
        ...

    async def forget_outputs(self) -> None:
        """Forget encoder outputs and prefixes."""
        ...


class EngineAdapters(Protocol):
    """The LoRA adapters of an engine. A name that is loaded again with other weights is answered by these alone."""

    watchers: list[Callable[[], None]]
    """Called when the adapters or their changes are others."""

    @property
    def changes(self) -> Iterable[AdapterChange]:
        """The last change of each name, here or at another worker."""
        ...

    async def follow(self, change: AdapterChange) -> None:
        """Do what an operator asked another worker for, unless there was a later change."""
        ...

    async def load(self, name: str, path: str, *, in_place: bool = False, is_3d_weight: bool = False) -> None:
        """Load an adapter. `in_place` lets it replace one with its name, for requests that come from now on."""
        ...

    async def unload(self, name: str) -> None:
        """Take no more requests for an adapter; those that run go on."""
        ...


@dataclass(frozen=True, slots=True)
class StagedOutput:
    """Blocks of the host's memory for an encoder output that is being fetched."""

    prefetched: PrefetchedOutput
    """The output to submit with the request, when all bytes are there and were verified."""
    epoch: int
    """The tier's epoch when the blocks were set aside. What is fetched must be of this epoch's name."""
    buffers: tuple[memoryview, ...]
    """The memory for its bytes, in order. Any thread may write it, until the request is submitted."""


@dataclass(frozen=True, slots=True)
class CachedOutput:
    """An encoder output that the engine has saved."""

    form: Form
    buffers: tuple[memoryview, ...]
    """Its bytes, in order, read-only. Any thread may read them; they may change under its hands."""
    is_intact: Callable[[], bool]
    """Tells whether everything that was read of the buffers until now is of this output. From any thread."""


class Tier(Protocol):
    """The host's memory for encoder outputs, in the process that embeds the engine.

    Every method may be called from any thread, `review` by one at a time.

    Staged blocks belong to their caller, who frees them with `release`, until they are submitted. From the call
    of `Engine.submit` on they are the engine's, also if it raises; `release` does nothing then. The engine gives them
    back when nobody reads them any more.
    """

    @property
    def identity(self) -> bytes | None:
        """A hash of everything that may change a bit of the encoder's outputs. None if that cannot be computed."""
        ...

    @property
    def refusal(self) -> str:
        """Why nothing may be fetched for the engine or published of it; empty if it may."""
        ...

    @property
    def probe(self) -> bytes | None:
        """A hash of what the encoder made of fixed items when the engine started. None if it made nothing."""
        ...

    @property
    def epoch(self) -> int:
        """Number of resets since the engine was warm."""
        ...

    @property
    def has_new_weights(self) -> bool:
        """True if weights were changed in place: the identity is that of others, and stays so."""
        ...

    def stage(self, digest: Digest, form: Form) -> StagedOutput | None:
        """Reserve blocks for an output of this form. None if there is no room, or no output has such a form."""
        ...

    def release(self, staged: StagedOutput) -> None:
        """Let go of blocks that were not submitted, and that no thread writes any more. Twice does no harm."""
        ...

    def review(self) -> Sequence[TierEvent]:
        """Take blocks back that the engine is done with. Returns what has happened since the last call."""
        ...

    def holds(self, digest: Digest) -> bool:
        """Return whether the host cache has an output, as far as is known: up to the last `review`."""
        ...

    def cached_output(self, digest: Digest) -> CachedOutput | None:
        """Return an output in the host cache, to be read."""
        ...
