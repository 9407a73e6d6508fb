"""A search for grammars that stop others: `python -m tests.security.grammar_search --count 2000` (threats S27).

A seeded generator nests, repeats and alternates regular expressions, grammars and schemas. One tenant sends each of
them, through the trial, to a real engine; another one has eight streams of plain text there all the while. Printed: how
many ended in which way, and the longest time between two tokens of those streams, alone and meanwhile, with the grammar
that was under way. The exit code is 1 if the engine refused what the trial took, if a stream failed, or if a gap was
longer than `--max-step-ms` and than twice the one alone.
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
from pathlib import Path
from typing import Any, Final

from semel.core import Prompt, Submission, Tenant, Timeline
from semel.errors import SemelError
from semel.testing.models import build
from tests.engine.engines import Start, running_as_worker
from tests.engine.parity import Rig
from tests.security.target import ENVIRONMENT

MALLORY, ALICE = (Tenant(name).prefix_salt for name in ("mallory", "alice"))
START: Final = Start("qwen2-vl", ("--max-model-len", "4096", "--max-num-seqs", "32"))
STREAMS: Final = 8
TOKENS: Final = 96
ALONE_S: Final = 5.0


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
        self.failures: list[str] = []
        self._under_way = ""
        self._numbers = itertools.count()

    async def stream(self) -> None:
        """Read plain text for ever, and note the longest time between two tokens."""
        while True:
            last = time.monotonic()
            async for _ in await self._submit(ALICE, 512):
                now = time.monotonic()
                if now - last > self.longest_s:
                    self.longest_s, self.longest_of = now - last, self._under_way
                last = now

    async def attempt(self, outputs: dict[str, Any], seed: int) -> None:
        """Send a grammar, and note how it ended."""
        self._under_way = json.dumps(outputs)
        try:
            async with asyncio.timeout(60):
                stream = await self._submit(MALLORY, TOKENS, structured_outputs=outputs, seed=seed)
                async for _ in stream:
                    pass
            self.ends["answered"] += 1
        except SemelError as error:
            said = str(error)
            self.ends[f"{type(error).__name__}: {said.partition(': ')[2][:60]}"] += 1
            if "the engine cannot compile it" in said or type(error).__name__ == "EngineFailed":
                self.failures.append(f"{said}: {self._under_way}")
        except TimeoutError:
            self.ends["not within 60 s"] += 1

    async def _submit(self, tenant: str | None, tokens: int, **sampling: Any) -> Any:
        fields = {"max_tokens": tokens, "ignore_eos": tenant == ALICE, "temperature": 1.0, **sampling}
        prompt = Prompt((1, 2, 3), Timeline.decoder(()), ())
        name = f"search-{next(self._numbers)}"
        return await self.rig.engine.submit(Submission(name, prompt, {}, fields, cache_salt=tenant))


async def main(arguments: argparse.Namespace) -> int:
    """Search, and print what was found."""
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        async with running_as_worker(START, build("qwen2-vl", Path(folder) / "model")) as rig:
            search = Search(rig)
            await search.attempt({"regex": "a"}, 0)
            streams = [asyncio.create_task(search.stream()) for _ in range(STREAMS)]
            await asyncio.sleep(1)
            search.longest_s, search.longest_of = 0.0, ""
            await asyncio.sleep(ALONE_S)
            alone_s, search.longest_s = search.longest_s, 0.0
            until, tried = time.monotonic() + arguments.seconds, 0
            while tried < arguments.count and time.monotonic() < until:
                await search.attempt(outputs_of(rng), tried)
                tried += 1
            search.failures += [repr(task.exception()) for task in streams if task.done() and not task.cancelled()]
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            totals = await rig.totals()
    said = f"{tried} of {arguments.count} with seed {arguments.seed}: {dict(search.ends.most_common())}"
    longest = f"longest gap {search.longest_s * 1e3:.0f} ms, alone {alone_s * 1e3:.0f} ms: {search.longest_of[:300]}"
    core = f"{totals.following_ns / 1e9:.1f} s of following, {totals.following_ended} ended in the engine core"
    print("\n".join([said, longest, core, *search.failures]))  # noqa: T201
    is_long = search.longest_s > max(arguments.max_step_ms / 1e3, 2 * alone_s)
    return int(is_long or bool(search.failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--seconds", type=float, default=3_600.0)
    parser.add_argument("--max-step-ms", type=float, default=250.0)
    os.environ |= ENVIRONMENT
    sys.exit(asyncio.run(main(parser.parse_args())))
