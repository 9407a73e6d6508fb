"""An engine's item cache without an engine, for the tests of injection: what they look at is what came to be held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from semel.core import Contract, Digest, Feature, Field, Layout, Target, Tensor

CONTRACT = Contract(
    model="tiny",
    fingerprint="f" * 16,
    target=Target("float32"),
    fields={"image": {"pixel_values": Field("uint8", (None,))}, "audio": {"samples": Field("uint8", (None,))}},
    max_items={"image": 8, "audio": 8},
    max_embeds=64,
    max_tokens=1024,
    cache_bytes=100,
)

OFF = "the engine's item cache is off"


@dataclass
class Store:
    """Holds whatever is injected and fits; fails on the digests that it is told to fail on."""

    contract: Contract = CONTRACT
    held: dict[Digest, Feature] = field(default_factory=dict)
    failures: Mapping[Digest, Exception] = field(default_factory=dict)
    resets: int = 0
    reason: str = OFF
    """Why it holds nothing, where it does not."""

    @classmethod
    def of(cls, cache_bytes: int) -> Store:
        return cls(replace(CONTRACT, cache_bytes=cache_bytes))

    @property
    def injection_refusal(self) -> str:
        return "" if self.contract.cache_bytes else self.reason

    def holds(self, digest: Digest) -> bool:
        return digest in self.held

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        if (failure := self.failures.get(digest)) is not None:
            raise failure
        if digest in self.held:
            return False
        self.held[digest] = feature
        return True

    async def reset(self) -> None:
        self.held.clear()
        self.resets += 1


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def image(nbytes: int, *, tokens: int = 2) -> Feature:
    return Feature(
        "image", {"pixel_values": Tensor("uint8", (nbytes,), memoryview(bytes(nbytes)))}, Layout((7,) * tokens)
    )


def clip(nbytes: int) -> Feature:
    return Feature("audio", {"samples": Tensor("uint8", (nbytes,), memoryview(bytes(nbytes)))}, Layout((9,)))


def wrong() -> Feature:
    """A feature that the contract refuses: its tensor has another dtype."""
    return Feature("image", {"pixel_values": Tensor("int8", (2,), memoryview(bytes(2)))}, Layout((7,)))
