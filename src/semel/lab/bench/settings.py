"""The settings of the benchmarks' command lines. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from semel.core.flag import flag, same_flag, section

__all__ = [
    "OPENED_PER_S",
    "SCENARIO_NAMES",
    "BatchBenchOptions",
    "BatchBenchSettings",
    "CompareSettings",
    "FleetOptions",
    "FleetSettings",
    "ReportSettings",
    "StreamsOptions",
    "StreamsSettings",
    "VerifySettings",
]

OPENED_PER_S: Final = 100
"""Minimum number of streams opened per second. The first streams run longer by the time that opening takes."""


SCENARIO_NAMES: Final = (
    *("text", "answers", "new", "again", "conversation", "agent", "repeats", "rollouts", "pages", "video"),
    *("evicted", "generate", "render", "mixed", "saturation", "memory", "frontends", "restart"),
)
"""The scenarios of `semel bench serve`, in the order in which they run."""


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """The effort of a benchmark, and the files for its figures."""

    quick: bool = flag(False, help="Finish within a minute; the figures are rougher.", group="Measurement")
    as_json: bool = flag(False, "json", help="Print one JSON object instead of a table.", group="Output")
    plot: Path | None = flag(None, help="Draw the figures to this PNG file.", group="Output")


@dataclass(frozen=True, slots=True)
class StreamsOptions:
    """The options of `semel bench streams`."""

    streams: int = flag(2_000, help="Number of streams open at the same time.", group="Measurement", min=1)
    rate: float = flag(5.0, help="Tokens per second of each stream.", group="Measurement", min=0.1)
    seconds: float = flag(
        20.0, help="How long all streams are open, in seconds.", group="Measurement", unit="seconds", min=1
    )
    phases: int = flag(1, help="Number of groups of streams that get their tokens in turn.", group="Measurement", min=1)
    """1: every stream gets its token in the same step."""

    @property
    def tokens(self) -> int:
        """Tokens of each stream: enough to run until the last stream has been open for `seconds`."""
        return int(self.rate * (self.seconds + self.streams / OPENED_PER_S)) + 1


@dataclass(frozen=True, slots=True)
class StreamsSettings:
    """The settings of `semel bench streams`."""

    load: StreamsOptions = section(StreamsOptions)
    report: ReportSettings = section(ReportSettings)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options of `semel bench fleet`."""

    workers: int = flag(1_000, help="Number of workers to choose from.", group="Measurement", min=2, max=10_000)
    sessions: int = flag(1_000, help="Number of sessions with one worker.", group="Measurement", min=1, max=1_000)
    items: int = flag(6_400, help="Items that a worker announces to each session.", group="Measurement", min=1)
    seconds: float = flag(
        10.0, help="How long an idle worker is watched, in seconds.", group="Measurement", unit="seconds", min=1
    )


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The settings of `semel bench fleet`."""

    size: FleetOptions = section(FleetOptions)
    report: ReportSettings = section(ReportSettings)


@dataclass(frozen=True, slots=True)
class BatchBenchOptions:
    """The options of `semel bench batch`."""

    lines: int = flag(2_000, help="Number of lines in a batch file.", group="Measurement", min=10)
    images: int = flag(300, help="Number of different images in it.", group="Measurement", min=1)
    streams: int = flag(32, help="Number of requests in flight.", group="Measurement", min=1, max=1_000)
    kills: int = flag(5, help="How often the client is killed.", group="Measurement", min=0)
    rounds: int = flag(3, help="Number of batch files for each side.", group="Measurement", min=1)


@dataclass(frozen=True, slots=True)
class BatchBenchSettings:
    """The settings of `semel bench batch`."""

    size: BatchBenchOptions = section(BatchBenchOptions)
    report: ReportSettings = section(ReportSettings)


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """The settings of `semel bench serve` besides vLLM's flags."""

    model: str | None = flag(
        None,
        help="A model folder, or a model's name on the Hugging Face hub, for both servers.",
        group="Measurement",
        is_positional=True,
        default_text="a tiny model made for the run",
    )
    baseline: str | None = flag(None, help="URL of a running vLLM server; needs --semel.", group="Measurement")
    semel: str | None = flag(None, help="URL of a running semel; needs --baseline.", group="Measurement")
    api_key: str | None = flag(None, help="API key of these two servers.", group="Measurement")
    only: tuple[str, ...] = flag(
        (),
        help=f"Scenarios to run: {', '.join(SCENARIO_NAMES)}.",
        group="Measurement",
        default_text="all but evicted and restart",
    )
    quick: bool = flag(
        False,
        help="Fewer rounds: faster, and rougher figures; about 4 minutes for one scenario, with both starts.",
        group="Measurement",
    )
    transport: Literal["ipc", "tcp"] = flag(
        "ipc",
        help="How semel's frontend reaches its worker: ipc and shared memory, or tcp (encrypted), as on two machines.",
        group="Measurement",
    )
    semel_source: Path | None = flag(
        None,
        help="Another checkout of semel, installed in its .venv: measured in the place of bare vLLM (serving CPU, "
        "context switches and latency of a text, a repeated image, a token and an answer of 128 tokens).",
        group="Measurement",
    )
    door: bool = flag(
        False,
        help="Also measure vLLM's own server with semel inside: SEMEL=1, or the levels that SEMEL names here.",
        group="Measurement",
    )
    stages: bool = flag(False, help="Also show where semel's time goes, by stage.", group="Output")
    check: bool = flag(False, help="Exit with code 1 if a target is missed.", group="Output")
    as_json: bool = flag(False, "json", help="Print one JSON object instead of a table.", group="Output")
    plot: Path | None = flag(None, help="Draw the figures into this folder.", group="Output")


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """The options of `semel verify` besides vLLM's flags."""

    model: str | None = same_flag(CompareSettings, "model")
    baseline: str | None = same_flag(CompareSettings, "baseline")
    semel: str | None = same_flag(CompareSettings, "semel")
    api_key: str | None = same_flag(CompareSettings, "api_key")
    only: tuple[str, ...] = flag(
        (),
        help="Scenarios of `semel bench serve` to measure.",
        group="Measurement",
        default_text="text, new, again and repeats",
    )
    full: bool = flag(False, help="As many rounds as `semel bench serve`: slower, and surer.", group="Measurement")
    capabilities: bool = flag(
        False,
        help="Start semel alone, with an embedding tier, and print what it proves at its start; with --semel, what the "
        "worker with this --admin-port has proven.",
        group="Measurement",
    )
    draw_seed: int | None = flag(
        None, help="Seed of the drawn images, clips and videos.", group="Measurement", min=0, default_text="a new one"
    )
    report: Path = flag(
        Path("semel-verify"),
        help="Where the report goes: PATH.md and PATH.json, whether PATH ends with one of these or not.",
        group="Output",
    )
