"""The process in which grammars are compiled on trial, each in a fork of its own (threats S20).

What a grammar costs cannot be seen in its text: 40 bytes of schema can take 11 s of a CPU, and a thread that compiles
cannot be stopped. A fork can: it has so many seconds of a CPU, so many in all and so much memory, and then the system
ends it, even if nothing waits for it any more. Before a fork reads a client's text it enters the sandbox of processes
that decode media (S23). This process imports xgrammar and reads the tokenizer once, compiles nothing itself, and
reports how each fork ended. It ends when its pipe is closed. It imports neither vLLM nor anything that does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from semel.engine.vllm.grammars.walk import Vocabulary, walk
from semel.processing.sandbox import enter_sandbox
from semel.processing.sandbox.kernel import forbid_new_privileges

__all__ = ["HEADER", "PING", "REPLY", "Job", "Outcome", "Setup", "main"]

HEADER: Final = struct.Struct("<I")
"""In front of every message to this process: its bytes."""

REPLY: Final = struct.Struct("<QBB")
"""A reply: the number of a job, its `Outcome`, the bits of its size. Number 0 is of the process's own start."""

PING: Final = "ping"
"""The kind of a job that is answered at once."""

_OUTCOME_BITS: Final = 3
"""Of a fork's exit code; the others are those of the size of what was compiled."""

_NICENESS: Final = 5
"""The engine's steps go first."""

_WALK_TOKENS: Final = 512

_CRASHES: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals that the content of a grammar brings about; any other comes from outside."""


class Outcome(IntEnum):
    """The end of a trial. `DIED` and `LATE` say nothing about the grammar: killed, or too little CPU time."""

    COMPILED = 0
    REFUSED = 1
    TOO_LARGE = 2
    TOO_SLOW = 3
    """By CPU time."""

    DIED = 4
    LATE = 5
    EXPENSIVE = 6
    """To follow, by CPU time."""

    @property
    def is_verdict(self) -> bool:
        """True if another trial of the same grammar would end in the same way."""
        return self not in (Outcome.DIED, Outcome.LATE)


_OUTCOMES: Final[Mapping[int, Outcome]] = {
    signal.SIGPROF: Outcome.TOO_SLOW,
    signal.SIGVTALRM: Outcome.EXPENSIVE,
    signal.SIGALRM: Outcome.LATE,
    **dict.fromkeys(_CRASHES, Outcome.REFUSED),
}


class Setup(msgspec.Struct, frozen=True):
    """The limits and the vocabulary that all jobs share."""

    tokenizer: str
    """xgrammar's JSON of its `TokenizerInfo`."""

    any_whitespace: bool
    cpu_s: float
    wall_s: float
    memory_bytes: int
    """Bytes that a fork may take in addition to what it finds."""

    compiled_bytes: int
    """That a compiled grammar may have."""

    cache_bytes: int
    """Of the engine's cache of compiled grammars: with a cache xgrammar compiles in another way (threats S27)."""

    walk_s: float
    """CPU time to follow a grammar."""

    call_s: float
    """CPU time of one call of it, as in the engine core."""


class Job(msgspec.Struct, frozen=True):
    """A grammar to try."""

    number: int
    kind: str
    text: str


def main() -> None:
    """Serve the pipe whose descriptor is the last argument."""
    pipe = socket.socket(fileno=int(sys.argv[-1]))
    setup = msgspec.msgpack.decode(_read(pipe), type=Setup)

    import xgrammar

    tokenizer = xgrammar.TokenizerInfo.deserialize_json(setup.tokenizer)
    special = [*tokenizer.special_token_ids, *tokenizer.stop_token_ids]
    vocabulary = Vocabulary.from_tokens(tokenizer.decoded_vocab, special)
    with contextlib.suppress(OSError):  # a container may refuse it; each fork enters what layers there are
        forbid_new_privileges()
    pipe.sendall(REPLY.pack(0, Outcome.COMPILED, 0))
    forks: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            for event, _ in selector.select():
                if event.fileobj is not pipe:
                    selector.unregister(event.fileobj)
                    pid, number = forks.pop(event.fd)
                    os.close(event.fd)
                    pipe.sendall(REPLY.pack(number, *_outcome(os.waitpid(pid, 0)[1])))
                    continue
                job = msgspec.msgpack.decode(_read(pipe), type=Job)
                if job.kind == PING:
                    pipe.sendall(REPLY.pack(job.number, Outcome.COMPILED, 0))
                    continue
                if (pid := os.fork()) == 0:
                    pipe.close()  # or it would outlast this process, and nobody would see that it is gone
                    _try(xgrammar, tokenizer, vocabulary, setup, job)
                forks[descriptor := os.pidfd_open(pid)] = pid, job.number
                selector.register(descriptor, selectors.EVENT_READ)


def _try(xgrammar: Any, tokenizer: Any, vocabulary: Vocabulary, setup: Setup, job: Job) -> NoReturn:
    """Compile and follow it, in a fork, within its limits."""
    outcome, bits = Outcome.REFUSED, 0
    try:
        os.nice(_NICENESS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # xgrammar writes warnings about what clients sent
        signal.setitimer(signal.ITIMER_REAL, setup.wall_s)
        memory = _mapped_bytes() + setup.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        enter_sandbox(())
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
        compiler = xgrammar.GrammarCompiler(
            tokenizer, max_threads=1, cache_enabled=True, cache_limit_bytes=setup.cache_bytes
        )
        compiled = _compile(xgrammar, compiler, setup, job)
        is_large = compiled.memory_size_bytes > setup.compiled_bytes
        outcome = Outcome.TOO_LARGE if is_large else Outcome.COMPILED
        bits = 0 if is_large else compiled.memory_size_bytes.bit_length()
        if not is_large and not _follow(xgrammar, compiled, tokenizer, vocabulary, setup):
            outcome, bits = Outcome.EXPENSIVE, 0
    except MemoryError:
        outcome = Outcome.TOO_LARGE
    except BaseException as error:  # noqa: BLE001 - foreign code; whatever it is, a fork never returns into the loop
        outcome = Outcome.TOO_LARGE if "bad_alloc" in str(error) else Outcome.REFUSED
    finally:
        os._exit(outcome | bits << _OUTCOME_BITS)


def _compile(xgrammar: Any, compiler: Any, setup: Setup, job: Job) -> Any:
    """As vLLM's xgrammar backend compiles it."""
    match job.kind:
        case "json":
            separators = None if setup.any_whitespace else (",", ":")
            return compiler.compile_json_schema(job.text, any_whitespace=setup.any_whitespace, separators=separators)
        case "regex":
            return compiler.compile_regex(job.text)
        case "grammar":
            return compiler.compile_grammar(job.text)
        case "lark":
            return compiler.compile_lark(job.text)
    tag = json.loads(job.text)
    if "structures" not in tag:
        return compiler.compile_structural_tag(job.text)
    tags = [
        xgrammar.StructuralTagItem(begin=part["begin"], schema=json.dumps(part["schema"]), end=part["end"])
        for part in tag["structures"]
    ]
    return compiler.compile_structural_tag(tags, tag["triggers"])


def _follow(xgrammar: Any, compiled: Any, tokenizer: Any, vocabulary: Vocabulary, setup: Setup) -> bool:
    """Follow a grammar twice, within a CPU limit of its own; whether no call took too long."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, setup.walk_s)
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    return all(
        walk(
            *(xgrammar.GrammarMatcher(compiled), mask, vocabulary),
            tokens=_WALK_TOKENS,
            stays=stays,
            max_call_s=setup.call_s,
        )
        for stays in (True, False)
    )


def _outcome(status: int) -> tuple[Outcome, int]:
    """Read the end of a fork: the outcome, and the bits of the size of what was compiled."""
    if os.WIFSIGNALED(status):
        return _OUTCOMES.get(os.WTERMSIG(status), Outcome.DIED), 0
    bits, code = divmod(os.WEXITSTATUS(status), 1 << _OUTCOME_BITS)
    return (Outcome(code), bits) if code in tuple(Outcome) else (Outcome.DIED, 0)


def _read(pipe: socket.socket) -> bytes:
    (size,) = HEADER.unpack(_read_exactly(pipe, HEADER.size))
    return _read_exactly(pipe, size)


def _read_exactly(pipe: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = pipe.recv(min(size - len(parts), 1 << 20))
        if not part:
            sys.exit()
        parts += part
    return bytes(parts)


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
