"""Responses about the frontend itself: its models and its version. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from typing_extensions import TypedDict

__all__ = [
    "Model",
    "ModelList",
    "Version",
    "model_list",
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


class Version(TypedDict):
    """The version of semel."""

    version: str


def model_list(names: Iterable[str], max_tokens: int, created: int) -> ModelList:
    """The response of `/v1/models`."""
    models: list[Model] = [
        {"id": name, "object": "model", "created": created, "owned_by": "semel", "max_model_len": max_tokens}
        for name in names
    ]
    return {"object": "list", "data": models}
