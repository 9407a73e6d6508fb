"""The README: its code blocks are run or have a reason, every page is near it, and its pitch is the same everywhere.

`scripts/first-answer` runs its blocks, and times them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PLACEHOLDER = "OWNER" + "/semel"


@pytest.fixture(scope="module")
def first_answer() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("first_answer", str(ROOT / "scripts/first-answer"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_code_block_is_run_or_has_a_reason(first_answer: ModuleType) -> None:
    assert first_answer.unaccounted(README) == []
    planted = "semel top --nothing\n"
    assert first_answer.unaccounted(f"{README}\n```bash\n{planted}```\n") == [planted]
    without = README.replace("```bash\nsemel verify ", "```bash\nsemel top ")
    assert "semel verify " in first_answer.unaccounted(without), "a reason that no block needs"


def links(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target and target.endswith(".md")}


def reached(start: Path, steps: int) -> set[Path]:
    found = edge = {start}
    for _ in range(steps):
        edge = set().union(*(links(page) for page in edge)) - found
        found = found | edge
    return found


def test_every_page_is_within_two_links_of_the_readme() -> None:
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md"}
    assert pages - reached(ROOT / "README.md", 2) == set()
    assert pages - reached(ROOT / "ROADMAP.md", 1) != set(), "the control: a page that links to few"


def test_the_readme_fits_and_the_pitch_is_the_same_everywhere() -> None:
    assert len(README.splitlines()) <= 120
    (pitch,) = re.findall(r"^\*\*(.*)\*\*$", README, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    site = re.findall(r"^site_description: \"(.*)\"$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    chart = yaml.safe_load((ROOT / "deploy/helm/semel/Chart.yaml").read_text())["description"]
    printed = subprocess.run(
        [sys.executable, "-m", "semel", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert [project, *site, chart] == [pitch] * 3
    assert pitch in " ".join(printed.split())


def test_what_a_public_home_has_to_fill_in_stands_in_one_place() -> None:
    (section,) = re.findall(
        r"^## When the repository gets a public home\n(.*?)^The ", CONTRIBUTING, re.DOTALL | re.MULTILINE
    )
    named = set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.*"), *ROOT.glob(".github/**/*.*")]
    found = {str(page.relative_to(ROOT)) for page in pages if PLACEHOLDER in page.read_text()}
    assert found <= named
    assert not found | {"docs/api/routes.md"} <= named, "the control: a page that the table does not name"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_the_library_s_example_runs(tiny: Callable[[str], Path]) -> None:
    command = [sys.executable, str(ROOT / "examples/library.py"), str(tiny("qwen2-vl"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") >= 8
