"""Plots of a report. Each is readable by itself: its title states the result, and every bar is labelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError
from semel.lab.bench.serving.figures import Row
from semel.lab.bench.serving.report import ServeReport, format_figure
from semel.lab.bench.serving.statistics import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["Drawing", "draw", "drawings"]

_SEMEL: Final = "#0b7a75"
_VLLM: Final = "#9aa0a6"
_MISSED: Final = "#c0392b"
_WIDTH: Final = 9.0
_PANEL_WIDTH: Final = 6.5
_TURNS_HEIGHT: Final = 4.0
_LINES: Final = (_SEMEL, "#e08e0b", "#7b4fa3")
_FLOOR: Final = "in process"


@dataclass(frozen=True, slots=True)
class Drawing:
    """Rows that are drawn together."""

    file: str
    title: str
    rows: tuple[Row, ...]


def draw(report: ServeReport, folder: Path) -> list[Path]:
    """Draw all plots of a report. Returns their files."""
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: `pip install matplotlib`") from None
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    painters = {"agent.png": _draw_turns, "ttft.png": _draw_turns, "limits.png": _draw_limits}
    for drawing in drawings([row for row in report.rows if not row.is_door]):
        paint = painters.get(drawing.file, _draw_bars)
        height = _TURNS_HEIGHT if paint is _draw_turns else 1.4 + 0.75 * len(drawing.rows)
        width = _PANEL_WIDTH if drawing.file == "ttft.png" else _WIDTH
        canvas = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
        paint(canvas, drawing)
        canvas.savefig(folder / drawing.file, dpi=130, facecolor="white")
        made.append(folder / drawing.file)
    return made


def drawings(rows: Sequence[Row]) -> Iterator[Drawing]:
    """Yield the plots that a report allows."""
    named = {row.name: row for row in rows}
    adds = [row for row in rows if row.name.endswith("what the image adds") and row.vllm is not None]
    if adds:
        times = ", ".join(f"{_size(row)}: {row.ratio.value:.2f}×" for row in adds if row.ratio is not None)
        yield Drawing("again.png", f"What the same image, shown again, adds to a request ({times})", tuple(adds))
    latencies = [row for row in rows if _is_latency(row) and row.ratio is not None]
    if latencies:
        ratios = [row.ratio.value for row in latencies if row.ratio is not None and row.scenario != "text"]
        span = f": with images in {min(ratios):.2f} to {max(ratios):.2f} of vLLM's time" if ratios else ""
        yield Drawing("latency.png", f"What was shown before, and rendering{span}", tuple(latencies))
    grown = [row for row in rows if row.turns is not None]
    if grown:
        yield Drawing("agent.png", _agent_title(grown), tuple(grown))
        if served := [row for row in grown if _FLOOR not in row.name]:
            yield Drawing("ttft.png", "TTFT of an agent that resends its screenshots", tuple(served))
    if (sent := named.get("frontends: tensor bytes between processes, per repeat")) is not None:
        title = (
            f"Two frontends: a repeat ships {_bytes(sent.semel.value)} of tensors; vLLM ships {_bytes_of(sent.vllm)}"
        )
        yield Drawing("bytes.png", title, (sent, named["frontends: all bytes between processes, per repeat"]))
    full = [row for row in rows if row.scenario == "saturation" and row.vllm is not None and row.unit == "1/s"]
    if full:
        times = ", ".join(f"{row.ratio.value:.2f}×" for row in full if row.ratio is not None)
        yield Drawing("throughput.png", f"Requests per second, 16 at a time: {times} of vLLM's", tuple(full))
    work = [row for row in rows if row.scenario == "rollouts" and not row.unit and row.vllm is not None]
    if work:
        title = "16 answers about one new image: how often it is decoded and preprocessed"
        yield Drawing("rollouts.png", title, tuple(work))
    jobs = [row for row in rows if row.scenario in ("rollouts", "pages") and row.unit == "1/s"]
    if jobs:
        times = ", ".join(f"{row.ratio.value:.2f}×" for row in jobs if row.ratio is not None)
        yield Drawing("jobs.png", f"Groups of answers, and new pages, per second: {times} of vLLM's", tuple(jobs))
    limited = [row for row in rows if row.limit is not None and row.limit.of == "ratio" and row.ratio is not None]
    if limited:
        kept = sum(bool(row.ok) for row in limited)
        yield Drawing("limits.png", f"Ratio to bare vLLM: {kept} of {len(limited)} limits are kept", tuple(limited))


def _agent_title(rows: Sequence[Row]) -> str:
    ratios = {row.name: row.ratio.value for row in rows if row.ratio is not None}
    parts = [
        f"{_way(name)} {value:.2f}× of {'the engine' if _FLOOR in name else 'vLLM'}'s" for name, value in ratios.items()
    ]
    return "What a screen of the history adds to a turn:\n" + "; ".join(parts)


def _way(name: str) -> str:
    return name.split(", ")[1]


def _draw_turns(canvas: Canvas, drawing: Drawing) -> None:
    """Lines over the turns: next to vLLM's server, and next to its engine in process on a scale of its own."""
    panels = [[row for row in drawing.rows if (_FLOOR in row.name) is is_floor] for is_floor in (False, True)]
    panels = [panel for panel in panels if panel]
    for axes, panel in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        who = "vLLM's engine in process" if _FLOOR in panel[0].name else "vLLM, data URLs"
        assert panel[0].turns is not None
        _draw_line(axes, panel[0].turns.vllm, f"{who}: {_slope(panel[0].vllm)}", _VLLM)
        for row, colour in zip(panel, _LINES, strict=False):
            assert row.turns is not None
            _draw_line(axes, row.turns.semel, f"semel, {_way(row.name)}: {_slope(row.semel)}", colour)
        axes.set_xlabel("images in the conversation")
        axes.set_ylabel("time to the first token, ms")
        axes.set_ylim(0, _top([series for row in panel if row.turns for series in (row.turns.semel, row.turns.vllm)]))
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    canvas.suptitle(drawing.title, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _top(series: Sequence[Sequence[float]]) -> float:
    """Return where the axis ends: a turn that took far longer than almost all others does not flatten the lines."""
    values = sorted(value for one in series for value in one)
    return 1.5 * values[int(0.95 * (len(values) - 1))]


def _draw_line(axes: Any, series: Sequence[float], label: str, colour: str) -> None:
    axes.plot(range(1, len(series) + 1), series, color=colour, label=label, linewidth=1.5)


def _slope(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure.value:.3g} ms per image"


def _draw_bars(canvas: Canvas, drawing: Drawing) -> None:
    """Both sides of each row, as bars with their errors."""
    axes = _axes(canvas, drawing)
    for place, row in enumerate(reversed(drawing.rows)):
        for offset, figure, colour, who in ((0.2, row.semel, _SEMEL, "semel"), (-0.2, row.vllm, _VLLM, "vLLM")):
            if figure is None:
                continue
            axes.barh(place + offset, figure.value, 0.36, color=colour)
            if figure.low < figure.high:
                axes.plot([figure.low, figure.high], [place + offset] * 2, color="#444", linewidth=1.5)
            _label(axes, f"{who} {format_figure(figure)} {row.unit}", figure.high, place + offset)
    axes.set_xlim(left=0)
    axes.margins(x=0.4)
    axes.set_xticks([])


def _draw_limits(canvas: Canvas, drawing: Drawing) -> None:
    """Each ratio as a point with its error, and its limit as a mark."""
    axes = _axes(canvas, drawing)
    for place, row in enumerate(reversed(drawing.rows)):
        assert row.ratio is not None
        assert row.limit is not None
        colour = _SEMEL if row.ok else _MISSED
        axes.plot([row.ratio.low, row.ratio.high], [place, place], color=colour, linewidth=3, solid_capstyle="butt")
        axes.plot(row.ratio.value, place, "o", color=colour)
        axes.plot([row.limit.value] * 2, [place - 0.3, place + 0.3], color="#222", linestyle="--")
        sign, kept = "≤" if row.limit.kind == "at most" else "≥", "kept" if row.ok else "not kept"
        label = f"{row.ratio.value:.2f}× (limit {sign} {row.limit.value:g}×, {kept})"
        _label(axes, label, max(row.ratio.high, row.limit.value), place)
    axes.axvline(1.0, color=_VLLM, linewidth=1, zorder=0)
    axes.annotate("bare vLLM = 1", (1.0, -0.6), ha="center", fontsize=8, color="#555")
    axes.set_xlim(left=0)
    axes.margins(x=0.3)


def _label(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color="#222")


def _axes(canvas: Canvas, drawing: Drawing) -> Any:
    axes = canvas.subplots()
    names = [row.name.replace(": ", ":\n", 1) for row in reversed(drawing.rows)]
    axes.set_yticks(range(len(drawing.rows)), names, fontsize=9)
    canvas.suptitle(drawing.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    return axes


def _is_latency(row: Row) -> bool:
    """Exclude new images and long answers: most of their time is the engine's, which is vLLM's on both sides."""
    ends = (": latency", ", latency", "vLLM's with tensors", "vLLM's by hash", ", per image")
    return row.unit == "ms" and row.scenario not in ("new", "answers") and row.name.endswith(ends)


def _size(row: Row) -> str:
    return row.name.partition(": ")[2].partition(",")[0]


def _bytes_of(figure: Any) -> str:
    return "an unknown number" if figure is None else _bytes(figure.value)


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count:,.0f} bytes"
