"""`semel prove`: a fleet under fire, and the page of what came of it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import typer

from semel.core.flag import flag
from semel.errors import ConfigError

__all__ = ["ProveSettings", "run_prove"]

_FAMILY: Final = "qwen2-vl"


@dataclass(frozen=True, slots=True)
class ProveSettings:
    """The options of `semel prove` besides vLLM's flags."""

    model: Path | None = flag(
        None, help="A model folder.", group="Server", is_positional=True, default_text="a tiny one is made"
    )
    requests: int = flag(2_000, help="Number of requests.", group="Measurement", min=1)
    seed: int = flag(0, help="Seed of the requests, the images and the faults.", group="Measurement", min=0)
    frontends: int = flag(3, help="Number of frontends.", group="Measurement", min=1, max=16)
    workers: int = flag(3, help="Number of workers.", group="Measurement", min=1, max=16)
    transport: Literal["tcp", "ipc"] = flag(
        "tcp", help="How frontends reach workers; only over tcp links are cut and keys rotated.", group="Measurement"
    )
    modelless: bool = flag(
        False, help="Workers without a model, whose answers are a function of the request.", group="Measurement"
    )
    without: str = flag(
        "",
        help="A protection that the frontends lack, so that one sees what it is worth; an unknown one is answered with "
        "all.",
        group="Measurement",
    )
    against: Literal["semel", "bare"] = flag(
        "semel",
        help="What gets the requests and the faults: a fleet, or bare vLLM's one server with two API servers.",
        group="Measurement",
    )
    fault_interval_s: float = flag(
        5.0, help="Seconds from one fault to the next; 0 for none.", group="Measurement", unit="seconds", min=0
    )
    concurrency: int = flag(12, help="Number of requests at a time.", group="Measurement", min=1, max=1_000)
    images: int = flag(32, help="Number of images; each tenant has its own items of them.", group="Measurement", min=12)
    references: Path | None = flag(
        None, help="File of reference answers: read if it is there, else written.", group="Measurement"
    )
    report: Path = flag(Path("semel-prove"), help="Where the page goes: PATH.md and PATH.json.", group="Output")


def run_prove(settings: ProveSettings, flags: list[str]) -> int:
    """Run it, write the page, and return the exit code."""
    import uvloop
    from rich.console import Console

    from semel.lab.cli.benching import shown_progress, until_stopped
    from semel.lab.prove.plan import Mix
    from semel.lab.prove.processes import ENGINE_FLAGS
    from semel.lab.prove.run import Options, prove
    from semel.lab.prove.without import PROTECTIONS
    from semel.lab.prove.world import Shape
    from semel.lab.testing.models import build

    if settings.without and settings.without not in PROTECTIONS:
        raise ConfigError(f"--without {settings.without}: there are {', '.join(PROTECTIONS)}")
    if (is_bare := settings.against == "bare") and (settings.modelless or settings.without):
        raise ConfigError("--against bare: vLLM has a model, and no protection that could be left out")
    with tempfile.TemporaryDirectory(prefix="semel-prove-model-") as scratch:
        shape = Shape(
            settings.model or build(_FAMILY, Path(scratch) / _FAMILY),
            1 if is_bare else settings.frontends,
            0 if is_bare else settings.workers,
            settings.transport,
            has_engines=not settings.modelless,
            engine_flags=tuple(flags) if settings.model else (*ENGINE_FLAGS, *flags),
            is_tiny=settings.model is None,
            without=settings.without,
            is_bare=is_bare,
        )
        mix = Mix(settings.requests, settings.seed, settings.images)
        options = Options(shape, mix, settings.fault_interval_s, settings.concurrency, settings.references)
        with shown_progress("semel prove") as tell:
            page = uvloop.run(until_stopped(prove(options, tell)))
    base = settings.report.with_suffix("") if settings.report.suffix in (".md", ".json") else settings.report
    base.parent.mkdir(parents=True, exist_ok=True)
    base.with_name(base.name + ".md").write_text(page.to_markdown())
    base.with_name(base.name + ".json").write_text(page.to_json())
    Console().print(page.to_markdown(), highlight=False, markup=False, soft_wrap=True)
    typer.echo(f"the page is {base.name}.md and {base.name}.json")
    return int(not page.ok)
