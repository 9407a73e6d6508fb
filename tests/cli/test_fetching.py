"""The flags for fetching, as a user gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.settings.secrets import create_key
from tests.commands import run_main


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--allowed-media-domains", "*.example.com"),
        ("--allowed-media-networks", "10.0.0.1/8"),
        ("--allowed-local-media-path", "/nowhere/at/all"),
    ],
)
def test_a_flag_that_makes_no_sense_is_named_at_the_start(tmp_path: Path, flag: str, value: str) -> None:
    create_key(tmp_path / "key")
    worker, key_file = f"ipc://{tmp_path}/w.sock", str(tmp_path / "key")
    command = ("frontend", "tiny", "--skip-checks", "--worker", worker, "--fleet-key-file", key_file, flag, value)
    code, printed = run_main(*command)
    assert code == 2
    assert flag in printed
    assert value in printed
    assert "Traceback" not in printed
