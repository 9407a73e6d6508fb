"""Plots of simulated runs. Each is readable by itself: its title states the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError
from semel.lab.simulate.figures import Figures, Times

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["draw"]

_COLOURS: Final = ("#0b7a75", "#9aa0a6")
_SIZE: Final = (7.5, 3.2)


def draw(runs: Mapping[str, Figures], folder: Path) -> list[Path]:
    """Draw the plots of one run, or of two next to each other. Returns their files."""
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: `pip install matplotlib`") from None
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, drawing in (("first_token", _first_tokens), ("loads", _loads), ("work", _work)):
        canvas = matplotlib.figure.Figure(figsize=_SIZE, layout="constrained")
        drawing(canvas, runs)
        path = folder / f"{name}.png"
        canvas.savefig(path, dpi=110, facecolor="white")
        made.append(path)
    return made


def _first_tokens(canvas: Canvas, runs: Mapping[str, Figures]) -> None:
    """Plot the share of requests that have their first token after so long."""
    p99 = ", ".join(f"{name} {Times.of(run.first_token_s).p99:.2f} s" for name, run in runs.items())
    axes = _axes(canvas, f"Time to the first token, 99 of 100 requests within: {p99}")
    for (name, run), colour in zip(runs.items(), _COLOURS, strict=False):
        ordered = sorted(run.first_token_s)
        points = ordered[:: max(1, len(ordered) // 1_000)]
        shares = [place / max(1, len(points) - 1) * 100 for place in range(len(points))]
        axes.plot(points, shares, color=colour, label=name, linewidth=1.8)
    limits = [Times.of(run.first_token_s).p99 for run in runs.values()]
    axes.set_xlim(0, 1.3 * max(limits, default=1.0) or 1.0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of requests")
    axes.legend(frameon=False, loc="lower right")


def _loads(canvas: Canvas, runs: Mapping[str, Figures]) -> None:
    """Plot how often a worker had so many requests."""
    most = ", ".join(f"{name} {Times.of(run.loads).max:.0f}" for name, run in runs.items())
    axes = _axes(canvas, f"Requests at a worker; the most at any time: {most}")
    for number, ((name, run), colour) in enumerate(zip(runs.items(), _COLOURS, strict=False)):
        counts: dict[int, int] = {}
        for load in run.loads:
            counts[int(load)] = counts.get(int(load), 0) + 1
        total = max(1, len(run.loads))
        width = 0.8 / len(runs)
        places = [load + (number - (len(runs) - 1) / 2) * width for load in sorted(counts)]
        axes.bar(places, [counts[load] / total * 100 for load in sorted(counts)], width, color=colour, label=name)
    axes.set_xlabel("requests")
    axes.set_ylabel("% of the time")
    axes.legend(frameon=False)


def _work(canvas: Canvas, runs: Mapping[str, Figures]) -> None:
    """Plot the work that is done more than once for each image."""
    encodes = ", ".join(f"{name} {_each(run, run.encodes):.2f}" for name, run in runs.items())
    axes = _axes(canvas, f"Encodes of each image: {encodes}")
    rows = ("encoded", "sent to a worker", "preprocessed")
    for number, ((name, run), colour) in enumerate(zip(runs.items(), _COLOURS, strict=False)):
        values = [_each(run, run.encodes), _each(run, run.features_sent), _each(run, run.preprocessed)]
        width = 0.8 / len(runs)
        places = [row + (number - (len(runs) - 1) / 2) * width for row in range(len(rows))]
        axes.barh(places, values, width, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.2f}", (value, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color="#444", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("times for each image")
    axes.margins(x=0.3)
    axes.legend(frameon=False)


def _each(run: Figures, count: int) -> float:
    return count / run.distinct_items if run.distinct_items else 0.0


def _axes(canvas: Canvas, title: str) -> Any:
    axes = canvas.subplots()
    canvas.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes
