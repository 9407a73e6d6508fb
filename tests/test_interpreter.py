"""A buffer that grows piece by piece, as a body does, is never copied by the allocator of a process that serves."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

import pytest

pytestmark = pytest.mark.slow

MAX_SHARE = 1 / 2
"""Of the longest step without the setting, which is a copy: 1 ms of 18 to 23."""

PROGRAM = """
import sys, time
from semel.compose.interpreter import map_large_blocks

if sys.argv[1] == "mapped":
    map_large_blocks()
piece, longest = b"x" * 65_536, 0.0
for _ in range(4):
    decoded = bytes(28_000_000)  # as of the media of a body before: freeing it is what changes the allocator's mind
    del decoded
    bodies = bytearray(), bytearray()  # two come at once, and neither can grow into what is behind it
    while len(bodies[0]) < 37_000_000:
        for body in bodies:
            start = time.thread_time()
            body += piece
            longest = max(longest, time.thread_time() - start)
print(longest)
"""


def longest_step_s(how: str) -> float:
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, check=True, timeout=60)
    return float(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_body_that_grows_is_not_copied() -> None:
    pairs = [(longest_step_s("mapped"), longest_step_s("as it comes")) for _ in range(5)]
    assert median(mapped / usual for mapped, usual in pairs) <= MAX_SHARE, pairs
