"""A hook around a method of vLLM's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["hook"]


def hook(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Let `around` stand for a method: it is passed the method itself, then what the method is called with.

    A method that has such a hook already keeps it, since vLLM loads its plug-ins several times in a process.
    """
    own = getattr(owner, name)
    if getattr(own, "is_hook", False):
        return

    @functools.wraps(own)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(own, *args, **kwargs)

    hooked.is_hook = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)
