"""A pool process that loads while others work.

`python -m semel.processing.pool.preloaded_child FD [MEMORY] [json] [probes]`

Importing the libraries is nine tenths of loading and keeps a core busy for seconds, which on two cores took a third of
the pool's throughput. Here a thread of low priority imports them. Priority is a thread's own on Linux: the main thread,
which then serves as every pool process does, keeps that of the pool. A process that lowered its own could not raise it
again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from importlib import import_module
from typing import Final

from semel.processing.pool.child import main as serve
from semel.processing.probes.results import media_results

__all__ = ["main"]

_NICENESS: Final = 10  # about a tenth of what a thread gets that works beside it; all of a core that is idle
_LIBRARIES: Final = ("torch", "torchvision", "transformers.models.auto.processing_auto")


def main() -> None:
    """Import, then be a pool process."""
    importing = threading.Thread(target=_import_libraries)
    importing.start()
    importing.join()
    serve()


def _import_libraries() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):  # who needs it will say so
            import_module(name)
    if "probes" in sys.argv:
        with contextlib.suppress(ImportError):
            media_results()  # they are needed next, and need no model


if __name__ == "__main__":
    main()
