"""The files that a forge and a contributor's editor read: they keep to their schemas, and what they run is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")


def keeps_to(schema: str, *files: Path) -> bool:
    command = [str(TOOLS / "check-jsonschema"), "--builtin-schema", schema, *map(str, files)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def commands(text: str) -> list[str]:
    return [step["run"] for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
    ],
)
def test_what_the_forge_reads_keeps_to_its_schema(schema: str, files: list[Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("on: push\njobs:\n  one:\n    runs-on: here\n    imagine: this\n    steps: []\n")
    assert keeps_to(schema, *files)
    assert not keeps_to(schema, wrong)


def test_workflows_run_the_scripts_that_a_contributor_runs() -> None:
    run = [command for workflow in WORKFLOWS for command in commands(workflow.read_text())]
    assert {"scripts/check", ".ci/run"} <= set(run)
    assert all((ROOT / command.split()[0]).is_file() for command in run)


def test_an_action_is_named_by_its_commit_and_may_only_read() -> None:
    for workflow in WORKFLOWS:
        text = workflow.read_text()
        used = re.findall(r"uses: (\S+)", text)
        assert used
        assert all(PINNED.fullmatch(action) for action in used)
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_hooks_before_a_commit_are_local_and_there(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("repos: [{repo: local, hooks: [{id: nothing}]}]\n")
    config = ROOT / ".pre-commit-config.yaml"
    codes = [
        subprocess.run(
            [TOOLS / "pre-commit", "validate-config", file], capture_output=True, timeout=60, check=False
        ).returncode
        for file in (config, wrong)
    ]
    assert codes[0] == 0
    assert codes[1] != 0
    repositories = yaml.safe_load(config.read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        program = hook["entry"].split()[0]
        assert (TOOLS / Path(program).name).exists() if program.startswith(".venv/") else (ROOT / program).exists()
