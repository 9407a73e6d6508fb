"""Proof at start: what semel adds to an engine is tried on the machine where it runs, before clients use it.

An item of each modality is encoded, saved, dropped from the device, and comes back by every path that the engine has.
The worker processes hash what is on the device then: it has to equal the output that was encoded and stayed there, bit
for bit. Where an item is encoded again, the bits decide only if two plain encodes agree in theirs; if not, the tokens
do, if two plain answers agree. No request shares a prefix with another one.

What is wrong, or cannot be decided, is switched off for this run of the engine, with one line that names item and path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from semel.core import Digest, Feature, Modality, hash_parts
from semel.engine.protocol import Tier
from semel.engine.vllm.compat.internals import (
    GUARDED_WORKER,
    LAZY_TRANSFER_SCHEDULER,
    LAZY_TRANSFER_WORKER,
    PLAIN_SCHEDULER,
    SCHEDULER,
)
from semel.engine.vllm.probed import TEXT_TOKENS, Probable, Probed
from semel.engine.vllm.tier.host import HostTier
from semel.errors import EngineDead, EngineFailed, SemelError

__all__ = ["INJECTION_REFUSAL", "UNTESTED", "Proof", "State", "prove"]

State = Literal["proven", "off", "untested", "absent"]
"""`off` was switched off by the proof, `untested` is as it was configured, `absent` is not part of this engine."""

UNTESTED: Final[Mapping[str, State]] = dict.fromkeys(
    ("host_tier", "embedding_store", "lazy_transfer", "encoder_guard", "encoder_planning", "injection"), "untested"
)
"""The capabilities of an engine that cannot be probed."""

INJECTION_REFUSAL: Final = "an injected item was encoded otherwise than a sent one when the engine started"

_BUDGET_S: Final = 5.0
"""After that no further modality begins: the paths are the same for all."""

_SAVED_S: Final = 2.0
_LOOK_S: Final = 0.01

logger = logging.getLogger(__name__)


class _DifferenceError(Exception):
    """A path that does not do what it should."""


class _UntestableError(Exception):
    """A path that this item does not take."""


@dataclass(frozen=True, slots=True)
class _Resident:
    """An item that was encoded twice, and stayed on the device the second time."""

    feature: Feature
    digest: Digest
    outputs: tuple[str, ...]
    """The hash of its output in each worker process."""

    has_same_bits: bool
    tokens: tuple[int, ...]
    has_same_tokens: bool


class Proof:
    """The proof of one engine's capabilities."""

    def __init__(self, probed: Probed, features: Mapping[Modality, Feature], tier: Tier | None) -> None:
        self._probed = probed
        self._features = features
        self._tier = tier
        self._states: dict[str, State] = dict.fromkeys(UNTESTED, "absent")
        self._checks: Mapping[str, Callable[[_Resident], Awaitable[None]]] = {
            "host_tier": self._host_tier,
            "embedding_store": self._store,
            "lazy_transfer": self._lazy_transfer,
            "encoder_guard": self._guard,
            "encoder_planning": self._planning,
            "injection": self._injection,
        }

    async def run(self) -> dict[str, State]:
        """Prove what there is, and switch off what fails."""
        began = time.monotonic()
        try:
            await self._find()
        except EngineFailed as error:
            logger.warning("nothing is proven on this machine, everything is as configured: %s", error)
            return dict(UNTESTED)
        has_any = any(state != "absent" for state in self._states.values())
        for modality, feature in self._features.items():
            if has_any and time.monotonic() - began < _BUDGET_S:
                await self._prove(modality, feature)
        await self._probed.forget()
        proven = [name for name, state in self._states.items() if state == "proven"]
        if proven:
            logger.info("proven on this machine in %.1f s: %s", time.monotonic() - began, ", ".join(proven))
        return self._states

    async def _find(self) -> None:
        counts = await self._probed.core("count")
        has_guard = any(found is not None for found in await self._probed.workers("has_replayed"))
        for name, is_there in (
            ("host_tier", counts["has_host_tier"]),
            ("embedding_store", self._tier is not None),
            ("lazy_transfer", counts["has_lazy_transfer"]),
            ("encoder_guard", has_guard),
            ("encoder_planning", counts["has_encoder_planning"]),
            ("injection", self._probed.takes_injections),
        ):
            if is_there:
                self._states[name] = "untested"

    async def _prove(self, modality: Modality, feature: Feature) -> None:
        try:
            resident = await self._encode(modality, feature)
        except (_UntestableError, SemelError) as error:
            if isinstance(error, EngineDead):
                raise
            logger.warning("nothing can be proven with the %s probe: %s", modality, error)
            return
        for name, check in self._checks.items():
            if self._states[name] in ("absent", "off"):
                continue
            try:
                await check(resident)
            except EngineDead:
                raise
            except _UntestableError as error:
                logger.info("%s is not proven with the %s probe: %s", name, modality, error)
            except (_DifferenceError, SemelError) as error:
                await self._switch_off(name, modality, str(error))
            else:
                self._states[name] = "proven"

    async def _switch_off(self, name: str, modality: Modality, reason: str) -> None:
        logger.error("%s is switched off for this run: with the %s probe, %s", name, modality, reason)
        self._states[name] = "off"
        if name == "encoder_guard":
            await self._probed.workers("stop_replaying")
        else:
            await self._probed.core("off", name)
        if name == "host_tier" and self._states["embedding_store"] != "absent":
            self._states["embedding_store"] = "off"  # it publishes what the tier has saved

    async def _encode(self, modality: Modality, feature: Feature) -> _Resident:
        """Encode an item twice."""
        digest = _digest(modality, 0)
        runs = []
        for _ in range(2):
            await self._probed.forget()
            tokens = await self._probed.answer([digest], feature)
            runs.append((tokens, await self._outputs(digest)))
        (first, before), (tokens, outputs) = runs
        if not any(outputs):
            raise _UntestableError("its output does not stay on the device")
        return _Resident(feature, digest, outputs, before == outputs, tokens, first == tokens)

    async def _host_tier(self, resident: _Resident) -> None:
        """Load an output that was saved when it was encoded."""
        key = resident.digest.hex()
        saved = await self._save(resident)
        await self._probed.core("drop", key)
        await self._probed.step()
        if any(await self._outputs(resident.digest)):
            raise _DifferenceError("an output that was dropped is still on the device")
        before = await self._probed.core("count")
        await self._probed.answer([resident.digest], resident.feature)
        if (await self._probed.core("count"))["loads"] == before["loads"]:
            raise _DifferenceError("an output that was saved was encoded again")
        await self._compare_bits(saved, resident.digest)

    async def _store(self, resident: _Resident) -> None:
        """Read what was saved, as a publication does, and load it, as after a fetch."""
        assert self._tier is not None
        saved = await self._save(resident)
        self._tier.review()
        cached = self._tier.cached_output(resident.digest)
        if cached is None:
            raise _DifferenceError("this process does not see what was saved")
        content = b"".join(cached.buffers)
        if hash_parts([repr(cached.form).encode(), content]).hexdigest() != saved[0]:
            raise _DifferenceError("this process reads other bits than were saved")
        await self._probed.forget()
        staged = self._tier.stage(resident.digest, cached.form)
        if staged is None:
            raise _UntestableError("there is no room for what is fetched")
        left = memoryview(content)
        for buffer in staged.buffers:
            buffer[:], left = left[: len(buffer)], left[len(buffer) :]
        before = await self._probed.core("count")
        await self._probed.answer([resident.digest], resident.feature, [staged.prefetched])
        if (await self._probed.core("count"))["prefetched"] == before["prefetched"]:
            raise _DifferenceError("an output that was fetched was encoded again")
        await self._compare_bits(saved, resident.digest)

    async def _lazy_transfer(self, resident: _Resident) -> None:
        """Encode an item in a later step than the one with which its request was sent."""
        await self._probed.forget()
        before = await self._probed.core("cut", str(TEXT_TOKENS // 2))
        tokens = await self._probed.answer([resident.digest], resident.feature)
        if (await self._probed.core("count"))["late_bytes"] == before["late_bytes"]:
            raise _UntestableError("nothing of it was left out")
        await self._compare(resident, tokens, [resident.digest])

    async def _guard(self, resident: _Resident) -> None:
        """Encode the items of a batch again, each alone."""
        await self._probed.forget()
        await self._probed.workers("replay_next")
        digests, tokens = await self._answer_two(resident)
        if False in await self._probed.workers("has_replayed"):
            raise _UntestableError("no batch was encoded again")
        await self._compare(resident, tokens, digests)

    async def _planning(self, resident: _Resident) -> None:
        """Compare with vLLM's own planning."""
        answers = []
        try:
            for command in ("unplanned", "planned"):
                await self._probed.core(command)
                await self._probed.forget()
                digests, tokens = await self._answer_two(resident)
                answers.append(tokens)
                await self._compare(resident, resident.tokens, digests)
        finally:
            await self._probed.core("planned")
        if resident.has_same_tokens and answers[0] != answers[1]:
            raise _DifferenceError(f"the answer is {answers[1]}, with vLLM's own planning {answers[0]}")

    async def _injection(self, resident: _Resident) -> None:
        """Refer to an item that no request has brought."""
        await self._probed.forget()
        if not await self._probed.inject(resident.digest, resident.feature):
            raise _UntestableError("it does not fit the item cache")
        tokens = await self._probed.answer([resident.digest], resident.feature, is_sent=False)
        await self._compare(resident, tokens, [resident.digest])

    async def _answer_two(self, resident: _Resident) -> tuple[list[Digest], tuple[int, ...]]:
        """Ask about the item under two names, if bits can be compared and a prompt may have two.

        Returns the names whose outputs stayed on the device, and the tokens.
        """
        digests = [resident.digest]
        if resident.has_same_bits and self._probed.takes_two(resident.feature):
            digests.append(_digest(resident.feature.modality, 1))
        tokens = await self._probed.answer(digests, resident.feature)
        kept = [digest for digest in digests if any(await self._outputs(digest))]
        if not kept:
            raise _UntestableError("its output does not stay on the device")
        return kept, tokens

    async def _save(self, resident: _Resident) -> tuple[str, ...]:
        """Encode an item, and wait until the host has its output: a device may copy it later. Returns its hashes."""
        await self._probed.forget()
        await self._probed.answer([resident.digest], resident.feature)
        deadline = time.monotonic() + _SAVED_S
        while not (await self._probed.core("count", resident.digest.hex()))["saved"]:
            if time.monotonic() > deadline:
                raise _DifferenceError("its output is not saved")
            await asyncio.sleep(_LOOK_S)
            await self._probed.step()
        return await self._outputs(resident.digest)

    async def _compare(self, resident: _Resident, tokens: tuple[int, ...], digests: Sequence[Digest]) -> None:
        if resident.has_same_bits:
            for digest in digests:
                await self._compare_bits(resident.outputs, digest)
        elif not resident.has_same_tokens:
            raise _DifferenceError("two plain runs differ in bits and tokens, so it cannot be decided")
        elif tokens != resident.tokens:
            raise _DifferenceError(f"the answer is {tokens}, without it {resident.tokens}")

    async def _compare_bits(self, expected: Sequence[str], digest: Digest) -> None:
        for rank, (found, output) in enumerate(zip(await self._outputs(digest), expected, strict=True)):
            if found != output:
                what = "other bits than were encoded" if found else "nothing"
                raise _DifferenceError(f"worker process {rank} has {what} on its device")

    async def _outputs(self, digest: Digest) -> tuple[str, ...]:
        """Return the hash of an output in each worker process; empty where it is not on the device."""
        key = digest.hex()
        return tuple(found.get(key, "") for found in await self._probed.workers("digest_outputs", [key]))


async def prove(
    engine: Probable, llm: Any, features: Mapping[Modality, Feature], tier: HostTier | None
) -> Mapping[str, State]:
    """Prove what an engine of vLLM has of semel, and switch off what fails; returns the state of everything.

    It is probed if it has semel's scheduler and worker, and keeps encoder outputs. After it the engine is warm.
    """
    config = llm.vllm_config
    states: Mapping[str, State]
    if (
        config.scheduler_config.scheduler_cls not in (SCHEDULER, LAZY_TRANSFER_SCHEDULER, PLAIN_SCHEDULER)
        or config.parallel_config.worker_cls not in (GUARDED_WORKER, LAZY_TRANSFER_WORKER)
        or config.model_config.is_encoder_decoder
    ):
        states = UNTESTED
    else:
        states = await Proof(Probed(engine, llm), features, tier).run()
    if tier is not None:
        tier.begin()
    return states


def _digest(modality: Modality, number: int) -> Digest:
    return Digest(f"proof {number} {modality}".encode().ljust(Digest.size, b"\0"))
