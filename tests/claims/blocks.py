"""Code blocks of README, get-started and deploy pages are run, or a table says why not."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import typer
import yaml

from semel.cli.app import app as command_line
from semel.cli.checks.engine_flags import read_engine_flags
from semel.engine.vllm.compat.flags import FlagSource
from tests.claims.flags import HEAD
from tools.pages import BLOCK, ROOT, Pages

BLOCK_PAGES: Final = ("README.md", "docs/get-started/*", "docs/deploy/*")
PROGRAMS: Final = ("bash", "sh", "console", "python", "yaml")
KUBERNETES: Final = "docs/deploy/kubernetes.md"
HERE: Final = "tests/claims/test_claims.py"
CLUSTER: Final = "needs a cluster; tests/test_chart.py renders the chart, and `wrong_values` checks the values"
ENGINES: Final = (
    "needs a GPU and weights; tests/serve starts such commands on tiny models, `refused_commands` parses these"
)
ENVOY: Final = "needs envoy; tests/serve/test_rolling_restart.py runs its configuration"
BLOCKS: Final[tuple[tuple[str, str, str], ...]] = (
    ("README.md", "", "scripts/first-answer"),
    ("docs/get-started/coming-from-vllm.md", "vllm serve", ENGINES),
    ("docs/get-started/performance.md", "semel bench serve", "takes 18 minutes: scripts/figures runs it"),
    ("docs/get-started/verify.md", "semel verify", "starts two engines; tests/verify runs it on tiny models, nightly"),
    ("docs/deploy/containers.md", "cd containers", "needs docker, the network and a GPU"),
    ("docs/deploy/containers.md", "docker build", "needs docker and the network; scripts/images"),
    ("docs/deploy/containers.md", "sudo useradd", "needs root and systemd; tests/test_systemd.py reads the units"),
    ("docs/deploy/fleet.md", "printf 'tcp://", HERE),
    ("docs/deploy/fleet.md", "semel key make keys", HERE),
    (KUBERNETES, "", CLUSTER),
    ("docs/deploy/plain-vllm.md", "", ENGINES),
    ("docs/deploy/reverse-proxy.md", "envoy", ENVOY),
    ("docs/deploy/reverse-proxy.md", "pytest", "CI runs this file"),
    ("docs/deploy/serve.md", "IMAGE=", "asks a server; scripts/first-answer sends the same"),
    ("docs/deploy/serve.md", "semel key fleet.key", HERE),
    ("docs/deploy/serve.md", "semel serve", ENGINES),
    ("docs/deploy/tenants.md", "cat api-keys", ENGINES),
    ("docs/deploy/tenants.md", "KEY=", HERE),
    ("docs/deploy/tenants.md", "semel key", HERE),
)
"""Page, how a block's first line begins, and the file that runs it, or why none does."""

_RUNNABLE: Final = re.compile(
    r"(?:semel key|printf|echo|[A-Z]+=\S)(?!.*\b(?:sudo|kubectl|docker|semel serve|vllm serve)\b)"
)


def blocks(pages: Pages) -> Iterator[tuple[str, str, str]]:
    """Page, language and body of each fenced block that is a program, in the pages where they are accounted for."""
    for page, text in pages.items():
        if any(fnmatch.fnmatch(page, one) for one in BLOCK_PAGES):
            for indent, language, body in BLOCK.findall(text):
                if language in PROGRAMS:
                    yield page, language, re.sub(rf"^{re.escape(indent)}", "", body, flags=re.MULTILINE)


def commands_of(body: str) -> list[str]:
    """The command lines of a console's block, without their prompt; one goes on until its quotes are closed."""
    commands: list[str] = []
    for line in re.sub(r"\\\n\s*", " ", body).splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
        elif commands and any(commands[-1].count(quote) % 2 for quote in "'\""):
            commands[-1] += f"\n{line}"
    return commands


def is_runnable(command: str) -> bool:
    """Whether a test runs a line as it is, in a folder of its own: it needs no engine, cluster or root."""
    return _RUNNABLE.match(command) is not None


def runnable(body: str) -> list[str]:
    """Those lines of a console's block, without comments."""
    return [re.sub(r"\s+# [^'\"]*$", "", command) for command in commands_of(body) if is_runnable(command)]


def constant(line: str) -> str:
    """What of a printed line is the same in every run."""
    return " ".join(re.sub(r"\b[0-9a-f]{4,}…?|\d+", "#", line).split())


def unaccounted_blocks(pages: Pages, table: tuple[tuple[str, str, str], ...] = BLOCKS) -> Iterator[str]:
    """Blocks that are not in the table or are no program of their language, and rows of the table without a block."""
    used = set()
    for page, language, body in blocks(pages):
        first = body.removeprefix("$ ")
        rows = [row for row in table if row[0] == page and first.startswith(row[1])]
        used |= set(rows)
        if any(row[2] == HERE for row in rows) and not runnable(body):
            yield f"{page}: {first!r}: no line of it is run in {HERE}"
        if not rows:
            yield f"{page}: {first.partition(chr(10))[0]!r}: run by nothing, and without a reason in BLOCKS"
        try:
            if language == "python":
                ast.parse(body)
            elif language == "yaml":
                list(yaml.safe_load_all(body))
            else:
                script = "\n".join(commands_of(body)) if language == "console" else body
                subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=True, timeout=10)
        except (SyntaxError, yaml.YAMLError, subprocess.CalledProcessError) as error:
            yield f"{page}: {first.partition(chr(10))[0]!r}: is no {language}: {error}"
    for page, first, how in table:
        if " " not in how and how != HERE and Path(page).name not in (ROOT / how).read_text():
            yield f"{page}: {first!r}: {how} does not read this page"
        elif page in pages and (page, first, how) not in used:
            yield f"{page}: {first!r}: in BLOCKS, and not on the page"


def wrong_values(pages: Pages) -> Iterator[str]:
    """Values on the page of Kubernetes that the chart's schema refuses; without a model, they are only a part."""
    defaults = yaml.safe_load((ROOT / "deploy/helm/semel/values.yaml").read_text())
    schema = jsonschema_rs.validator_for(json.loads((ROOT / "deploy/helm/semel/values.schema.json").read_text()))
    for _, language, body in BLOCK.findall(pages.get(KUBERNETES, "")):
        values = yaml.safe_load(body) if language == "yaml" else None
        if isinstance(values, dict) and "apiVersion" not in values:
            for error in schema.iter_errors(_merge(defaults, values)):
                if "model" in values or "required property" not in error.message:
                    yield f"{KUBERNETES}: {error.message}"


def _merge(defaults: Any, values: Any) -> Any:
    """Values over defaults, as helm does it: objects are merged, and nothing else."""
    if not isinstance(defaults, dict) or not isinstance(values, dict):
        return values
    return defaults | {name: _merge(defaults.get(name), value) for name, value in values.items()}


def refused_commands(pages: Pages) -> Iterator[str]:
    """Commands of semel's in blocks that its own command line refuses, by a flag, a value or what is missing."""
    for page, text in pages.items():
        for _, language, body in BLOCK.findall(text):
            lines = commands_of(body) if language == "console" else re.sub(r"\\\n\s*", " ", body).splitlines()
            for line in lines if language in ("bash", "sh", "console") else ():
                command = HEAD.sub("", line.strip())
                if command.startswith("semel ") and (fault := _refusal(shlex.split(command, comments=True)[1:])):
                    yield f"{page}: {line.strip()[:80]!r}: {fault}"


@cache
def _root() -> Any:
    return typer.main.get_command(command_line)


@cache
def _engine_source() -> FlagSource | None:
    return FlagSource.installed()


def _refusal(words: list[str]) -> str:
    """What the command line says of these words; nothing is started."""
    command = _root()
    words = list(itertools.takewhile(lambda word: word not in ("|", "&&", ">", "<", "&", ";"), words))
    try:
        while hasattr(command, "commands"):
            if not words or words[0].startswith("--"):
                return ""
            _, command, words = command.resolve_command(typer.Context(command), words)
        if "--help" in words:
            return ""
        context = command.make_context("semel", [*words])
        for flag in command.flags:
            given = context.params.get(flag.key)
            for text in () if flag.kind is bool or given is None else given if flag.is_list else (given,):
                flag.parse(text)
    except (typer.BadParameter, ValueError) as error:
        return "" if "…" in words and "missing" in str(error) else str(error)
    problems = read_engine_flags(context.args, source=_engine_source()).problems
    return problems[0].detail if problems else ""
