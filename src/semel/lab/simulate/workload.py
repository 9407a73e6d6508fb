"""Workloads of a simulated fleet: requests with their images, in order of time. The same seed asks the same.

A workload is a script (what a conversation shows from turn to turn) and the traffic (how many begin, when, of whom).
Conversations have no memory of their length: each goes on after a turn with the same chance. So a run can begin with as
many as there would be, and has its full rate from the first second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from math import exp, inf, pi, sin
from random import Random
from typing import Final, Protocol

from semel.core import Digest
from semel.lab.bench.image_sizes import draw_size, tokens_of

__all__ = [
    "Ask",
    "Catalogue",
    "Chats",
    "Documents",
    "Item",
    "Screens",
    "Script",
    "Talks",
    "Traffic",
    "Viral",
    "Workload",
    "digest_of",
    "image",
    "zipf",
]

_TOKEN_BYTES: Final = 4 * 1_176
"""Of a feature: that of 1024×1024 pixels has 6,439,776 bytes and 1,369 tokens, measured with Qwen2-VL."""

_SYSTEM_TOKENS: Final = 200
_TURN_TOKENS: Final = 60
_NEW: Final = 1 << 40
"""Keys of items that are shown for the first time begin here; those of a catalogue begin at 0."""

_VIRAL: Final = 1 << 39
_KEPT: Final = 1 << 17
"""Items and digests that are not made again: those of the conversations that go on."""


@dataclass(frozen=True, slots=True)
class Item:
    """An image."""

    key: int
    """Equal keys are equal bytes."""

    width: int
    height: int
    tokens: int
    nbytes: int
    """Of its features."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    at_s: float
    tenant: str
    conversation: int
    items: tuple[Item, ...]
    """All items of the prompt, those of earlier turns first."""

    prompt_tokens: int
    """Of the whole prompt, its items included."""

    answer_tokens: int


class Workload(Protocol):
    """A source of requests."""

    def asks(self, rng: Random) -> Iterator[Ask]:
        """Return the requests, in order of time."""
        ...


@lru_cache(_KEPT)
def digest_of(tenant: str, key: int) -> Digest:
    """Return the digest of an item: of each tenant another, as semel's are."""
    return Digest(blake2b(f"{tenant}/{key}".encode(), digest_size=Digest.size).digest())


@lru_cache(_KEPT)
def image(key: int, size: tuple[int, int] | None = None) -> Item:
    """Return the image with this key: always of the same size, one that users send, unless another is given."""
    width, height = size or draw_size(Random(key))
    tokens = tokens_of(width, height)
    return Item(key, width, height, tokens, tokens * _TOKEN_BYTES)


class Script(Protocol):
    """The images of a conversation."""

    @property
    def turns(self) -> float:
        """Return how many it has, on average."""
        ...

    @property
    def think_s(self) -> float:
        """From one turn to the next, on average."""
        ...

    def show(self, items: tuple[Item, ...], at_s: float, new: Iterator[int], rng: Random) -> tuple[Item, ...]:
        """The items of the next turn's prompt, given those of the last one. `new` are keys that nobody has shown."""
        ...


@cache
def _cumulated(count: int, skew: float) -> Sequence[float]:
    return list(accumulate((rank + 1) ** -skew for rank in range(count)))


def zipf(count: int, skew: float, rng: Random) -> int:
    """Return a number below `count`: the lower, the more often."""
    cumulated = _cumulated(count, skew)
    return min(bisect_left(cumulated, rng.random() * cumulated[-1]), count - 1)


@dataclass(frozen=True)
class Catalogue:
    """Single questions about one image of a catalogue: a few are asked about most."""

    images: int = 20_000
    skew: float = 0.9
    size: tuple[int, int] | None = None
    turns: float = 1.0
    think_s: float = 0.0

    def show(self, items: tuple[Item, ...], at_s: float, new: Iterator[int], rng: Random) -> tuple[Item, ...]:  # noqa: ARG002
        """Show one image."""
        return (image(zipf(self.images, self.skew, rng), self.size),)


@dataclass(frozen=True)
class Chats:
    """Conversations: most turns bring an image, which is a new one or one of a catalogue."""

    turns: float = 6.0
    think_s: float = 8.0
    images_per_turn: float = 0.6
    new_share: float = 0.7
    images: int = 20_000
    skew: float = 0.9
    size: tuple[int, int] | None = None

    def show(self, items: tuple[Item, ...], at_s: float, new: Iterator[int], rng: Random) -> tuple[Item, ...]:
        """Show one image more, or none."""
        if rng.random() >= self.images_per_turn:
            return items
        return (*items, image(self._key(at_s, new, rng), self.size))

    def _key(self, at_s: float, new: Iterator[int], rng: Random) -> int:  # noqa: ARG002
        return next(new) if rng.random() < self.new_share else zipf(self.images, self.skew, rng)


@dataclass(frozen=True)
class Viral(Chats):
    """The same, and for a while many of the images that would be new are one and the same."""

    at_s: float = 5.0
    for_s: float = 15.0
    share: float = 0.3

    def _key(self, at_s: float, new: Iterator[int], rng: Random) -> int:
        key = Chats._key(self, at_s, new, rng)
        is_viral = key >= _NEW and self.at_s <= at_s < self.at_s + self.for_s and rng.random() < self.share
        return _VIRAL if is_viral else key


@dataclass(frozen=True)
class Screens:
    """Agents: every turn brings a new screenshot, and the prompt has the last ones."""

    turns: float = 25.0
    think_s: float = 4.0
    window: int = 10
    size: tuple[int, int] = (1280, 720)

    def show(self, items: tuple[Item, ...], at_s: float, new: Iterator[int], rng: Random) -> tuple[Item, ...]:  # noqa: ARG002
        """Show one screen more, and drop the oldest out of the window."""
        return (*items, image(next(new), self.size))[-self.window :]


@dataclass(frozen=True)
class Documents:
    """Questions about a document: all of its pages are shown from the first turn on."""

    turns: float = 4.0
    think_s: float = 20.0
    pages: int = 8
    documents: int = 2_000
    skew: float = 0.8
    size: tuple[int, int] = (1240, 1754)

    def show(self, items: tuple[Item, ...], at_s: float, new: Iterator[int], rng: Random) -> tuple[Item, ...]:  # noqa: ARG002
        """Show all pages of one document."""
        if items:
            return items
        first = zipf(self.documents, self.skew, rng) * self.pages
        return tuple(image(first + page, self.size) for page in range(self.pages))


@dataclass(frozen=True)
class Traffic:
    """The rate of requests, and their tenants."""

    rate: float
    """Requests a second, on average over a day."""

    seconds: float
    tenants: int = 1
    tenant_skew: float = 1.0
    peak: float = 1.0
    """The rate of the busiest moment over that of the mean. The logarithm of the rate is a sine over the day."""

    day_s: float = 86_400.0
    begin_s: float = 0.0
    """The time of day at which a run begins: 0 is the quietest moment."""

    answer_tokens: int = 100
    answer_spread: float = 0.5
    """Sigma of their lognormal lengths."""

    def rate_at(self, at_s: float) -> float:
        """Requests a second at a moment."""
        if not (sharpness := _sharpness(self.peak)):
            return self.rate
        wave = sin(2 * pi * (at_s + self.begin_s) / self.day_s - pi / 2)
        return self.rate * exp(sharpness * wave) / _bessel(sharpness)


@dataclass(slots=True)
class _Talk:
    number: int
    tenant: str
    items: tuple[Item, ...] = ()
    text_tokens: int = _SYSTEM_TOKENS


@dataclass(frozen=True)
class Talks:
    """A script under some traffic: a workload."""

    script: Script
    traffic: Traffic

    def asks(self, rng: Random) -> Iterator[Ask]:
        """Yield the turns of all conversations, in order of time."""
        script, traffic = self.script, self.traffic
        new, numbers = count(_NEW), count()

        def begin() -> _Talk:
            return _Talk(next(numbers), f"tenant-{zipf(traffic.tenants, traffic.tenant_skew, rng)}")

        going_on = traffic.rate_at(0.0) * script.think_s * (1.0 - 1.0 / script.turns)
        due = [(rng.random() * _think_s(script, rng), begin()) for _ in range(round(going_on))]
        turns = [(at_s, talk.number, talk) for at_s, talk in due]
        heapify(turns)
        begins = _arrivals(traffic, script.turns, rng)
        next_begin = next(begins, inf)
        while True:
            if turns and turns[0][0] <= next_begin:
                at_s, _, talk = heappop(turns)
            else:
                at_s, talk, next_begin = next_begin, begin(), next(begins, inf)
            if at_s >= traffic.seconds:
                return
            yield self._turn(talk, at_s, new, rng)
            if rng.random() >= 1.0 / script.turns:
                heappush(turns, (at_s + _think_s(script, rng), talk.number, talk))

    def _turn(self, talk: _Talk, at_s: float, new: Iterator[int], rng: Random) -> Ask:
        traffic = self.traffic
        talk.items = self.script.show(talk.items, at_s, new, rng)
        talk.text_tokens += _TURN_TOKENS
        length = traffic.answer_tokens * rng.lognormvariate(-(traffic.answer_spread**2) / 2, traffic.answer_spread)
        answer_tokens = max(1, round(length))
        prompt_tokens = talk.text_tokens + sum(item.tokens for item in talk.items)
        talk.text_tokens += answer_tokens
        return Ask(at_s, talk.tenant, talk.number, talk.items, prompt_tokens, answer_tokens)


def _think_s(script: Script, rng: Random) -> float:
    return rng.uniform(0.5, 1.5) * script.think_s


def _arrivals(traffic: Traffic, turns: float, rng: Random) -> Iterator[float]:
    """Yield when conversations begin: a Poisson process, thinned where the day is quieter."""
    highest = traffic.rate * traffic.peak / turns
    at_s = 0.0
    while at_s < traffic.seconds:
        at_s += rng.expovariate(highest)
        if traffic.peak == 1.0 or rng.random() * traffic.peak * traffic.rate < traffic.rate_at(at_s):
            yield at_s


@cache
def _sharpness(peak: float) -> float:
    """Return the amplitude of the logarithm's sine for which the peak is so many times the mean."""
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exp(middle) / _bessel(middle) < peak else (low, middle)
    return 0.0 if peak <= 1.0 else low


def _bessel(x: float) -> float:
    """Return the mean of exp(x·sin) over a period."""
    total = term = 1.0
    for k in range(1, 200):
        term *= (x / 2 / k) ** 2
        total += term
        if term < 1e-12 * total:
            break
    return total
