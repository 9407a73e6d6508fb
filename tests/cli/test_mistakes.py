"""Every typical mistake is told in the first line, before anything is loaded; and the page shows what was measured."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from semel.cli.checks import start
from semel.cli.checks.engine_flags import EngineFlags
from semel.cli.checks.finding import refuse
from semel.core.flag import fill
from semel.engine.vllm.compat.versions import installed_version
from semel.errors import ConfigError
from semel.settings.serve import ServeSettings
from tests.conftest import Folder
from tools.mistakes import LIMIT_S, PAGE
from tools.start_mistakes import BIN, MISTAKES, Mistake, made, run

NAMES = [one.name for one in MISTAKES]
NOTHING_FOUND = {"read_engine_flags": lambda *_, **__: EngineFlags()}

needs_vllm = pytest.mark.skipif(not installed_version(), reason="vLLM is not installed")


def complaint(mistake: Mistake, tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the checks of `semel serve` say; empty if they find nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    for name, value in mistake.environment.items():
        monkeypatch.setenv(name, value)
    with made(mistake, tiny, home) as (model, flags):
        values = {"model": model, "host": flags[1], "port": int(flags[3])}
        try:
            refuse(start.serve_findings(fill(ServeSettings, values), flags[4:]))
        except ConfigError as error:
            return str(error)
    return ""


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=NAMES)
def test_mutant_without_its_check_a_mistake_is_not_found(
    mistake: Mistake, tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, mistake.check, NOTHING_FOUND.get(mistake.check, lambda *_, **__: ()))
    said = complaint(mistake, tiny("qwen2-vl"), tmp_path, monkeypatch)
    assert not re.search(mistake.cause, said.partition("\n")[0]), said


@needs_vllm
@pytest.mark.slow
def test_where_nothing_is_wrong_nothing_is_said(tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--max-model-len", "4k", "--enforce-eager", "--no-enable-prefix-caching", "-tp", "2", "--dtype=float32"]
    fine = Mistake("none", "", flags=flags)
    assert complaint(fine, tiny("qwen2-vl"), tmp_path, monkeypatch) == ""


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=NAMES)
def test_as_a_command_it_is_told_at_once_and_nothing_is_started(mistake: Mistake, tiny: Folder, tmp_path: Path) -> None:
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=LIMIT_S) >= LIMIT_S:  # the machine may be late once
        said = run("semel", mistake, tiny("qwen2-vl"), tmp_path, within_s=120)
        assert said.code == 2
        assert said.cause_line(mistake) == 1, said.lines
        assert not [line for line in said.lines if "Traceback" in line]
        took_s.append(said.seconds)
    assert min(took_s) < LIMIT_S or min(took_s) < 8 * seconds_of_version()


def seconds_of_version() -> float:
    """What a command costs that does nothing, on this machine, now."""
    began = time.monotonic()
    subprocess.run([str(BIN / "semel"), "--version"], check=True, capture_output=True, timeout=60)
    return time.monotonic() - began


def test_the_page_has_every_mistake_and_no_row_of_semels_is_over_the_limit() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [line.split(" | ") for line in lines if re.match(r"\| .*( s|it starts|not run) \|$", line)]
    assert [row[0].removeprefix("| ") for row in rows] == NAMES
    for row, mistake in zip(rows, MISTAKES, strict=True):
        assert re.search(mistake.cause, row[1]), row[0]
        assert float(row[2].removesuffix(" s")) < LIMIT_S, row[0]
