"""Programs in a process of little memory: what they say, and how much they took. For attacks that need a victim."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

__all__ = ["Outcome", "confined"]

_FRAME = """
import io, resource, sys
import av, numpy as np
from PIL import Image, ImageSequence, PngImagePlugin
from semel.errors import MediaError
from semel.media import DecodeLimits, decode_audio, decode_image, decode_video
data = sys.stdin.buffer.read()

def used(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

def used_threads():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

def run():
{body}

resource.setrlimit(resource.RLIMIT_DATA, (used("VmData:") + {max_bytes},) * 2)
before = used("VmHWM:")
try:
    run()
    said = "done"
except (MediaError, MemoryError) as error:
    said = type(error).__name__
print(said, used("VmHWM:") - before)
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program."""

    said: str
    """`done`, or the error that ended it: MemoryError, or one of ours."""

    grown_bytes: int


def confined(body: str, data: bytes, *, max_bytes: int = 256 << 20) -> Outcome:
    """Run the body of a function, which finds the file in `data`, with so much memory on top of what it starts with."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    program = _FRAME.format(body=lines, max_bytes=max_bytes)
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said, grown = done.stdout.split()
    return Outcome(said.decode(), int(grown))
