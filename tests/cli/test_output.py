"""What the processes of `semel serve` print at a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from semel.bench.ports import free_port
from semel.cli.output import Output, StandardError
from tests.waiting import until


async def printed(output: Output, text: str) -> None:
    os.write(output.descriptor, text.encode())
    await until(lambda: output._kept.endswith(text.encode()))


async def test_what_is_printed_is_shown_only_while_it_serves(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output()
    try:
        await printed(output, "loading\n")
        with output.visible():
            await printed(output, "a request\n")
        await printed(output, "ending\n")
        assert capfd.readouterr().err == "a request\n"
        assert output.last_lines(2) == "a request\nending"
    finally:
        output.close()


async def test_what_is_kept_is_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output()
    try:
        for number in range(300):
            await asyncio.to_thread(os.write, output.descriptor, f"{number:07}\n".encode() * 1_000)
        os.write(output.descriptor, b"last")
        await until(lambda: output._kept.endswith(b"last"))
        lines = output.last_lines(1_000_000).splitlines()
        assert lines[-1] == "last"
        assert len(lines) <= 10_000
        assert capfd.readouterr().err == ""
    finally:
        output.close()


def test_a_terminal_that_is_gone_fails_no_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SIGHUP may come after the first print that fails. The control is a console that knows nothing of it."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as gone, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") as nobody:
        os.close(ours)
        monkeypatch.setattr(sys, "stderr", gone)
        console = Console(file=cast("IO[str]", StandardError()), force_terminal=True)
        console.print("semel is ready")
        with console.status("ending"):
            console.print("still there")
        with pytest.raises(OSError, match="Input/output error"):
            Console(stderr=True).print("mutant")
        os.dup2(nobody.fileno(), gone.fileno())  # what is still buffered goes nowhere


@pytest.mark.slow
def test_at_a_terminal_a_start_that_fails_says_why(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "semel", "testing", "serve", str(tmp_path / "nothing"), "--port", str(free_port())]
    server = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, process_group=0)
    os.close(theirs)
    shown = b""
    try:
        while part := _read(ours):
            shown += part
        code = server.wait(60)
    finally:
        server.kill()
        os.close(ours)
    assert code == 2, shown.decode(errors="replace")
    text = " ".join(shown.decode(errors="replace").split())
    assert "the worker could not start" in text
    assert "is neither a folder nor a model" in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody has it open any more
        return b""
