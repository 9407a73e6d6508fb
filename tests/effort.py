"""How hard tests search: twice as hard in CI as while somebody waits for `scripts/check`, five times at night.

`CI` in the environment says which, as most CI systems set it; `SEMEL_SEARCH` is the factor itself. What counts examples
itself asks here.
"""

from __future__ import annotations

import os
from typing import Final

MAX_FACTOR: Final = 5
_IS_CI: Final = os.environ.get("CI", "").lower() not in ("", "0", "false")
FACTOR: Final = min(MAX_FACTOR, int(os.environ.get("SEMEL_SEARCH") or (2 if _IS_CI else 1)))


def examples(count: int, least: int = 10) -> int:
    """How many of so many examples are tried: a fifth for each step of the factor, and at least so many."""
    return min(count, max(least, count * FACTOR // MAX_FACTOR))
