"""What a request is before and after rendering, and the calls by which its features are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from semel.core import Digest, Feature, FeatureInfo, Item, Layout, Media, Prompt
from semel.errors import ServiceError
from semel.media import Pieces

__all__ = [
    "ComputeLayout",
    "Cut",
    "FeatureInfoOf",
    "MakeFeature",
    "ParsedRequest",
    "ProcessItem",
    "Rendered",
    "nothing_known",
]

MakeFeature = Callable[[Digest], Awaitable[Feature]]
"""Gives the feature of one item of a request: from the cache, or processed."""

FeatureInfoOf = Callable[[Digest], FeatureInfo | None]
"""Tells what is held of an item where the request is going; asking changes nothing."""


class ProcessItem(Protocol):
    """Makes an item's feature of its media and the request's `mm_processor_kwargs`, wherever that happens."""

    def __call__(
        self, media: Media, options: Mapping[str, object], /, *, group: Hashable | None = None
    ) -> Awaitable[Feature]:
        """The feature; `group` is whatever stands for the request, so that requests can take turns."""
        ...


class ComputeLayout(Protocol):
    """Tells the layout that an item's feature would have, wherever that happens, and makes no feature."""

    def __call__(
        self, media: Media, options: Mapping[str, object], /, *, group: Hashable | None = None
    ) -> Awaitable[Layout]:
        """The layout; `group` is as for `ProcessItem`."""
        ...


class Cut(Protocol):
    """Cuts a clip into pieces that an encoder takes, wherever that happens."""

    def __call__(self, media: Media, spend: Callable[[int], None], /) -> Awaitable[Pieces]:
        """The pieces; `spend` is told how many bytes they have before they are taken, and raises if they may not be."""
        ...


async def _is_assembled(_: Sequence[Layout]) -> Prompt:
    raise ServiceError("the prompt of this draft has been assembled already")


async def _cannot_make(digest: Digest) -> Feature:
    raise ServiceError(f"nothing is known of {digest!r} but its feature")


@dataclass(frozen=True, slots=True, eq=False)
class ParsedRequest:
    """A request that has been read: its items have digests, and nothing has been made of them yet."""

    items: tuple[Item, ...]
    media: Mapping[Digest, Media]
    """Of each item that differs."""

    options: Mapping[str, object]
    assemble: Callable[[Sequence[Layout]], Awaitable[Prompt]] = field(repr=False)
    """The prompt, once the layout of every item is known."""

    def assembled(self) -> ParsedRequest:
        """What is still needed of it once there is a prompt: each media once, to make its feature again."""
        return replace(self, assemble=_is_assembled)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the features of its items by digest, but for those that are held where it is going."""

    prompt: Prompt
    features: Mapping[Digest, Feature]
    make: MakeFeature = _cannot_make
    """For a feature that turns out not to be held."""


def nothing_known(_: Digest) -> FeatureInfo | None:
    """What is known of features where nobody is to be asked."""
    return None
