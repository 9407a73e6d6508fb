"""An engine as the proof at start uses it: requests with its probes, and what of them is where."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec import UNSET

from semel.core import Digest, Feature, Item, Placeholder, PrefetchedOutput, Prompt, Submission, Timeline
from semel.engine.protocol import Engine
from semel.engine.vllm.compat.probes import call_core, call_workers

__all__ = ["TEXT_TOKENS", "Probable", "Probed"]

TEXT_TOKENS: Final = 16
"""Tokens before each item: so there is a step that computes a part of the prompt, and no item."""

_ANSWER_TOKENS: Final = 4
_SAMPLING: Final = {"max_tokens": _ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
_TEXT: Final = (0,) * TEXT_TOKENS


class Probable(Engine, Protocol):
    """An engine that says why nothing can be injected."""

    @property
    def injection_refusal(self) -> str:
        """Empty if something can."""


class Probed:
    """An engine as the proof uses it."""

    def __init__(self, engine: Probable, llm: Any) -> None:
        self._engine = engine
        self._llm = llm
        self._numbers = itertools.count()

    @property
    def takes_injections(self) -> bool:
        """True if an item can be put in without a request."""
        return not self._engine.injection_refusal

    def takes_two(self, feature: Feature) -> bool:
        """Return whether a prompt may have two such items."""
        contract = self._engine.contract
        tokens = 2 * (TEXT_TOKENS + len(feature.layout)) + _ANSWER_TOKENS
        return contract.max_items[feature.modality] > 1 and tokens <= contract.max_tokens

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        """Put an item in; False if it does not fit."""
        return await self._engine.inject(digest, feature)

    async def answer(
        self,
        digests: Sequence[Digest],
        feature: Feature,
        prefetched: Sequence[PrefetchedOutput] = (),
        *,
        is_sent: bool = True,
    ) -> tuple[int, ...]:
        """Return the tokens that follow items of this feature, under these names; it is sent, or there already.

        Of a model that pools, these are the bytes of its output.
        """
        features = dict.fromkeys(digests, feature) if is_sent else {}
        return await self._ask(_prompt(digests, feature), features, tuple(prefetched))

    async def step(self) -> None:
        """Let the engine make a step without an item."""
        await self._ask(Prompt(_TEXT, Timeline.decoder(()), ()), {}, ())

    async def forget(self) -> None:
        """Forget all items and outputs, wherever they are."""
        await self._engine.reset()

    async def core(self, command: str, *names: str) -> Mapping[str, int]:
        """Call `probe` of the scheduler."""
        return await call_core(self._llm, command, names)

    async def workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all worker processes."""
        return await call_workers(self._llm, method, *arguments)

    async def _ask(
        self, prompt: Prompt, features: Mapping[Digest, Feature], prefetched: tuple[PrefetchedOutput, ...]
    ) -> tuple[int, ...]:
        name = f"proof-{next(self._numbers)}"
        pooling = self._engine.contract.pooling
        sampling = _SAMPLING if pooling is UNSET else {"task": pooling.task}
        submission = Submission(name, prompt, features, sampling, cache_salt=name, prefetched_outputs=prefetched)
        stream = await self._engine.submit(submission)
        try:
            outputs = [output async for output in stream]
            return tuple(part for one in outputs for part in (one.pooling.data if one.pooling else one.token_ids))
        finally:
            await stream.close()


def _prompt(digests: Sequence[Digest], feature: Feature) -> Prompt:
    token_ids: list[int] = []
    places = []
    for _ in digests:
        token_ids += _TEXT
        places.append(Placeholder(len(token_ids), len(feature.layout), feature.layout.mask))
        token_ids += feature.layout.token_ids
    items = tuple(Item(feature.modality, digest) for digest in digests)
    return Prompt(tuple(token_ids), Timeline.decoder(places), items)
