"""A worker with an echo engine in a process of its own: `python -m tests.frontend.echo_process ADDRESS PAUSE_S`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from semel.testing.engine import EchoEngine
from semel.wire.zmq import WorkerListener
from semel.worker.worker import Worker
from tests.wire.examples import CONTRACT, KEY
from tests.worker.pairing import ITEM_BYTES

LIFE_S = 120.0


async def main(address: str, pause_s: str) -> None:
    engine = EchoEngine(replace(CONTRACT, cache_bytes=64 * ITEM_BYTES), pause_s=float(pause_s))
    async with asyncio.timeout(LIFE_S), WorkerListener(address, key=KEY, contract=engine.contract) as listener:
        await Worker(engine, listener).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
