"""The caches of a running vLLM, and how each is emptied while requests are in flight.

What depends on the weights (encoder outputs, prefixes) can be forgotten without what does not (items).
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.item_cache import ItemCache

__all__ = ["EngineCaches"]


class EngineCaches:
    """vLLM's item cache, encoder cache and prefix cache."""

    def __init__(self, llm: Any, items: ItemCache, model: VllmModel, order: asyncio.Lock) -> None:
        """`order` is the lock under which items and requests go to the engine core."""
        self._llm = llm
        self._items = items
        self._model = model
        self._order = order
        self._prefix_era: str | None = None

    async def reset(self) -> None:
        """Forget all items, encoder outputs and prefixes."""
        async with self._order:
            await self._forget_items()
            await self._forget_outputs()

    async def forget_items(self) -> None:
        """Forget the items alone."""
        async with self._order:
            await self._forget_items()

    async def forget_outputs(self) -> None:
        """Forget what was made with the weights: encoder outputs, also those in the host's memory, and prefixes,
        also those that a connector of vLLM's keeps elsewhere."""
        async with self._order:
            await self._forget_outputs()

    async def forget_prefixes(self, *, in_connector: bool = False) -> None:
        """Forget the prefixes alone; with `in_connector` also those of a connector."""
        async with self._order:
            await self._forget_prefixes(in_connector=in_connector)

    async def sleep(self, level: int, mode: str) -> None:
        """Let the engine sleep, of which its core forgets the items."""
        async with self._order:
            if level:
                self._items.clear()
            await self._llm.sleep(level, mode)

    async def release_kv_cache_memory(self) -> None:
        """Let the engine give the memory of its KV cache back, of which its core forgets the items."""
        async with self._order:
            self._items.clear()
            await self._llm.release_kv_cache_memory()

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the salt under which vLLM keeps prefixes.

        vLLM cannot forget prefixes while requests run, short of running these again from their start; and it dies of
        that if it has dropped the tensors of an item because a prefix covered it. So prefixes of before a reset with
        requests in flight are left to be evicted, under a salt that nobody uses any more. The tenant's name stays in
        front: the engine core charges what a grammar costs to it (threats S27).
        """
        if self._prefix_era is None:
            return cache_salt
        return self._prefix_era if cache_salt is None else f"{cache_salt}/{self._prefix_era}"

    async def _forget_items(self) -> None:
        self._items.clear()
        await self._llm.reset_mm_cache()
        self._model.known.forget()

    async def _forget_outputs(self) -> None:
        await self._llm.reset_encoder_cache()
        await self._forget_prefixes(in_connector=True)

    async def _forget_prefixes(self, *, in_connector: bool = False) -> None:
        if not await self._llm.reset_prefix_cache(reset_connector=in_connector):
            self._prefix_era = secrets.token_hex(8)
