"""A worker with an echo engine in a process of its own, which may fail every request.

`python -m tests.frontend.echo_process ADDRESS PAUSE_S [FAULT [PROGRESS_S]]`: a fault is one of `EngineFault`, or empty.
With a time for its progress, the engine has made its first steps already.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import get_args

from semel.engine.progress import FIRST_STEPS
from semel.lab.testing.engine import EchoEngine, EngineFault
from semel.wire.zmq import WorkerListener
from semel.worker.worker import Worker
from tests.wire.examples import CONTRACT, KEY
from tests.worker.pairing import ITEM_BYTES

LIFE_S = 120.0


async def main(address: str, pause_s: str, fault: str = "", progress_s: str = "0") -> None:
    engine = EchoEngine(replace(CONTRACT, cache_bytes=64 * ITEM_BYTES), pause_s=float(pause_s))
    engine.fault = next((one for one in get_args(EngineFault) if one == fault), None)
    async with asyncio.timeout(LIFE_S), WorkerListener(address, key=KEY, contract=engine.contract) as listener:
        engine.progress.steps = FIRST_STEPS
        await Worker(engine, listener, progress_s=float(progress_s)).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
