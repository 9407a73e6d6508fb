"""A preprocessing process that was taken over: `python -m tests.security.captured_child FD [MEMORY]`.

All but the processor is shipped: the pipe, the limits, and the sandbox with the layers that `config.json` of the model
folder names. Whoever has taken it over then does what each item says: the name of an attempt, and its arguments.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from semel.core import Feature, Layout, Media, Tensor
from semel.processing.pool import child
from semel.processing.pool.pipe import Load
from semel.processing.processor import Processor
from semel.processing.sandbox import LAYERS, sandbox
from tests.security.attempts import ATTEMPTS
from tests.security.crashing_child import FaultyProcessor


class CapturedProcessor(FaultyProcessor):
    """Does what an item says, and tells how it went."""

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        del options
        name, arguments = json.loads(media.data)
        try:
            found, got = True, ATTEMPTS[name](**arguments)
        except OSError as error:
            found, got = False, str(error)
        data = msgspec.json.encode([found, got, os.getpid()])
        return Feature("image", {"got": Tensor("uint8", (len(data),), memoryview(data))}, Layout((7,) * 4))


STEPS = {
    "limits": "_limit_resources",
    "no_new_privs": "forbid_new_privileges",
    "landlock": "_restrict_files",
    "seccomp": "_restrict_calls",
}


def missing(*_: object) -> None:
    """A layer that the kernel does not have."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def load(load: Load) -> Processor:
    """In place of what loads a model."""
    signal.signal(signal.SIGURG, signal.SIG_IGN)
    child._limit_memory(load.max_memory_bytes)
    layers = json.loads((Path(load.folder) / "config.json").read_bytes())["layers"]
    for layer in {*LAYERS} - {*layers}:
        setattr(sandbox, STEPS[layer], missing)
    return CapturedProcessor()


def import_libraries(*_: Path) -> None:
    """There is no model, so a template has nothing to import."""


def main() -> None:
    """As shipped, but for what loads a model."""
    child._load = load
    child.main()


if __name__ == "__main__":
    main()
