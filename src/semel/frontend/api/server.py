"""The shapes of what a frontend tells of itself. Types only."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

__all__ = [
    "Model",
    "ModelList",
    "Readiness",
    "Version",
]


class Model(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["semel"]
    max_model_len: int


class ModelList(TypedDict):
    """The models that are served: there is one."""

    object: Literal["list"]
    data: list[Model]


class Readiness(TypedDict):
    """Whether requests are served; if not, why."""

    ready: bool
    reason: str | None


class Version(TypedDict):
    """The version of semel."""

    version: str
