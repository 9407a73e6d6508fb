"""The files that a forge and a contributor's editor read: they keep to their schemas, and what they run is there."""

from __future__ import annotations

import os
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
RELEASE = ROOT / ".github/workflows/release.yml"
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")
WRITES = {
    *("build: id-token", "build: attestations", "images: packages", "images: id-token", "images: attestations"),
    *("publish: id-token", "page: contents"),
}
"""What jobs may write: signatures, images, the package, the page of a release."""


def commands(text: str) -> list[str]:
    return [step["run"] for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
    ],
)
def test_what_the_forge_reads_keeps_to_its_schema(schema: str, files: list[Path]) -> None:
    command = [str(TOOLS / "check-jsonschema"), "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_workflows_run_the_scripts_that_a_contributor_runs() -> None:
    run = [command for workflow in WORKFLOWS for command in commands(workflow.read_text())]
    assert {"scripts/check", ".ci/run"} <= set(run)
    assert all((ROOT / command.split()[0]).is_file() for command in run if not command.startswith("gh release create "))


def faults(text: str) -> list[str]:
    """What a workflow must not do: run an action that may change, hold a secret, or write where it need not."""
    workflow = yaml.safe_load(text)
    used = re.findall(r"uses: (\S+)", text)
    rights = {name: job.get("permissions", {}) for name, job in workflow["jobs"].items()}
    given = {f"{name}: {right}" for name, one in rights.items() for right, level in one.items() if level != "read"}
    return [
        *(f"{action} is not named by its commit" for action in used if not PINNED.fullmatch(action)),
        *(["there is more than reading for every job"] if workflow["permissions"] != {"contents": "read"} else []),
        *(f"{right} is not needed" for right in sorted(given - WRITES)),
        *(["a secret is held"] if "secrets." in text else []),
        *(f"an expression is part of a command: {run}" for run in commands(text) if "${{" in run),
        *(
            ["a checkout keeps its credentials"]
            if text.count("@11bd7190") != text.count("persist-credentials: false")
            else []
        ),
    ]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_pinned_and_may_do_only_what_it_needs(workflow: Path) -> None:
    assert faults(workflow.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pypi-publish@ed0c53931b1dc9bd32cbe73a98c7f6766f8a527e", "pypi-publish@release/v1"),
        ("permissions:\n  contents: read", "permissions:\n  contents: write"),
        ("    permissions:\n      id-token: write", "    permissions:\n      packages: write"),
        ("${{ github.token }}", "${{ secrets.PYPI_TOKEN }}"),
        ('scripts/release --tag "$TAG"', "scripts/release --tag ${{ github.ref_name }}"),
        ("persist-credentials: false", "fetch-depth: 0"),
    ],
)
def test_a_release_that_could_be_subverted_is_found(old: str, new: str) -> None:
    text = RELEASE.read_text()
    assert old in text
    assert len(faults(text.replace(old, new, 1))) == 1


def test_what_is_published_was_built_checked_and_signed_before() -> None:
    jobs = yaml.safe_load(RELEASE.read_text())["jobs"]
    assert yaml.safe_load(RELEASE.read_text())[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"
    build = [step.get("run") or step["uses"].partition("@")[0] for step in jobs["build"]["steps"]]
    order = [
        "scripts/check",
        'scripts/release --tag "$TAG"',
        "actions/attest-build-provenance",
        "actions/upload-artifact",
    ]
    assert [step for step in build if step in order] == order
    assert jobs["publish"]["needs"] == ["build", "images"]
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["page"]["needs"] == "publish"


DIGEST = f"sha256:{'a' * 64}"
DOCKER = """#!/usr/bin/env bash
echo "$*" >> "$DOCKER_LOG"
case "$*" in
  *imagetools*) printf '%s' "$BASE_DIGEST" ;;
  *create*) echo builder ;;
  *--metadata-file*) while [ "$1" != --metadata-file ]; do shift; done
    printf '{"containerimage.digest": "%s"}' "$PUSHED_DIGEST" > "$2" ;;
esac
"""


def build_images(folder: Path, *, base: str = DIGEST, pushed: str = DIGEST) -> tuple[int, str, str]:
    """The exit code, what was asked of docker, and the outputs for the workflow."""
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o755)
    log, output = folder / "log", folder / "output"
    output.touch()
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "DOCKER_LOG": str(log), "GITHUB_OUTPUT": str(output)}
    environment |= {"BASE_DIGEST": base, "PUSHED_DIGEST": pushed}
    done = subprocess.run(
        [ROOT / "scripts/images", "ghcr.io/Owner", "v1.2.3"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, log.read_text(), output.read_text()


def test_images_are_built_on_a_base_that_is_named_by_its_digest(tmp_path: Path) -> None:
    code, asked, outputs = build_images(tmp_path)
    builds = [line for line in asked.splitlines() if " build " in line]
    assert code == 0
    kinds = ("frontend", "frontend-slim", "worker")
    assert [re.findall(r"LOCK=(\S+) .*/semel-(\S+):", line) for line in builds] == [[(kind, kind)] for kind in kinds]
    assert all(f"BASE=python:3.12-slim-trixie@{DIGEST}" in line and "--push" in line for line in builds)
    assert f"worker=ghcr.io/owner/semel-worker\nworker-digest={DIGEST}\n" in outputs
    assert ":1.2.3 " in builds[0]


@pytest.mark.parametrize("digest", ["", "<nil>", "sha256:abc", "latest"])
def test_no_image_is_built_on_a_base_without_a_digest(tmp_path: Path, digest: str) -> None:
    code, asked, outputs = build_images(tmp_path, base=digest)
    assert code == 1
    assert " build " not in asked
    assert outputs == ""


def test_an_image_without_a_digest_is_not_signed(tmp_path: Path) -> None:
    code, _, outputs = build_images(tmp_path, pushed="")
    assert code == 1
    assert outputs == ""


def test_hooks_before_a_commit_are_local_and_there() -> None:
    config = ROOT / ".pre-commit-config.yaml"
    subprocess.run([TOOLS / "pre-commit", "validate-config", config], capture_output=True, timeout=60, check=True)
    repositories = yaml.safe_load(config.read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        program = hook["entry"].split()[0]
        assert (TOOLS / Path(program).name).exists() if program.startswith(".venv/") else (ROOT / program).exists()
