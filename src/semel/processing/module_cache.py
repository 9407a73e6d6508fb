"""The folder into which transformers copies a model's code before it imports it.

Processes of one machine share it, and transformers does not lock it: one could import a file that another is writing.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["module_cache_lock"]

_LOCK: Final = ".semel.lock"


@contextmanager
def module_cache_lock() -> Iterator[None]:
    """Load code alone: no other process of semel on this machine does meanwhile."""
    from transformers.utils import HF_MODULES_CACHE

    folder = Path(HF_MODULES_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as file:  # closing it unlocks it, however the process ends
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
