"""A seccomp filter: from an architecture and rules to a program for the kernel. Nothing is called here.

The kernel runs the program before each system call. It reads the call's number and arguments and returns what becomes
of the call. Jumps go forwards only, and by 255 instructions at most; here none goes further than the end of its rule,
since each rule returns for the calls that it names.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from semel.processing.sandbox.rules import Rule, Word
from semel.processing.sandbox.syscalls import Architecture

__all__ = ["ALLOW", "KILL", "Instruction", "error_code", "filter_program", "packed"]

ALLOW: Final = 0x7FFF_0000
KILL: Final = 0x8000_0000
_ERROR: Final = 0x0005_0000

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
_IF_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_IF_GREATER: Final = 0x25  # BPF_JMP | BPF_JGT | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in what the kernel shows to a filter
_INSTRUCTION: Final = struct.Struct("=HBBI")


class Instruction(NamedTuple):
    """One instruction: what to do, how many to skip if a comparison holds, how many if not, and its operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


def error_code(error: int) -> int:
    """Return what a program returns for a call that fails with this error."""
    return _ERROR | error


def filter_program(architecture: Architecture, rules: Iterable[Rule]) -> tuple[Instruction, ...]:
    """Return the program that refuses what the rules say, and every call that is newer than they are."""
    program = [
        _load(_ARCHITECTURE),
        Instruction(_IF_EQUAL, 1, 0, architecture.audit),
        _return(KILL),  # calls of another architecture have other numbers
        _load(_NUMBER),
        Instruction(_IF_GREATER, 0, 1, architecture.last),
        _return(error_code(errno.ENOSYS)),
    ]
    for rule in rules:
        for name in rule.names:
            if (number := architecture.numbers.get(name)) is not None:
                body = tuple(_body(rule))
                program += [Instruction(_IF_EQUAL, 0, len(body), number), *body]
    return (*program, _return(ALLOW))


def packed(program: Sequence[Instruction]) -> bytes:
    """Return the program as the kernel reads it."""
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def _body(rule: Rule) -> Iterator[Instruction]:
    """Yield what decides on a call that the rule names: it always returns."""
    if rule.unless:
        for word in rule.unless:
            yield from (*_load_word(word), Instruction(_IF_EQUAL, 1, 0, word.value), _return(error_code(rule.error)))
        yield _return(ALLOW)
        return
    for word in rule.only_if:
        yield from (*_load_word(word), Instruction(_IF_EQUAL, 0, 1, word.value), _return(error_code(rule.error)))
    yield _return(ALLOW if rule.only_if else error_code(rule.error))


def _load_word(word: Word) -> Iterator[Instruction]:
    yield _load(_ARGUMENTS + 8 * word.argument + 4 * word.is_high)  # both architectures are little-endian
    if word.mask != 0xFFFF_FFFF:
        yield Instruction(_AND, 0, 0, word.mask)


def _load(offset: int) -> Instruction:
    return Instruction(_LOAD, 0, 0, offset)


def _return(code: int) -> Instruction:
    return Instruction(_RETURN, 0, 0, code)
