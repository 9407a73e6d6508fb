"""`semel verify`: proves on your machine that semel serves a model as bare vLLM does."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Final

import typer
import uvloop
from rich.console import Console

from semel.cli.checks.engine_flags import read_engine_flags
from semel.cli.checks.start import engine_findings
from semel.lab.bench.serving.run import Options
from semel.lab.bench.settings import VerifySettings
from semel.lab.cli.benching import shown_progress, until_stopped
from semel.lab.verify.report import Section, VerifyReport
from semel.lab.verify.run import Proof, capabilities, verify

__all__ = ["run_verify", "show_report"]

_SHOWN_LINES: Final = 8
_STYLES: Final = {"passed": "green", "failed": "red", "unsure": "yellow", "skipped": "dim"}


def run_verify(settings: VerifySettings, flags: list[str]) -> int:
    """Prove it, write the report, and return the exit code."""
    options = Options(
        settings.model,
        tuple(flags),
        settings.baseline,
        settings.semel,
        settings.api_key,
        settings.only,
        not settings.full,
    )
    if settings.capabilities:
        return _show_capabilities(options)
    options.are_elsewhere()
    proof = Proof(options, secrets.randbits(32) if settings.draw_seed is None else settings.draw_seed)
    with shown_progress("semel verify") as tell:
        report = uvloop.run(until_stopped(verify(proof, _configuration(settings, flags), tell)))
    path = _base(settings.report)
    _write(report, path)
    show_report(report, path)
    return int(not report.ok)


def _show_capabilities(options: Options) -> int:
    with shown_progress("semel verify") as tell:
        states = uvloop.run(until_stopped(capabilities(options, tell)))
    for name, state in states.items():
        typer.echo(f"{name:16} {state}")
    if not states:
        typer.echo("no capabilities: --semel names the worker's --admin-port", err=True)
    return int(not states or "off" in states.values())


def _configuration(settings: VerifySettings, flags: list[str]) -> Section:
    """Return what the checks before a start say of the model and the flags."""
    if settings.model is None:
        return Section("configuration", "skipped", "no model is named: a tiny one is made, or both servers run already")
    findings = list(engine_findings(settings.model, read_engine_flags(flags)))
    problems = [f"{one.what}: {one}" for one in findings if one.verdict == "problem"]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if problems:
        lines = tuple(sorted({one.what for one in findings if one.verdict == "problem"}))
        return Section("configuration", "failed", "not supported; the reasons are on the terminal", lines)
    return Section("configuration", "passed", "semel serves this model under these flags")


def _base(path: Path) -> Path:
    """Return the path of both files without their suffixes, whichever of them was named."""
    return path.with_suffix("") if path.suffix in (".md", ".json") else path


def _write(report: VerifyReport, path: Path) -> None:
    path.with_name(path.name + ".md").write_text(report.to_markdown())
    path.with_name(path.name + ".json").write_text(report.to_json())


def show_report(report: VerifyReport, path: Path) -> None:
    """Print what came of each part, and where the report is; `path` is without a suffix."""
    console = Console()
    for section in report.sections:
        style = _STYLES[section.outcome]
        console.print(
            f"[{style}]{section.outcome:8}[/] {section.name}: {section.summary}", highlight=False, soft_wrap=True
        )
        if section.outcome in ("failed", "unsure"):
            rest = len(section.lines) - _SHOWN_LINES
            more = (f"and {rest} more in the report",) if rest > 0 else ()
            for line in (*section.lines[:_SHOWN_LINES], *more):
                console.print(f"         {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{report.verdict}; the report is {path.name}.md and {path.name}.json", highlight=False, soft_wrap=True
    )
    typer.echo()
