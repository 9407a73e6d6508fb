"""Python's interpreter in a process that serves: what it does of its own accord does not hold up the event loop."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from typing import Final

__all__ = ["map_large_blocks", "tune_interpreter"]

_GC_THRESHOLDS: Final = (10_000, 2, 50)
"""Thresholds of the collector. A request of 32,768 items makes so many objects that with Python's own 700 collections
would take a fifth of its time; with 50,000 each of them would take 24 ms of the event loop. What is new is walked after
10,000 objects, what stays once more after 30,000, and all of it after 1.5 million."""

_SWITCH_INTERVAL_S: Final = 0.0005
"""The time that others wait for a busy thread. The event loop gives way at every read of a socket and every random
number, and with Python's own 5 ms it waited for 50 ms when ten requests came at once."""

_M_MMAP_THRESHOLD: Final = -3
"""The number of this parameter in glibc's `malloc.h`."""

_MAPPED_BYTES: Final = 1 << 20


def tune_interpreter() -> None:
    """Let the collector leave alone what is loaded by now and run more seldom, let threads give way sooner, and let no
    block of memory be copied when it grows.

    What is loaded stays, and a collection need not walk it: with vLLM that takes 0.4 s of the event loop, several times
    during a request of 8,192 items.
    """
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    map_large_blocks()


def map_large_blocks() -> None:
    """Let the allocator map each large block on its own, so that a block that grows is never copied.

    glibc does that too, until the first large block is freed: from then on it takes blocks of up to that size, or
    32 MB, from its heap. There a body of 37 MB that comes piece by piece was copied when it outgrew 28 MB, and the
    event loop waited for 20 ms. Elsewhere than on glibc nothing changes.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
