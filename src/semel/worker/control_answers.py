"""The answers of the routes for RL, in the shapes of vLLM's server."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

__all__ = [
    "Aborted",
    "Asleep",
    "Awake",
    "Checksums",
    "Compared",
    "Message",
    "Paused",
    "Results",
    "Size",
    "Sleeping",
    "State",
    "Success",
    "Versioned",
    "Weights",
]


class State(TypedDict):
    """What the engine does now."""

    status: Literal["paused", "resumed", "kv_cache_released", "reset"]


class Aborted(TypedDict):
    """Requests were ended."""

    status: Literal["aborted"]
    aborted: int


class Paused(TypedDict):
    """Whether the engine makes no steps."""

    is_paused: bool


class Asleep(TypedDict):
    """The engine sleeps."""

    status: Literal["sleeping"]
    level: int


class Awake(TypedDict):
    """What the engine does now, and what was woken up."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None


class Sleeping(TypedDict):
    """Whether the engine sleeps, at any level."""

    is_sleeping: bool


class Message(TypedDict):
    """A step of a weight transfer is done."""

    message: str


class Versioned(TypedDict):
    """The weights have another name."""

    success: Literal[True]
    new_version: str


class Weights(TypedDict):
    """The name of the weights."""

    weight_version: str


class Checksums(TypedDict):
    """The checksum of each parameter, by worker process and name."""

    checksums: dict[str, str]


class Compared(TypedDict):
    """Whether the checksums are those of the baseline, and which are not."""

    match: bool
    mismatches: list[str]


class Size(TypedDict):
    """The number of worker processes."""

    world_size: int


class Success(TypedDict):
    """The prefixes are forgotten."""

    success: Literal[True]


class Results(TypedDict):
    """What each worker process returned."""

    results: list[object]
