"""The README's commands and programs, run as written."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.served import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip() for line in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)[0].splitlines()
]
CLIENT, LIBRARY = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def command(line: str) -> list[str]:
    """A command of the README, in the environment that the tests run in."""
    return line.replace(".venv/bin/", f"{Path(sys.executable).parent}/").split()


@pytest.fixture(scope="module")
def model() -> None:
    """The tiny model, where the README puts it."""
    assert [line.split()[0] for line in COMMANDS] == ["scripts/install", ".venv/bin/semel", ".venv/bin/semel"]
    subprocess.run(command(COMMANDS[1]), cwd=ROOT, timeout=120, check=True)


def test_the_library_s_program_runs(model: None, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(LIBRARY)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") >= 8


@pytest.fixture(scope="module")
def ready_after_s(model: None) -> Iterator[float]:
    """How long `semel serve` took; it serves until the tests are done."""
    began = time.monotonic()
    with subprocess.Popen(command(COMMANDS[2]), cwd=ROOT, process_group=0) as serve:
        try:
            until(lambda: serve.poll() is not None or is_ready(), 240)
            assert serve.poll() is None
            yield time.monotonic() - began
        finally:
            serve.send_signal(signal.SIGINT)
            serve.wait(20)


def is_ready() -> bool:
    try:
        return httpx.get("http://127.0.0.1:8000/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_quick_start_serves_within_a_minute_and_answers_the_ordinary_client(ready_after_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert ready_after_s < 60
