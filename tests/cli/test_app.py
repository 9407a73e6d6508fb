"""The command line, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.errors import ConfigError
from tests.commands import run_main


def semel(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "semel"
    return subprocess.run([str(command), *arguments], capture_output=True, text=True, timeout=90, check=False)


def test_version_prints_the_installed_version() -> None:
    done = semel("version")
    assert done.returncode == 0
    assert done.stdout.startswith("semel 0.")


@pytest.mark.parametrize("words", [("key",), ("key", "fleet")], ids=" ".join)
def test_key_makes_a_key_that_only_its_owner_reads_and_never_replaces_one(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = tmp_path / "fleet.key"
    assert run_main(*words, str(path))[0] == 0
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    code, printed = run_main(*words, str(path))
    assert code == 2
    assert "never overwritten" in printed
    assert path.read_bytes() == before


def test_a_model_that_a_list_took_is_asked_for_before_the_list_and_no_key_is_shown() -> None:
    code, printed = run_main("serve", "--api-key", "sk-secret", "model")
    assert code == 2
    assert "missing argument 'MODEL': what follows --api-key are its values" in printed
    assert "sk-secret" not in printed
    assert "--api-key" not in run_main("serve")[1]


def test_an_unknown_family_is_refused_by_the_ones_there_are(tmp_path: Path) -> None:
    code, printed = run_main("testing", "model", "gpt-5", str(tmp_path / "tiny"))
    assert code == 2
    assert "qwen2-vl" in printed
    assert "Traceback" not in printed


def test_a_collector_that_cannot_be_spoken_to_is_refused_before_anything_is_loaded() -> None:
    code, printed = run_main("serve", "no-such-model", "--otlp-traces-endpoint", "collector:4318")
    assert code == 2
    assert "http://HOST:4318/v1/traces" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "command",
    [("serve", "model"), ("worker", "model", "--listen", "tcp://127.0.0.1:0"), ("frontend", "model")],
    ids=" ".join,
)
def test_a_process_of_semels_own_does_not_open_the_door_of_plain_vllm(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def refuse(_: object) -> None:
        seen.append(os.environ["SEMEL"])
        raise ConfigError("far enough")

    monkeypatch.setattr("semel.cli.checks.refuse", refuse)
    monkeypatch.setenv("SEMEL", "1")
    run_main("version")
    assert os.environ["SEMEL"] == "1"  # the control
    code, printed = run_main(*command, "--skip-checks")
    assert (code, seen) == (2, ["0"]), printed
