"""The units of systemd: verified by systemd itself, hardened, and held to the code."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import root_command
from tests.serve.served import SEMEL

ROOT = Path(__file__).parent.parent
UNITS = ROOT / "deploy" / "systemd"
INSTANCES = {"worker": "0", "frontend": "8001"}
EXPOSURE = 20
"""In tenths, by systemd's own scale: 10 is nothing protected, and what we ship has 1.9 at most."""

MUTATIONS: dict[str, tuple[str, str]] = {
    "a flag that there is not": ("--drain-s=", "--drains-s="),
    "a value that a flag does not take": ("--log-format=json", "--log-format=xml"),
    "killed while it drains": ("TimeoutStopSec=150", "TimeoutStopSec=30"),
    "the engine's processes get the signal": ("KillMode=mixed", "KillMode=control-group"),
    "a directive that there is not": ("RestartSec=", "RestartSecs="),
    "root": ("User=semel", "User=root"),
    "privileges": ("NoNewPrivileges=yes\nCapabilityBoundingSet=\n", ""),
    "all of the system": ("ProtectSystem=strict", "ProtectSystem=no"),
}

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def faults_in(name: str, text: str, home: Path) -> list[str]:
    """What systemd, the code and our own rules have against a unit."""
    return [*_systemd_faults(name, text, home), *_code_faults(name, text)]


def _systemd_faults(name: str, text: str, home: Path) -> list[str]:
    unit = home / f"semel-{name}@{INSTANCES[name]}.service"
    unit.write_text(text.replace("/opt/semel/bin/semel", str(SEMEL)))
    verified = _analyze("verify", "--man=no", "--recursive-errors=no", str(unit))
    exposed = _analyze("security", "--offline=true", f"--threshold={EXPOSURE}", str(unit))
    return [done.stderr or done.stdout[-300:] for done in (verified, exposed) if done.returncode or done.stderr]


def _analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _code_faults(name: str, text: str) -> list[str]:
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    (command,) = re.findall(r"^ExecStart=(.+?[^\\])$", text, re.MULTILINE | re.DOTALL)
    program, kind, *arguments = shlex.split(command.replace("\\\n", " ").replace("%i", INSTANCES[name]))
    found = root_command().commands[kind]
    own = [one for one in arguments if not one.startswith("$SEMEL_")]
    try:
        parsed = found.make_context(kind, own)
        flags = {one.name: one.default for one in found.flags}
        flags |= {one.name: one.parse(value) for one in found.flags if isinstance(value := parsed.params[one.key], str)}
    except Exception as error:  # noqa: BLE001 whatever its parser says
        return [f"its flags: {error}"]
    wrong = {
        f"its flags: {parsed.args}": not parsed.args,
        "another program": (program, kind) == ("/opt/semel/bin/semel", name),
        "it is killed while it drains": int(values["TimeoutStopSec"]) >= flags["drain-delay-s"] + flags["drain-s"] + 10,
        "no drain delay": flags["drain-delay-s"] > 0,
        "all its processes get the signal": values["KillMode"] == "mixed",
        "its user": values["User"] == "semel",
        "it may write to the system": values["ProtectSystem"] == "strict",
    }
    return [fault for fault, is_right in wrong.items() if not is_right]


@needs_systemd
@pytest.mark.parametrize("name", INSTANCES)
def test_a_unit_is_what_systemd_and_semel_take(name: str, tmp_path: Path) -> None:
    assert faults_in(name, (UNITS / f"semel-{name}@.service").read_text(), tmp_path) == []


@needs_systemd
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", INSTANCES)
def test_mutant_what_is_wrong_with_a_unit_is_found(name: str, mutation: str, tmp_path: Path) -> None:
    before, after = MUTATIONS[mutation]
    text = (UNITS / f"semel-{name}@.service").read_text()
    assert before in text
    assert faults_in(name, text.replace(before, after), tmp_path)
