"""A frontend in a process of its own: `python -m tests.worker.many_items ADDRESS ITEMS STREAMS TOKEN`.

It reads answers of text, so many at a time, and sends one request with so many distinct small items, of one token each.
Then it prints a line of JSON: how long that request took, and how many sessions there were.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from semel.core import Digest, Feature, Item, Layout, Placeholder, Prompt, Submission, Tensor, Timeline
from semel.fleet.worker import RemoteWorker
from semel.wire.zmq import FrontendLink
from tests.waiting import until
from tests.wire.examples import KEY

__all__ = ["small_feature", "submission_of"]

_GRID = memoryview(b"".join(side.to_bytes(8, "little") for side in (1, 2, 2)))
_TEXT = Prompt((7,) * 8, Timeline.decoder(()), ())


def small_feature(number: int, token: int) -> Feature:
    """The smallest image of Qwen2-VL: four patches, one token."""
    pixels = bytearray(4 * 1176)
    pixels[:8] = number.to_bytes(8, "little")
    tensors = {
        "pixel_values": Tensor("uint8", (4, 1176), memoryview(pixels)),
        "image_grid_thw": Tensor("int64", (3,), _GRID),
    }
    return Feature("image", tensors, Layout((token,)))


def submission_of(name: str, count: int, token: int, **sampling: object) -> Submission:
    """A prompt of so many distinct items, each behind a token of text."""
    features = {Digest(number.to_bytes(Digest.size, "big")): small_feature(number, token) for number in range(count)}
    places = [Placeholder(2 * number + 1, 1) for number in range(count)]
    prompt = Prompt([7, token] * count, Timeline.decoder(places), tuple(Item("image", digest) for digest in features))
    return Submission(name, prompt, features, {"max_tokens": 4, **sampling})


async def read(worker: RemoteWorker, submission: Submission) -> int:
    stream = await worker.submit(submission, _cannot)
    try:
        return sum([len(output.token_ids) async for output in stream])
    finally:
        await stream.close()


async def _cannot(_: Digest) -> Feature:
    raise AssertionError("nothing is made again")


async def read_for_ever(worker: RemoteWorker, name: str) -> None:
    number = 0
    while True:
        await read(worker, Submission(f"{name}-{number}", _TEXT, {}, {"max_tokens": 64}))
        number += 1


async def main(address: str, items: str, streams: str, token: str) -> None:
    async with asyncio.timeout(500), FrontendLink(address, key=KEY, frontend_id="f") as link:
        worker = RemoteWorker(link)
        tasks = [asyncio.create_task(worker.run())]
        await until(lambda: worker.is_connected)
        tasks += [asyncio.create_task(read_for_ever(worker, f"s{number}")) for number in range(int(streams))]
        await asyncio.sleep(1.0)
        submission = submission_of("many", int(items), int(token))
        start = time.monotonic()
        tokens = await read(worker, submission)
        took = time.monotonic() - start
        assert not any(task.done() for task in tasks), tasks
        sys.stdout.write(json.dumps({"tokens": tokens, "seconds": took, "sessions": worker.sessions}) + "\n")
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
