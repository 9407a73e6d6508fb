"""Flags that one command takes for another: declared once, with the command that they are meant for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_type_hints

__all__ = ["as_arguments", "takes_flags_of"]

_Command = TypeVar("_Command", bound=Callable[..., None])


def takes_flags_of(other: Callable[..., None], *, but: Collection[str]) -> Callable[[_Command], _Command]:
    """Give a command the flags of another one, but for these; it gets their values by name, in its `**flags`."""

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        their_hints = get_type_hints(other, include_extras=True)
        theirs = [
            parameter.replace(annotation=their_hints[name], kind=parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(other).parameters.items()
            if name not in but
        ]
        signature: Any = inspect.Signature([*own, *theirs])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *theirs)}
        return command

    return decorate


def as_arguments(flags: Mapping[str, object]) -> list[str]:
    """The flags as they stand on a command line."""
    arguments: list[str] = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        match value:
            case None | False:
                continue
            case True:
                arguments.append(flag)
            case list() | tuple():
                arguments += [f"{flag}={one}" for one in value]
            case _:
                arguments.append(f"{flag}={value}")
    return arguments
