"""The README's programs, run as written. Its quick start is run, and timed, by `scripts/first-answer`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_the_library_s_program_runs(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    _, program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "program.py"
    assert "/tmp/tiny-vl" in program
    script.write_text(program.replace("/tmp/tiny-vl", str(tiny("qwen2-vl"))))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") >= 8
