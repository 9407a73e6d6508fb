"""A pool process that loads while others work.

`python -m semel.processing.pool.preloaded_child FD [MEMORY] [json] [probes]`

Importing the libraries is nine tenths of loading and keeps a core busy for seconds, which on two cores took a third of
the pool's throughput. Here a thread of low priority imports them, unless the process was forked from a fork server that
has. The main thread, which then serves as every pool process does, keeps the priority of the pool.
"""

from __future__ import annotations

import contextlib
import sys

from semel.processing.pool.child import main as serve
from semel.processing.pool.libraries import import_libraries, run_in_background
from semel.processing.probes.results import media_results

__all__ = ["import_libraries", "main"]


def main() -> None:
    """Import, then be a pool process."""
    run_in_background(_prepare)
    serve()


def _prepare() -> None:
    import_libraries()
    if "probes" in sys.argv:
        with contextlib.suppress(ImportError):
            media_results()  # they are needed next, and need no model


if __name__ == "__main__":
    main()
