"""As JSON, every line of a process is JSON: also what is printed, by it or by a process that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from semel.cli.log_relay import json_line

PROGRAM = """
import logging, os, subprocess, sys, warnings
from contextlib import nullcontext
from semel.cli.log_relay import relayed_logs
with relayed_logs("json") if sys.argv[1] == "relayed" else nullcontext():
    print("printed")
    warnings.warn("old", FutureWarning)
    os.write(2, b"from C++\\rprogress 1/2\\rprogress 2/2\\n")
    subprocess.run([sys.executable, "-c", "print('of a child')"])
    print('{"message": "of vLLM"}')
    logging.getLogger("x").warning("logged")
    os.write(2, b"no end of line")
os._exit(3)
"""


def lines_of(mode: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_every_line_is_json_and_none_is_lost() -> None:
    entries = [json.loads(line) for line in lines_of("relayed")]
    messages = {entry["message"] for entry in entries}
    assert {"printed", "from C++", "progress 2/2", "of a child", "of vLLM", "logged", "no end of line"} <= messages
    assert [entry["level"] for entry in entries if "FutureWarning" in entry["message"]] == ["WARNING"]


def test_mutant_without_the_relay_most_lines_are_no_json() -> None:
    assert len([line for line in lines_of("bare") if not line.startswith("{")]) > 4


@pytest.mark.parametrize("line", [b'{"a": 1}', b"{ no json", b"\xff\xfe", b'"text"'])
def test_a_line_becomes_json_and_one_that_is_an_object_stays(line: bytes) -> None:
    made = json_line(line)
    assert isinstance(json.loads(made), dict)
    assert (made == line) is (line == b'{"a": 1}')


def test_an_error_of_the_command_line_is_json_too() -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    for flags in (["--port", "99999"], ["--port", "0"]):
        command = [sys.executable, "-m", "semel", "serve", "/no/model", "--log-format", "json", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        assert done.returncode == 2
        for line in done.stderr.splitlines():
            assert json.loads(line)["level"] == "ERROR"
        assert done.stderr
