"""The documentation is true: links resolve, the README's program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_resolves(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_code_quotes_exists(page: Path) -> None:
    paths = re.findall(r"`((?:src|tests|docs|scripts|\.ci)/[\w./-]+)`", page.read_text())
    missing = [path for path in paths if "NAME" not in path and not (ROOT / path).exists()]
    assert not missing


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_program_in_the_readme_runs_as_written(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    folder = tmp_path / "tiny-vl"
    semel = Path(sys.executable).parent / "semel"
    subprocess.run([str(semel), "testing", "model", "qwen2-vl", str(folder)], timeout=90, check=True)
    script = tmp_path / "program.py"
    script.write_text(program.replace("/tmp/tiny-vl", str(folder)))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") >= 8
