"""Programs in a process of little memory: what they say, and how much they took. For attacks that need a victim."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

_DEADLINE_S = 60
_SERVER = """
import ctypes, io, json, os, resource, signal, sys
import av, numpy as np
from PIL import Image, ImageSequence, PngImagePlugin
from semel.errors import MediaError
from semel.media import DecodeLimits, decode_audio, decode_image, decode_video

def used(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

def used_threads():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

def map_libraries():
    # Every page of code is in memory before the count begins: which of them a run touches is not its growth.
    populate_read, madvise = 22, ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as lines:
        ranges = [line.split()[0].split("-") for line in lines if line.rstrip().endswith(".so") or ".so." in line]
    for start, end in ranges:
        start, end = int(start, 16), int(end, 16)
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), populate_read)

def answer(order, data, reply):
    names = {**globals(), "data": data}
    code = compile(order["body"], "confined", "exec")
    resource.setrlimit(resource.RLIMIT_DATA, (used("VmData:") + order["max_bytes"],) * 2)
    map_libraries()
    before = used("VmHWM:")
    try:
        exec(code, names)
        said = "done"
    except (MediaError, MemoryError) as error:
        said = type(error).__name__
    names.clear()
    os.write(reply, f"{said} {used('VmHWM:') - before}".encode())

while line := sys.stdin.buffer.readline():
    order = json.loads(line)
    data = sys.stdin.buffer.read(order["nbytes"])
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        signal.alarm(order["deadline_s"])
        try:
            answer(order, data, theirs)
            os._exit(0)
        except BaseException as error:
            os.write(theirs, repr(error).encode())
        os._exit(1)
    os.close(theirs)
    with open(ours, "rb") as reply:
        said = reply.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, said]), flush=True)
"""
"""Imports once, and forks for each program."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program."""

    said: str
    """`done`, or the error that ended it: MemoryError, or one of ours."""

    grown_bytes: int


@cache
def _server() -> subprocess.Popen[bytes]:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.kill)
    return server


def confined(body: str, data: bytes, *, max_bytes: int = 256 << 20) -> Outcome:
    """Run the body of a program, which finds the file in `data`, with so much memory on top of what it starts with."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    order = {"body": body.strip(), "nbytes": len(data), "max_bytes": max_bytes, "deadline_s": _DEADLINE_S}
    server.stdin.write(json.dumps(order).encode() + b"\n" + data)
    server.stdin.flush()
    status, said = json.loads(server.stdout.readline())
    assert status == 0, said
    word, grown = said.split()
    return Outcome(word, int(grown))
