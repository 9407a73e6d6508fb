"""The first work of an engine, before a client's request makes it, and what is learnt of the encoder by it.

One fixed item of each modality is encoded. If the encoder outputs of this engine are to be shared, a hash of these is
its *probe*: engines that claim the same identity and have other probes make other outputs, whatever the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from semel.core import Digest, Feature, Modality, Prompt, Submission, Timeline, hash_parts
from semel.engine.protocol import CachedOutput, Engine
from semel.engine.vllm.grammars.trial import Grammars
from semel.engine.vllm.requests.item_delivery import ItemDelivery
from semel.engine.vllm.requests.sampling import sampling_params
from semel.engine.vllm.tier.host import HostTier
from semel.errors import EngineDead, SemelError

__all__ = ["SHORT_PROMPT", "Warmup"]

_ONE_TOKEN: Final[Mapping[str, object]] = {"max_tokens": 1}
SHORT_PROMPT: Final = Prompt((0,) * 8, Timeline.decoder(()), ())  # one of a single token ends Qwen3.5 on a CPU
_SCHEMA: Final = '{"type": "boolean"}'
_ATTEMPTS: Final = 2
"""The host cache may learn only from an output how wide one is, and save the next."""

logger = logging.getLogger(__name__)


class Warmup:
    """The warm-up of an engine's encoder."""

    def __init__(
        self,
        engine: Engine,
        samples: Mapping[Modality, Feature],
        delivery: ItemDelivery,
        grammars: Grammars | None,
        tier: HostTier | None,
    ) -> None:
        self._engine = engine
        self._samples = samples
        self._delivery = delivery
        self._grammars = grammars
        self._tier = tier

    async def run(self) -> None:
        """Let the engine do what it does for the first time."""
        await self._encode()
        if self._grammars is not None:
            await self._compile(self._grammars)

    async def _encode(self) -> None:
        """Encode the samples, and tell the tier what its engine is."""
        if self._tier is None:
            for modality, feature in self._samples.items():
                await self._generate(modality, feature)
                await self._engine.reset()
            return
        identifying = asyncio.create_task(asyncio.to_thread(self._tier.identify))
        probes = [await self._probe(self._tier, modality, feature) for modality, feature in self._samples.items()]
        self._tier.identity = await identifying
        self._tier.probe = _joined(probes)

    async def _probe(self, tier: HostTier, modality: Modality, feature: Feature) -> bytes | None:
        """Return the hash of what the encoder made of a sample; None if it was not saved."""
        probe = None
        for _ in range(_ATTEMPTS):
            await self._generate(modality, feature)
            tier.review()
            probe = _hash(modality, await tier.saved_output(_digest(modality)))
            await self._engine.reset()
            if probe is not None:
                break
        return probe

    async def _generate(self, modality: Modality, feature: Feature) -> None:
        """Answer a prompt with an item: if the engine dies of that, it dies before it is ready."""
        items = {_digest(modality): feature}
        prompt = self._delivery.shortest_prompt(items)
        prompt = replace(prompt, token_ids=(*prompt.token_ids, 0))  # an item at the end ends Qwen3-Omni
        submission = Submission(f"warm-{modality}", prompt, items, self._delivery.sampling)
        try:
            async for _ in await self._engine.submit(submission):
                pass
        except EngineDead:
            raise
        except SemelError as error:
            logger.warning("warming up the engine with %s failed: %s", modality, error)

    async def _compile(self, grammars: Grammars) -> None:
        """Let the engine choose and load its grammar backend now, or the first request would choose it for all."""
        grammars.start()
        sampling = {**_ONE_TOKEN, "structured_outputs": {"json": _SCHEMA}}
        try:
            await grammars.preapprove(sampling_params(sampling).structured_outputs)
            stream = await self._engine.submit(Submission("warm", SHORT_PROMPT, {}, sampling))
            async for _ in stream:
                pass
        except EngineDead:
            raise
        except SemelError as error:
            logger.warning("the engine takes no grammars, or none yet: %s", error)


def _digest(modality: Modality) -> Digest:
    return Digest(modality.encode().ljust(Digest.size, b"\0"))


def _hash(modality: Modality, cached_output: CachedOutput | None) -> bytes | None:
    if cached_output is None:
        return None
    probe = hash_parts([modality.encode(), repr(cached_output.form).encode(), *cached_output.buffers]).digest()
    return probe if cached_output.is_intact() else None


def _joined(probes: list[bytes | None]) -> bytes | None:
    found = [probe for probe in probes if probe is not None]
    if not found or len(found) < len(probes):
        logger.warning("what the encoder makes could not be probed: encoder outputs are not shared with other workers")
        return None
    return hash_parts(found).digest()
