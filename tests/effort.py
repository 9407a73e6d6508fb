"""How hard tests search: the whole of it in CI, a fifth while somebody waits for `scripts/check`.

`CI` in the environment says which, as most CI systems set it. What counts examples itself asks here.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["WHOLE", "examples"]

WHOLE: Final = os.environ.get("CI", "").lower() not in ("", "0", "false")


def examples(count: int) -> int:
    """How many of so many examples are tried: all of them in CI, else a fifth and at least ten."""
    return count if WHOLE else min(count, max(10, count // 5))
