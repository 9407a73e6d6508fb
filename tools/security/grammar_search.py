"""A search for grammars that stop others: `python -m tools.security.grammar_search --count 2000` (threats S27).

A seeded generator nests, repeats and alternates regular expressions, grammars and schemas. Three tenants send them,
through the trial, to a real engine; another one has eight streams of plain text there all the while. Printed: the
verdicts of the trial, how the requests ended, and the longest time between two tokens of those streams, alone and
meanwhile, with the grammars that were under way. Each grammar has a number, which it is made of: `--start 500 --count
500` is the second quarter of 2,000. The exit code is 1 if the engine did not take what the trial took, if a stream
failed, or if a gap was longer than `--max-step-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from semel.core import Prompt, Submission, Tenant, Timeline
from semel.errors import EngineFailed, NotReady, SemelError
from semel.lab.testing.models import build
from tests.engine.engines import Start, running_as_worker
from tests.engine.parity import Rig
from tools.security.target import ENVIRONMENT

ALICE: Final = Tenant("alice").prefix_salt
ATTACKERS: Final = 3
START: Final = Start("qwen2-vl", ("--max-model-len", "4096", "--max-num-seqs", "32"))
STREAMS: Final = 8
TOKENS: Final = 64
ALONE_S: Final = 5.0
BEAT_S: Final = 0.005


def regex_of(rng: random.Random, depth: int = 3) -> str:
    """Make a regular expression."""
    if depth == 0:
        return rng.choice(["a", "b", "aa", "[a-c]", "[a-z ]", ".", "x?"])
    inner = [regex_of(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    match rng.randrange(4):
        case 0:
            return f"({'|'.join(inner)})"
        case 1:
            return f"({inner[0]}){{{rng.choice([0, 1])},{rng.choice([3, 30, 99, 200])}}}"
        case 2:
            return f"({inner[0]}){rng.choice('*+?')}"
    return "".join(inner)


def grammar_of(rng: random.Random) -> str:
    """Make a grammar of a few rules that call each other."""
    names = ["root", *(f"r{number}" for number in range(rng.randint(1, 3)))]
    rules = []
    for name in names:
        bodies = [
            " ".join(rng.choice(['"a"', '"aa"', '"b"', "[a-c]", *names[1:]]) for _ in range(rng.randint(1, 3)))
            for _ in range(rng.randint(1, 3))
        ]
        bodies.append(rng.choice(['"a"', '"b"']))
        rules.append(f"{name} ::= {' | '.join(bodies)}")
    return "\n".join(rules)


def schema_of(rng: random.Random, depth: int = 3) -> Any:
    """Make a schema."""
    leaf = rng.randrange(4) if depth == 0 else rng.randrange(7)
    match leaf:
        case 0:
            return {"type": "string", "pattern": f"^{regex_of(rng, 2)}$"}
        case 1:
            return {"type": "string", "maxLength": rng.choice([3, 50, 200])}
        case 2:
            return {"type": rng.choice(["integer", "number", "boolean", "null", "string"])}
        case 3:
            return {"enum": [rng.choice("abc") * rng.randint(1, 9) for _ in range(rng.randint(1, 5))]}
        case 4:
            return {"anyOf": [schema_of(rng, depth - 1) for _ in range(rng.randint(1, 4))]}
        case 5:
            return {"type": "array", "items": schema_of(rng, depth - 1), "maxItems": rng.choice([2, 20, 99])}
    names = [rng.choice("abc") * number for number in range(1, rng.randint(2, 5))]
    return {"type": "object", "properties": {name: schema_of(rng, depth - 1) for name in names}}


def outputs_of(rng: random.Random) -> dict[str, Any]:
    """Make something that an answer can be held to."""
    match rng.randrange(3):
        case 0:
            return {"regex": "".join(regex_of(rng) for _ in range(rng.randint(1, 2)))}
        case 1:
            return {"grammar": grammar_of(rng)}
    return {"json": schema_of(rng)}


class Search:
    """One run against one engine."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.ends: Counter[str] = Counter()
        self.longest_s, self.longest_of = 0.0, ""
        self.loop_s = 0.0
        """The longest time that this process's own event loop did not run."""

        self.failures: list[str] = []
        self._under_way: dict[str, str] = {}
        """By tenant."""

        self._numbers = itertools.count()

    async def stream(self) -> None:
        """Read plain text for ever, and note the longest time between two tokens."""
        while True:
            last = time.monotonic()
            stream = await self._submit(ALICE, 512)
            try:
                async for _ in stream:
                    now = time.monotonic()
                    if now - last > self.longest_s:
                        self.longest_s, self.longest_of = now - last, " and ".join(self._under_way.values())
                    last = now
            finally:
                await stream.close()

    async def beat(self) -> None:
        """Watch the event loop for ever."""
        while True:
            last = time.monotonic()
            await asyncio.sleep(BEAT_S)
            self.loop_s = max(self.loop_s, time.monotonic() - last - BEAT_S)

    async def attack(self, tenant: str, numbers: Iterator[int], seed: int, until_s: float) -> None:
        """Send one grammar after the other."""
        for number in itertools.takewhile(lambda _: time.monotonic() < until_s, numbers):
            await self.attempt(tenant, outputs_of(random.Random(f"{seed}-{number}")), number)

    async def attempt(self, tenant: str, outputs: dict[str, Any], number: int) -> None:
        """Send a grammar, and note how it ended."""
        self._under_way[tenant] = f"{number}: {json.dumps(outputs)}"
        salt = Tenant(tenant).prefix_salt
        fields = {"structured_outputs": outputs, "seed": number}
        try:
            async with asyncio.timeout(60):
                try:
                    stream = await self._submit(salt, TOKENS, **fields)
                except NotReady:  # its trial got too little CPU time
                    stream = await self._submit(salt, TOKENS, **fields)
                async for _ in stream:
                    pass
            self.ends["answered"] += 1
        except SemelError as error:
            said = str(error)
            self.ends[f"{type(error).__name__}: {said.partition(': ')[2][:60]}"] += 1
            if "the engine cannot compile it" in said or isinstance(error, EngineFailed | NotReady):
                self.failures.append(f"{said}: {self._under_way[tenant]}")
        except TimeoutError:
            self.ends["not within 60 s"] += 1
            self.failures.append(f"not within 60 s: {self._under_way[tenant]}")
        self._under_way.pop(tenant)

    def verdicts(self) -> dict[str, int]:
        """Count the verdicts of the trial."""
        samples = self.rig.engine.grammars.samples()
        return {labels[0]: int(count) for _, count, labels in samples if labels and count}

    async def _submit(self, tenant: str | None, tokens: int, **sampling: Any) -> Any:
        fields = {"max_tokens": tokens, "ignore_eos": tenant == ALICE, "temperature": 1.0, **sampling}
        prompt = Prompt((1, 2, 3), Timeline.decoder(()), ())
        name = f"search-{next(self._numbers)}"
        return await self.rig.engine.submit(Submission(name, prompt, {}, fields, cache_salt=tenant))


async def main(arguments: argparse.Namespace) -> int:
    """Search, and print what was found."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_as_worker(START, build("qwen2-vl", Path(folder) / "model")) as rig:
            search = Search(rig)
            await search.attempt("mallory", {"regex": "a"}, 0)
            streams = [asyncio.create_task(search.stream()) for _ in range(STREAMS)]
            streams.append(asyncio.create_task(search.beat()))
            await asyncio.sleep(1)
            search.longest_s, search.longest_of = 0.0, ""
            await asyncio.sleep(ALONE_S)
            alone_s, search.longest_s, search.loop_s = search.longest_s, 0.0, 0.0
            search.ends.clear()
            before = search.verdicts()
            until_s, numbers = time.monotonic() + arguments.seconds, itertools.count(arguments.start)
            chosen = itertools.islice(numbers, arguments.count)
            tenants = [f"mallory-{number}" for number in range(ATTACKERS)]
            await asyncio.gather(*(search.attack(name, chosen, arguments.seed, until_s) for name in tenants))
            search.failures += [repr(task.exception()) for task in streams if task.done() and not task.cancelled()]
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            totals = await rig.totals()
            verdicts = {name: count - before.get(name, 0) for name, count in search.verdicts().items()}
    tried = search.ends.total()
    lines = [
        f"{tried} of {arguments.count} from number {arguments.start} on with seed {arguments.seed}",
        f"trial: {verdicts}",
        f"ends: {dict(search.ends.most_common())}",
        f"disagreements of trial and engine, and failures: {len(search.failures)}",
        f"longest gap {search.longest_s * 1e3:.0f} ms, alone {alone_s * 1e3:.0f} ms: {search.longest_of[:400]}",
        f"this process's event loop: longest gap {search.loop_s * 1e3:.0f} ms",
        f"{totals.following_ns / 1e9:.1f} s of following, {totals.following_ended} ended in the engine core",
        f"go on with --start {arguments.start + tried}",
    ]
    print("\n".join([*lines, *search.failures]))
    return int(search.longest_s > arguments.max_step_ms / 1e3 or bool(search.failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--seconds", type=float, default=3_600.0)
    parser.add_argument("--max-step-ms", type=float, default=250.0)
    os.environ |= ENVIRONMENT
    sys.exit(asyncio.run(main(parser.parse_args())))
