"""A worker with an echo engine that pools vectors of 1,024 numbers, in a process of its own.

`python -m tests.frontend.pooling_process ADDRESS`
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from semel.lab.testing.engine import EchoEngine
from semel.wire.zmq import WorkerListener
from semel.worker.worker import Worker
from tests.frontend.rig import CONTRACT, KEY
from tests.frontend.test_pooling import EMBED

LIFE_S = 200.0


async def main(address: str) -> None:
    engine = EchoEngine(replace(CONTRACT, pooling=EMBED))
    engine.pooled_shape = (1_024,)
    async with asyncio.timeout(LIFE_S), WorkerListener(address, key=KEY, contract=engine.contract) as listener:
        await Worker(engine, listener).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
