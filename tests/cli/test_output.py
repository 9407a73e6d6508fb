"""What the processes of `semel serve` print at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from semel.cli.output import Output, StandardError
from semel.lab.bench.ports import free_port
from semel.telemetry.log_writer import LineWriter


def shown(output: Output, capfd: pytest.CaptureFixture[str]) -> str:
    output.writer.flush(30.0)
    return capfd.readouterr().err


async def printed(output: Output, text: str) -> None:
    os.write(output.descriptor, text.encode())
    output.read()


def logs_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.log"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("home")
async def test_at_a_terminal_a_start_goes_to_a_file_and_only_what_follows_is_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    output = Output(LineWriter(2), is_visible=False)
    path = output.path
    assert path is not None
    try:
        await printed(output, "loading\n")
        assert path.read_text() == "loading\n"
        assert path.stat().st_mode & 0o777 == 0o600
        output.begin()
        assert not path.exists()
        await printed(output, "a request\n")
        warnings: list[str] = []
        output.show_warnings(warnings.append)
        cut = "WARNING 2026-01-01 00:00:00,000 semel.compose.draining: 1 requests are cut off"
        await printed(output, f"ending\nINFO 2026-01-01 00:00:00,000 semel.access: POST\n{cut}\n")
        await printed(output, "(EngineCore pid=1) WARNING 01-01 00:00:00 [core.py:1] semel: ended\n")
        assert shown(output, capfd) == "a request\n"
        assert warnings == [cut]
    finally:
        output.close(keep_file=False)


async def test_the_file_of_a_failed_start_is_kept_and_that_of_a_good_one_is_not(home: Path) -> None:
    for keeps in (True, False):
        output = Output(LineWriter(2), is_visible=False)
        await printed(output, "ValueError: no\n")
        output.close(keep_file=keeps)
    (kept,) = logs_in(home)
    assert kept.read_text() == "ValueError: no\n"


async def test_the_file_is_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.cli.output._MAX_FILE_BYTES", 100_000)
    output = Output(LineWriter(2), is_visible=False)
    for _ in range(100):
        await printed(output, "x" * 10_000)
    output.close(keep_file=True)
    (kept,) = logs_in(home)
    assert 100_000 <= kept.stat().st_size <= 110_000


async def test_as_json_every_whole_line_is_shown_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(LineWriter(2), is_visible=True, form="json")
    await printed(output, '{"message": "ours"}\nraw')
    await printed(output, " text\n\n")
    output.close(keep_file=False)
    first, second = map(json.loads, shown(output, capfd).splitlines())
    assert first == {"message": "ours"}
    assert (second["message"], second["level"], second["logger"]) == ("raw text", "INFO", "output")


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
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "500"}
    server = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, process_group=0, env=environment)
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
    assert text.index("is neither a folder") < text.index("the worker could not start")
    (name,) = re.findall(r"everything that was printed is in (\S+\.log)", text)
    assert "is neither a folder nor a model" in Path(name).read_text()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody has it open any more
        return b""
