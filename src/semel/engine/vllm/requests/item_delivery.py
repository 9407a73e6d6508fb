"""Items that go to vLLM's engine core before the request that has them.

vLLM sends a request's items with the request, once for each of its `n` answers, and encodes the message on the event
loop. So where that is much, new items go first, a few at a time, in requests that are dropped before they are
scheduled; the request itself then names them. Between two of these others may go in, and may take the room: what is
gone by then travels with the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from semel.core import Digest, Feature, Item, Placeholder, Prompt, Submission, Timeline
from semel.engine.vllm.compat.internals import show_items
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.inputs import engine_input, input_items
from semel.engine.vllm.requests.item_cache import ItemCache
from semel.engine.vllm.requests.pooling import pooling_params
from semel.engine.vllm.requests.sampling import refusals, sampling_params

__all__ = ["BATCH_ITEMS", "ItemDelivery"]

BATCH_ITEMS: Final = 16
"""Items of one message: with small ones it takes about 2 ms of the event loop."""

_ONE_TOKEN: Final[Mapping[str, object]] = {"max_tokens": 1}


class ItemDelivery:
    """The way of items into vLLM's item cache without the request that has them."""

    def __init__(self, llm: Any, model: VllmModel, cache: ItemCache, order: asyncio.Lock) -> None:
        self._llm = llm
        self._model = model
        self._cache = cache
        self._order = order
        self.sampling = _ONE_TOKEN
        """The parameters of requests that are dropped before they are scheduled."""

    def due(
        self, submission: Submission, items: Mapping[Digest, Any], answers: int
    ) -> Generator[None, None, list[Digest]]:
        """Find the new items of a request that should go first, in slices: all, if many or with several answers.

        None if they do not fit together with what the request refers to, or would push that out: it is not renewed
        before the request itself comes.
        """
        fresh = []
        for digest in items:
            if digest not in self._cache:
                fresh.append(digest)
            yield
        if not fresh or (answers == 1 and len(fresh) <= BATCH_ITEMS):
            return []
        coming, room = 0, self._cache.capacity
        seen: set[Digest] = set()
        for item in submission.prompt.items:
            feature = submission.features.get(item.digest)
            if feature is None:
                room = self._cache.capacity - self._cache.nbytes
            elif item.digest not in seen:
                coming += feature.nbytes
            seen.add(item.digest)
            yield
        return fresh if coming <= room else []

    async def deliver(
        self,
        request_id: str,
        fresh: Sequence[Digest],
        features: Mapping[Digest, Feature],
        items: Mapping[Digest, Any],
    ) -> AbstractSet[Digest]:
        """Put these items into the cache; returns those that were new."""
        size = 1 if self._model.is_encoder_decoder else BATCH_ITEMS
        delivered: set[Digest] = set()
        for start in range(0, len(fresh), size):
            chosen = {digest: features[digest] for digest in fresh[start : start + size]}
            submission = Submission(f"items-{start}-{request_id}", self.shortest_prompt(chosen), chosen, self.sampling)
            prompt = engine_input(submission, items)
            request = await self.validate(submission, prompt)
            async with self._order:
                delivered.update(await self.show(submission, prompt, request))
            await asyncio.sleep(0)
        return delivered

    async def show(self, submission: Submission, prompt: Any, request: Any) -> tuple[Digest, ...]:
        """Put the items of a request into the cache, and drop the request; under the lock of the order."""
        admission = self._cache.admit(submission.prompt.items, input_items(prompt), submission.features)
        try:
            await show_items(self._llm, request)
        except BaseException:
            self._cache.take_back(admission)
            raise
        return admission.fresh

    async def validate(self, submission: Submission, prompt: Any) -> Any:
        """Return the request as vLLM's engine core takes it, after vLLM's own checks, which leave no trace."""
        tasks = await self._llm.get_supported_tasks()
        with refusals():
            make = pooling_params if submission.pools else sampling_params
            params = make(submission.sampling)
            return self._llm.input_processor.process_inputs(submission.request_id, prompt, params, tasks)

    def shortest_prompt(self, features: Mapping[Digest, Feature]) -> Prompt:
        """Return the shortest prompt that has these items."""
        items = tuple(Item(feature.modality, digest) for digest, feature in features.items())
        token_ids: list[int] = []
        places: list[Placeholder] = []
        for feature in features.values():
            layout = feature.layout
            places.append(Placeholder(len(token_ids), len(layout), layout.mask))
            token_ids += layout.token_ids
        if self._model.is_encoder_decoder:
            return Prompt(tuple(token_ids[:1]), Timeline.encoder(places), items, encoder_token_ids=tuple(token_ids))
        return Prompt(tuple(token_ids), Timeline.decoder(places), items)
