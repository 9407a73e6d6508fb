"""Sixteen requests that tell whether two servers answer alike: eight one after another, then eight at a time.

Bare vLLM and `semel serve` under the same flags must answer each with the same tokens. The requests have what caches
and batches can get wrong: a new image, it again, it with another text, a large one, two in one prompt, none.

    python -m tools.engine.sixteen http://127.0.0.1:8000                        # print the answers of a server
    python -m tools.engine.sixteen http://127.0.0.1:8000 http://127.0.0.1:8001  # and where a second one differs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import httpx
import numpy as np

from tests.engine.parity import Chat, draw_image, image_part

__all__ = ["SIXTEEN", "Probe", "ProbeAnswer", "ask_sixteen", "differences"]

_SMALL: Final = 224
_LARGE: Final = 1024
_MAX_TOKENS: Final = 24
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class Probe:
    """One request: the sides and the seeds of its images, and its text."""

    name: str
    images: tuple[tuple[int, int], ...]
    text: str

    @property
    def chat(self) -> Chat:
        """Its messages."""
        parts = [image_part(_image(side, seed)) for side, seed in self.images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]


@dataclass(frozen=True)
class ProbeAnswer:
    """What a server answered: tokens and their log probabilities, or why it did not."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    fault: str = ""


def _eight(series: str, seed: int) -> tuple[Probe, ...]:
    small, large, second = (_SMALL, seed), (_LARGE, seed + 1), (_SMALL, seed + 2)
    return (
        Probe(f"{series}: an image", (small,), "what is in this picture?"),
        Probe(f"{series}: the same again", (small,), "what is in this picture?"),
        Probe(f"{series}: the same, another text", (small,), "tell me more about red"),
        Probe(f"{series}: a large image", (large,), "what is in this picture?"),
        Probe(f"{series}: the large one again", (large,), "what is in this picture?"),
        Probe(f"{series}: the large one, another text", (large,), "tell me more about red"),
        Probe(f"{series}: two images", (small, second), "what is in this picture?"),
        Probe(f"{series}: text", (), "tell me more about this picture, 12 red"),
    )


SIXTEEN: Final = (*_eight("one by one", 1), *_eight("at a time", 11))
"""The second eight have images of their own, so that they are new when all eight come at once."""


async def ask_sixteen(
    url: str, *, max_tokens: int = _MAX_TOKENS, timeout_s: float = _TIMEOUT_S, probes: Sequence[Probe] = SIXTEEN
) -> list[ProbeAnswer]:
    """The answers of a server to the first half of the probes one after another, and to the others at a time."""
    half = len(probes) // 2
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s) as client:
        answers = [await _ask(client, probe, max_tokens) for probe in probes[:half]]
        return answers + await asyncio.gather(*(_ask(client, probe, max_tokens) for probe in probes[half:]))


async def _ask(client: httpx.AsyncClient, probe: Probe, max_tokens: int) -> ProbeAnswer:
    body = {
        "messages": probe.chat,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
    }
    try:
        reply = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return ProbeAnswer(fault=repr(error))
    if reply.status_code != 200:
        return ProbeAnswer(fault=f"{reply.status_code} {reply.text[:300]}")
    choice: dict[str, Any] = reply.json()["choices"][0]
    logprobs = tuple(float(step["logprob"]) for step in choice["logprobs"]["content"])
    return ProbeAnswer(tuple(choice["token_ids"]), logprobs)


def differences(
    expected: Sequence[ProbeAnswer],
    actual: Sequence[ProbeAnswer],
    *,
    probes: Sequence[Probe] = SIXTEEN,
    logprobs_within: float | None = None,
) -> list[str]:
    """A line for every probe that was not answered alike; log probabilities count if a tolerance is named.

    A request that neither side answered is a difference: it compares nothing.
    """
    lines = []
    for probe, one, other in zip(probes, expected, actual, strict=True):
        if one.fault or other.fault:
            lines.append(f"{probe.name}: {one.fault or 'answered'} / {other.fault or 'answered'}")
        elif one.token_ids != other.token_ids:
            lines.append(f"{probe.name}: tokens {list(one.token_ids)} / {list(other.token_ids)}")
        elif logprobs_within is not None and not _near(one.logprobs, other.logprobs, logprobs_within):
            lines.append(f"{probe.name}: log probabilities {list(one.logprobs)} / {list(other.logprobs)}")
    return lines


def _near(one: Sequence[float], other: Sequence[float], within: float) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= within for a, b in zip(one, other, strict=True))


@cache
def _image(side: int, seed: int) -> bytes:
    return draw_image(np.random.default_rng(seed), side=side)


def main() -> None:
    """Ask one server, and a second one if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS)
    options = parser.parse_args()
    first, *others = [asyncio.run(ask_sixteen(url, max_tokens=options.max_tokens)) for url in options.url]
    for probe, answer in zip(SIXTEEN, first, strict=True):
        sys.stdout.write(f"{probe.name}: {answer.fault or json.dumps(answer.token_ids)}\n")
    wrong = [line for other in others for line in differences(first, other)]
    sys.stdout.write("".join(f"differs: {line}\n" for line in wrong))
    sys.exit(bool(wrong) or any(answer.fault for answer in first))


if __name__ == "__main__":
    main()
