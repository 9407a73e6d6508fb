"""What a process that serves does to its interpreter, undone for the tests after."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored_interpreter() -> Iterator[None]:
    """Undo what `tune_interpreter` did, except to the allocator, which cannot be asked."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
