"""A pool process that loads while others work.

`python -m semel.processing.pool.preloaded_child FD [MEMORY] [json] [probes]`

Importing the libraries is nine tenths of loading and keeps a core busy for seconds, which on two cores took a third of
the pool's throughput. Here a thread of low priority imports them, unless the process was forked from a fork server that
has. The main thread, which then serves as every pool process does, keeps the priority of the pool.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from semel.processing.pool.child import main as serve
from semel.processing.probes.results import media_results

__all__ = ["class_names", "import_libraries", "main", "run_in_background"]

_NICENESS: Final = 10  # about a tenth of what a thread gets that works next to it; all of a core that is idle

_LIBRARIES: Final = (
    "av",
    "pypdfium2_raw",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.PpmImagePlugin",
    "semel.processing.hf",
    "torch",
    "torchvision",
    "transformers.models.auto.processing_auto",
    "transformers.tokenization_mistral_common",  # is asked about each tokenizer
)
_CONFIGS: Final = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
_CLASS_KEYS: Final = (
    "feature_extractor_type",
    "image_processor_type",
    "processor_class",
    "tokenizer_class",
    "video_processor_type",
)


def import_libraries(folder: Path | None = None) -> None:
    """Import what every processor needs; with a model folder also the classes of transformers that it names."""
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):  # who needs it will say so
            import_module(name)
    if folder is not None:
        for name in class_names(folder):
            _import_class(name)


def class_names(folder: Path) -> Iterator[str]:
    """Yield the classes that a model folder's files name, of its processor and of the parts of it."""
    for name in _CONFIGS:
        with contextlib.suppress(OSError, ValueError):
            config = json.loads((folder / name).read_bytes())
            parts = [config, *config.values()] if isinstance(config, dict) else []
            yield from _named(part for part in parts if isinstance(part, dict))


def run_in_background(work: Callable[[], object]) -> None:
    """Run it in a thread of low priority, and wait for it.

    Priority is a thread's own on Linux, and ours stays as it is. A process that lowered its own could not raise it.
    """

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _named(parts: Iterator[dict[str, Any]]) -> Iterator[str]:
    for part in parts:
        yield from (part[key] for key in _CLASS_KEYS if isinstance(part.get(key), str))


def _import_class(name: str) -> None:
    with contextlib.suppress(Exception):  # foreign code, and a name from a file: loading the model will report it
        getattr(import_module("transformers"), name)


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
