"""`python -m tools.fleet.trace_table [TRACES] [FIRST_SEED]`: what choosing gains over round robin, as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from tools.fleet.trace import AT_ONCE, BUSY, SHORT, Policy, Trace, balanced, draw, least_busy, round_robin, simulate

POLICIES: dict[str, Policy] = {"round robin": round_robin, "least busy": least_busy, "semel": balanced}


def rows(traces: Sequence[Trace]) -> list[str]:
    items, talks = sum(trace.distinct_items for trace in traces), sum(trace.talks for trace in traces)
    outcomes = {name: [simulate(trace, policy) for trace in traces] for name, policy in POLICIES.items()}
    rows = []
    for name, found in outcomes.items():
        ratios = [one.makespan_s / rr.makespan_s for one, rr in zip(found, outcomes["round robin"], strict=True)]
        encodes = sum(one.encodes for one in found) / items
        prefills = sum(one.prefills for one in found) / talks
        over = sum(ratio > 1.05 for ratio in ratios)
        rows.append(f"| {name} | {median(ratios):.2f} | {max(ratios):.3f} | {over} | {encodes:.2f} | {prefills:.2f} |")
    return rows


def main(count: int = 1_000, first: int = 0) -> None:
    out = sys.stdout.write
    for title, kind in (("busy", BUSY), ("at once", AT_ONCE), ("short", SHORT)):
        out(f"\n{title}, seeds {first:,} to {first + count - 1:,}\n\n")
        out("| choice | makespan, median | worst | over 1.05 | encodes per item | prefills per conversation |\n")
        out("|---|---|---|---|---|---|\n")
        out("\n".join(rows([draw(seed, kind) for seed in range(first, first + count)])) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
