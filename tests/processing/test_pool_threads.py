"""The pool goes on, whoever waits in the event loop's threads: what they wait for may be a process of the pool."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from semel.cache import SharedCache
from semel.compose.pipeline import blocking
from semel.core import Media
from semel.errors import NotReady
from semel.processing.pool.pipe import Made, TensorHead, Tokenize, Tokens, Work
from semel.processing.pool.staging import Staging
from tests.processing.scripted_pool import ONE_TOKEN, Peer, scripted_pool
from tests.waiting import until

PROCESSES = 2
THREADS = 3
FEATURE_BYTES = 2 << 20


async def check_all_is_done(timeout_s: float) -> None:
    """Every process has an item whose feature is copied in a thread, while texts wait in every thread of the loop.

    The loop is one of its own, since its default threads are replaced.
    """
    loop, all_wait = asyncio.get_running_loop(), asyncio.Event()

    async def serve(peer: Peer) -> None:
        while True:
            order, _ = await peer.receive()
            if isinstance(order, Tokenize):
                await peer.send(Tokens(order.item, 1, 0), 4)
                continue
            assert isinstance(order, Work)
            await all_wait.wait()
            head = TensorHead("pixels", "uint8", (FEATURE_BYTES,))
            await peer.send(Made(order.item, "image", (head,), ONE_TOKEN, is_written=True))

    memory = SharedCache.create(4 * PROCESSES * FEATURE_BYTES)
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    try:
        async with scripted_pool(*[serve] * PROCESSES, memory=memory, timeout_s=timeout_s) as pool:
            tokenize = blocking(pool.tokenize)
            items = [asyncio.create_task(pool.process(Media("image", bytes([one])))) for one in range(PROCESSES)]
            await until(lambda: pool.busy == PROCESSES)
            texts = [asyncio.create_task(asyncio.to_thread(tokenize, ["a"])) for _ in range(THREADS + 1)]
            await until(lambda: sum(pool.waiting.values()) == THREADS)
            all_wait.set()
            try:
                assert [made.nbytes for made in await asyncio.gather(*items)] == [FEATURE_BYTES] * PROCESSES
                assert await asyncio.gather(*texts) == [[[]]] * (THREADS + 1)
            finally:
                await pool.close()  # lets go of the threads
                await asyncio.gather(*items, *texts, return_exceptions=True)
    finally:
        memory.close()


def test_large_features_are_copied_while_texts_wait_in_every_thread_S18() -> None:
    asyncio.run(check_all_is_done(timeout_s=30))


def test_control_a_copy_that_needs_a_thread_of_the_loop_waits_for_the_texts_and_they_for_it_S18(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it was: nobody goes on until the limit of time, and items that did nothing are refused."""
    shipped = Staging.copy_to

    async def copy_to(self: Staging, view: memoryview, _: Executor, *rest: Any) -> None:
        await shipped(self, view, None, *rest)  # type: ignore[arg-type] # the loop's own threads

    monkeypatch.setattr(Staging, "copy_to", copy_to)
    with pytest.raises(NotReady, match="stood still"):
        asyncio.run(check_all_is_done(timeout_s=2.5))
