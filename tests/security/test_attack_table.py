"""What `scripts/attack` calls kept, and what not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.security.attack import GROWTH_BYTES, STOPPED, Line, Seen

ALONE = Seen([0.1] * 40)
KEPT = Line("an attack", "semel two tenants", GROWTH_BYTES, Seen([0.2] * 40, longest_gap_s=1.0), ALONE)
REPLACED = {"noticed": 21.0, "ready again": 60.0}


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        (KEPT, []),
        (replace(KEPT, growth_bytes=GROWTH_BYTES + 1), ["memory"]),
        (replace(KEPT, seen=Seen([0.2] * 40, longest_gap_s=1.1)), ["probe"]),
        (replace(KEPT, seen=Seen([0.21] * 40)), ["p95"]),
        (replace(KEPT, seen=Seen([0.49] * 40, longest_step_s=0.2)), []),
        (replace(KEPT, seen=Seen([0.51] * 40, longest_step_s=0.2)), ["p95"]),
        (replace(KEPT, seen=Seen([0.1] * 99, Counter({"429": 1}))), []),
        (replace(KEPT, seen=Seen([0.1] * 20, Counter(unanswered=20))), ["p95"]),
        (replace(KEPT, seen=Seen()), ["p95"]),
        (replace(KEPT, attack=STOPPED, seen=Seen([], Counter({"503": 40}), events_s=REPLACED)), []),
        (replace(KEPT, attack=STOPPED, seen=Seen(events_s=REPLACED | {"noticed": 31.0})), ["p95"]),
        (replace(KEPT, attack=STOPPED, seen=Seen(events_s={"noticed": 21.0})), ["p95"]),
    ],
)
def test_a_line_is_ok_if_every_promise_is_kept(line: Line, faults: list[str]) -> None:
    assert line.faults() == [f"not ok: {what}" for what in faults]
    assert line.cells()[-1] == ("; ".join(line.faults()) or "ok")
    assert not replace(line, against="semel one tenant").cells()[-1]
