"""`semel` in this process. Typer builds all commands anew for every call; here they are built once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from typing import Any
from unittest.mock import patch

import typer
from typer.testing import CliRunner, Result

from semel import cli
from semel.cli.app import app


@cache
def root_command() -> Any:
    return typer.main.get_command(app)


def invoke(*arguments: str, env: Mapping[str, str] | None = None, given: str | None = None) -> Result:
    """Run a command; an error of ours is raised within it, and found in the result."""
    with patch("typer.testing._get_command", lambda _: root_command()):
        return CliRunner().invoke(app, arguments, env=env, input=given)


def run_main(*arguments: str) -> tuple[int, str]:
    """The exit code of a command line and all that it prints, as a process would."""
    output = StringIO()
    with (
        patch.object(sys, "argv", ["semel", *arguments]),
        patch("semel.cli.app", lambda: root_command()()),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        return cli._run(), output.getvalue()
