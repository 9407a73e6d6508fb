"""The two intents of rendering (requirement E1)."""

from __future__ import annotations

from typing import Literal

__all__ = ["Intent"]

Intent = Literal["execute", "inspect"]
"""`execute`: the result goes to an engine, and uses the feature cache and its counters. `inspect`: the result is only
returned, by a second path that changes nothing which `execute` can see. The default is `execute`.
"""
