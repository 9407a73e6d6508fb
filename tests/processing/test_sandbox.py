"""The sandbox of pool processes: the filter against a plain reading of its rules, and what the kernel makes of it."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.cli.checks.host import check_sandbox
from semel.errors import ConfigError
from semel.processing.sandbox import LAYERS, Sandbox, check_whole, kernel_sandbox
from semel.processing.sandbox.rules import Rule, Word, rules_for
from semel.processing.sandbox.sandbox import readable_paths
from semel.processing.sandbox.seccomp import ALLOW, KILL, Instruction, error_code, filter_program
from semel.processing.sandbox.syscalls import AARCH64, ARCHITECTURES, X86_64, Architecture

PID = 4_242
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
NEWER = {"fchmodat2", "statmount", "listmount"}
"""Calls that headers of distributions do not have yet."""


class Call(NamedTuple):
    """A system call, as a filter sees it."""

    audit: int
    number: int
    arguments: tuple[int, ...]

    def word(self, offset: int) -> int:
        if offset in (0, 4):
            return (self.number, self.audit)[offset // 4]
        argument, half = divmod(offset - 16, 8)
        return self.arguments[argument] >> (8 * half) & 0xFFFF_FFFF


def run(program: Sequence[Instruction], call: Call) -> int:
    """What the kernel's machine makes of a call: an accumulator and jumps forwards."""
    at = accumulator = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        match code:
            case 0x20:
                accumulator = call.word(operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                at += if_true if accumulator == operand else if_false
            case 0x25:
                at += if_true if accumulator > operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"no such instruction: {code:#x}")


def holds(word: Word, call: Call) -> bool:
    half = call.arguments[word.argument] >> (32 if word.is_high else 0) & 0xFFFF_FFFF
    return half & word.mask == word.value


def read(architecture: Architecture, rules: Sequence[Rule], call: Call) -> int:
    """The rules, read by a person: slow, and obviously right."""
    if call.audit != architecture.audit:
        return KILL
    if call.number > architecture.last:
        return error_code(errno.ENOSYS)
    for rule in rules:
        if call.number not in [architecture.numbers.get(name) for name in rule.names]:
            continue
        if rule.unless and all(holds(word, call) for word in rule.unless):
            return ALLOW
        if rule.only_if and not any(holds(word, call) for word in rule.only_if):
            return ALLOW
        return error_code(rule.error)
    return ALLOW


numbers = st.one_of(st.integers(0, 470), st.sampled_from([2**30, 2**30 + 57, 2**32 - 1]))
values = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from(
        [0, 1, 2, 8, 10, 15, PID, 2**32 | PID, 0x5412, 0x1_5412, 0x10000, 0x1_0000_0000, 0x3D0F00, 0x21, 0x22, 0o1000]
    ),
)
calls = st.builds(
    Call,
    st.sampled_from([X86_64.audit, AARCH64.audit, 0x4000_0003]),
    numbers,
    st.tuples(*[values] * 6),
)


def check_filter(make: Callable[[Architecture, Sequence[Rule]], Sequence[Instruction]], call: Call) -> None:
    for architecture in ARCHITECTURES:
        rules = rules_for(PID)
        assert run(make(architecture, rules), call) == read(architecture, rules, call)


@given(calls)
def test_the_filter_does_what_the_rules_say_for_every_call_and_architecture_S23(call: Call) -> None:
    check_filter(filter_program, call)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_every_call_that_a_rule_names_is_decided_by_it_S23(architecture: Architecture) -> None:
    """Every number, with arguments that no exception fits: so that no rule is hidden behind another."""
    rules = rules_for(PID)
    program = filter_program(architecture, rules)
    for rule in rules:
        for name in rule.names:
            assert name in X86_64.numbers, f"{name} has no number"
            if (number := architecture.numbers.get(name)) is not None:
                call = Call(architecture.audit, number, refused_arguments(rule))
                assert run(program, call) == error_code(rule.error), name
    assert len(set(architecture.numbers.values())) == len(architecture.numbers)


def refused_arguments(rule: Rule) -> tuple[int, ...]:
    arguments = [0] * 6
    for word in rule.unless[:1]:
        arguments[word.argument] = ~word.value & word.mask
    for word in rule.only_if[:1]:
        arguments[word.argument] = word.value
    return tuple(arguments)


def _with(program: Sequence[Instruction], at: int, wrong: Instruction) -> Sequence[Instruction]:
    return (*program[:at], wrong, *program[at + 1 :])


def _replaced(rules: Sequence[Rule], wrong: Rule) -> list[Rule]:
    return [wrong if one.names == wrong.names else one for one in rules]


MUTANTS: dict[str, tuple[Callable[[Architecture, Sequence[Rule]], Sequence[Instruction]], Call]] = {
    "any architecture": (
        lambda *of: _with(filter_program(*of), 1, Instruction(0x15, 1, 1, 0)),
        Call(0x4000_0003, 11, (0,) * 6),
    ),
    "newer calls": (
        lambda *of: _with(filter_program(*of), 4, Instruction(0x25, 1, 1, 0)),
        Call(X86_64.audit, 2**30 + 59, (0,) * 6),
    ),
    "half of a pointer": (
        lambda *of: filter_program(of[0], _replaced(of[1], Rule(("prlimit64",), unless=(Word(2),)))),
        Call(X86_64.audit, 302, (0, 0, 1 << 32, 0, 0, 0)),
    ),
    "shared memory with one more flag": (
        lambda *of: filter_program(of[0], _replaced(of[1], Rule(("mmap",), only_if=(Word(3, 0x21),)))),
        Call(X86_64.audit, 9, (0, 4_096, 3, 0x4021, 0, 0)),
    ),
    "threads are not told apart": (
        lambda *of: filter_program(of[0], _replaced(of[1], Rule(("clone",), unless=(Word(0, mask=0),)))),
        Call(X86_64.audit, 56, (17, 0, 0, 0, 0, 0)),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_filters_are_found_S23(mutant: str) -> None:
    make, call = MUTANTS[mutant]
    check_filter(filter_program, call)
    with pytest.raises(AssertionError):
        check_filter(make, call)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_numbers_are_those_of_the_kernel_s_headers(architecture: Architecture) -> None:
    if not (header := HEADERS[architecture.name]).is_file():
        pytest.skip(f"no {header}")
    found = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE))
    for name, number in architecture.numbers.items():
        if name not in NEWER:
            assert int(found[name]) == number, name


CRASH = """
import os
from semel.processing.sandbox import enter_sandbox
assert enter_sandbox(()).is_whole
os.abort()
"""
THREADS = """
import threading
from semel.processing.sandbox import enter_sandbox
waiting = threading.Event()
thread = threading.Thread(target=waiting.wait)
thread.start()
sandbox = enter_sandbox(())
waiting.set()
assert "2 threads" in sandbox.missing["landlock"], sandbox
assert "seccomp" in sandbox.active, sandbox
after = threading.Thread(target=print, args=("started",))
after.start()
after.join()
"""


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


whole = pytest.mark.skipif(not kernel_sandbox().is_whole, reason=f"this kernel has {kernel_sandbox()}")


@whole
def test_a_process_inside_still_ends_by_the_signal_that_its_fault_causes_S6() -> None:
    """The pool tells a crash by its signal."""
    assert _python(CRASH).returncode == -6


@whole
def test_landlock_is_not_said_to_be_active_if_a_thread_is_outside_and_threads_still_start_S23() -> None:
    done = _python(THREADS)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_links_of_a_model_folder_can_be_followed_and_nothing_beside_their_files(tmp_path: Path) -> None:
    """As the hub's cache has them: a folder of links into a folder of files."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "1").touch()
    (blobs / "2").touch()
    (snapshot / "config.json").symlink_to("../blobs/1")
    paths = set(readable_paths([snapshot]))
    assert {snapshot, blobs / "1"} <= paths
    assert not paths & {blobs, blobs / "2", tmp_path}


LACKING = Sandbox(("limits", "no_new_privs", "seccomp"), {"landlock": "Function not implemented"})
WHOLE = Sandbox(LAYERS, {}, 7)


def test_a_missing_layer_is_a_warning_and_a_problem_where_the_sandbox_is_required_S23() -> None:
    assert check_sandbox(found=WHOLE).verdict == check_sandbox(required=True, found=WHOLE).verdict == "ok"
    assert check_sandbox(found=LACKING).verdict == "warning"
    refused = check_sandbox(required=True, found=LACKING)
    assert refused.verdict == "problem"
    assert "--require-sandbox: limits, no_new_privs, seccomp, no landlock (Function not implemented)" in str(refused)


def test_a_process_that_requires_what_is_missing_does_not_start_S23() -> None:
    check_whole(WHOLE)
    with pytest.raises(ConfigError, match=r"--require-sandbox: .* has no landlock \(Function not implemented\)"):
        check_whole(LACKING)
