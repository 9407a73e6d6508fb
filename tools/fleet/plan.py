"""What a load asks, decided beforehand: pure functions of a seed, so that a load can be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from tests.engine.parity import draw_image
from tests.serve.served import image_url

Chat = tuple[int, ...]
"""The images that a chat shows, by number."""

SIDE: Final = 56
TOKENS: Final = 4
GOOD: Final[Mapping[str, object]] = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
LONG: Final[Mapping[str, object]] = {"max_tokens": 200, "ignore_eos": True, "stream": True}

REFUSALS: Final[tuple[Mapping[str, object], ...]] = (
    {"logprobs": True, "top_logprobs": 20},
    {"min_tokens": 50},
    {"logit_bias": {"9999999": 1.0}},
    {"stop_token_ids": [9_999_999]},
    {"repetition_penalty": 0.0},
)
"""What the engine refuses, and only the engine knows to."""


class Kind(Enum):
    """What becomes of a request."""

    GOOD = "good"
    STREAMED = "streamed to its end"
    REFUSED = "refused"
    LEFT_EARLY = "left with the first event"
    LEFT_AT_ONCE = "left with the body sent"


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked, and of what kind."""

    requests: int
    images: int = 120
    pairs: int = 24
    """How many different chats show two images; every one of them is asked as often as a popular image."""

    paired: float = 0.1
    refused: float = 0.1
    aborted: float = 0.1
    at_once: float = 1 / 3
    """The share of the aborted ones that leave as soon as they have sent their body."""

    at_a_time: int = 16
    seed: int = 0

    def chats(self) -> list[Chat]:
        """All that may be asked, whatever the seed: every image alone, then the pairs."""
        rng = np.random.default_rng([self.images, self.pairs])
        pairs = {tuple(map(int, rng.choice(self.images, 2, replace=False))) for _ in range(self.pairs)}
        return [(image,) for image in range(self.images)] + sorted(pairs)


@dataclass(frozen=True, slots=True)
class Repeats:
    """Requests for one image each, most of which have been asked for before: none is aborted or refused."""

    requests: int
    repeats: float = 0.8
    streamed: float = 0.0
    tokens: int = TOKENS
    """Of every answer."""

    at_a_time: int = 8
    burst: float = 0.0
    """The share of repeats that show the newest image: they come while it is new to the other frontends."""

    seed: int = 0

    @property
    def images(self) -> int:
        """How many different ones are asked for: exactly the share that is no repeat."""
        return max(1, round(self.requests * (1 - self.repeats)))

    def chats(self) -> list[Chat]:
        """Every image alone."""
        return [(image,) for image in range(self.images)]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    chat: Chat
    frontend: int
    kind: Kind = Kind.GOOD
    fields: int = 0
    """Which of the refusals, if it is to be refused."""

    tokens: int = TOKENS
    """How long a good answer is."""


def plan(load: Load, frontends: int) -> list[Ask]:
    """The requests of a load in order. Popular images are asked for often, and no two loads alike by chance."""
    rng = np.random.default_rng([load.seed, 2])
    chats = load.chats()
    alone, pairs = chats[: load.images], chats[load.images :]
    weights = 1 / np.arange(1, load.images + 1) ** 0.8
    ranks = rng.choice(rng.permutation(load.images), load.requests, p=weights / weights.sum())
    asks = []
    for image in ranks:
        is_pair = bool(pairs) and rng.random() < load.paired
        chat = pairs[int(rng.integers(len(pairs)))] if is_pair else alone[int(image)]
        asks.append(Ask(chat, int(rng.integers(frontends)), _kind(load, rng), int(rng.integers(len(REFUSALS)))))
    return asks


def plan_repeats(load: Repeats, frontends: int) -> list[Ask]:
    """The requests of a load in order: new images among repeats of those before, of which some are popular."""
    rng = np.random.default_rng([load.seed, 4])
    new = {0, *map(int, rng.choice(np.arange(1, load.requests), load.images - 1, replace=False))}
    popularity = rng.permutation(1 / np.arange(1, load.images + 1) ** 0.8)
    asks: list[Ask] = []
    seen = 0
    for turn in range(load.requests):
        if turn in new:
            image, seen = seen, seen + 1
        elif load.burst and rng.random() < load.burst:
            image = seen - 1
        else:
            image = int(rng.choice(seen, p=popularity[:seen] / popularity[:seen].sum()))
        kind = Kind.STREAMED if rng.random() < load.streamed else Kind.GOOD
        asks.append(Ask((image,), int(rng.integers(frontends)), kind, tokens=load.tokens))
    return asks


def _kind(load: Load, rng: np.random.Generator) -> Kind:
    drawn = rng.random()
    if drawn < load.refused:
        return Kind.REFUSED
    if drawn < load.refused + load.aborted:
        return Kind.LEFT_AT_ONCE if rng.random() < load.at_once else Kind.LEFT_EARLY
    return Kind.GOOD


def draw_images(count: int, *, seed: int = 0) -> list[bytes]:
    """So many different images, all of one size."""
    rng = np.random.default_rng([seed, 3])
    return [draw_image(rng, side=SIDE) for _ in range(count)]


def body_of(ask: Ask, images: Sequence[bytes]) -> bytes:
    """What is sent for a request."""
    content: list[dict[str, Any]] = [image_url(images[image]) for image in ask.chat]
    content.append({"type": "text", "text": "what is in this picture?"})
    fields: Mapping[str, object]
    match ask.kind:
        case Kind.GOOD | Kind.STREAMED:
            streams = {"stream": True} if ask.kind is Kind.STREAMED else {}
            fields = {"max_tokens": ask.tokens, **GOOD, **streams}
        case Kind.REFUSED:
            fields = {"max_tokens": TOKENS, **REFUSALS[ask.fields]}
        case Kind.LEFT_EARLY | Kind.LEFT_AT_ONCE:
            fields = LONG
    return json.dumps({"messages": [{"role": "user", "content": content}], "temperature": 0.0, **fields}).encode()
