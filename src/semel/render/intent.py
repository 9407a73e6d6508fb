"""Why a request is rendered (requirement E1)."""

from __future__ import annotations

from typing import Literal

__all__ = ["Intent"]

Intent = Literal["execute", "inspect"]
"""`execute`: the result goes to an engine, over the main cache and its counters. `inspect`: somebody only looks, over a
second path that changes nothing which `execute` can see. Who names none means `execute`."""
