"""The tools of a chat, and which of them the answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from semel.errors import InvalidRequest
from semel.frontend.api.shared.request_base import OpenModel

__all__ = ["Function", "NamedTool", "Tool", "ToolChoice", "chosen"]


class Function(OpenModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(OpenModel):
    """A tool; there are functions only."""

    type: Literal["function"] = "function"
    function: Function
    defer_loading: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it. Optional fields are filled in, so that equal tools give equal text."""
        optional = {"strict", "defer_loading"}
        function = self.function.model_dump(exclude=optional)
        function |= self.function.model_dump(include=optional, exclude_none=True)
        for_template: dict[str, Any] = {"type": self.type, "function": function}
        if self.defer_loading is not None:
            for_template |= {"defer_loading": self.defer_loading}
            function.setdefault("defer_loading", self.defer_loading)
        return for_template


class _Name(OpenModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(OpenModel):
    """The one function to call."""

    type: Literal["function"] = "function"
    function: _Name


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def chosen(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> str | Mapping[str, Any]:
    """The tool choice of a request, or its default. A chosen tool is always one of `tools`."""
    if tools is not None and not tools:
        raise InvalidRequest.of("tools", "must not be empty; leave it out")
    if choice is None:
        return "auto" if tools else "none"
    if choice != "none" and not tools:
        raise InvalidRequest.of("tool_choice", "there are no tools to choose from; send tools, or leave it out")
    if isinstance(choice, str):
        return choice
    if not any(tool.function.name == choice.function.name for tool in tools or ()):
        raise InvalidRequest.of("tool_choice", f"no tool has the name {choice.function.name[:64]!r}")
    return choice.model_dump()
