"""A frontend in a process of its own: `python -m tests.wire.frontend_process ADDRESS PART`.

`idle` opens a session and stays. `abort` sends a feature of 256 MB and, all the while, aborts whose ids are the time
at which they were sent; the clock is the same in all processes of a machine.
"""

from __future__ import annotations

import asyncio
import sys
import time

from semel.core import Feature, Layout, Tensor
from semel.wire.limits import Deadlines
from semel.wire.messages import Abort
from semel.wire.zmq import Connected, FrontendLink
from tests.wire.examples import KEY, digest_of

FEATURE_BYTES = 256 << 20
ABORTS = 20
PAUSE_S = 0.02
BRISK = Deadlines(heartbeat_s=0.1)


async def main(address: str, part: str) -> None:
    async with asyncio.timeout(60), FrontendLink(address, key=KEY, frontend_id=part, deadlines=BRISK) as link:
        async for event in link:
            if isinstance(event, Connected):
                session = event.session
                break
        if part == "abort":
            tensor = Tensor("uint8", (FEATURE_BYTES,), memoryview(bytearray(FEATURE_BYTES)))
            session.send_feature(digest_of(1), Feature("image", {"pixel_values": tensor}, Layout((7,))))
            for _ in range(ABORTS):
                await asyncio.sleep(PAUSE_S)
                session.send(Abort(str(time.monotonic_ns())))
        async for _ in link:
            pass


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
