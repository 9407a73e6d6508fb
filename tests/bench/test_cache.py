"""`semel bench cache`: another process really gets the features, with and without vLLM to compare with."""

from __future__ import annotations

import sys

import pytest

from semel.lab.bench import cache as bench
from semel.lab.bench.report import Check
from tests.bench.limits import assert_limits

RING = "vllm.distributed.device_communicators.shm_object_storage"


def measured(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.slow
@pytest.mark.alone
def test_without_vllm_our_side_is_measured_alone_D4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, RING, None)
    handed = measured(list(bench._handing_over(turns=3)))
    assert len(handed) == 6
    assert_limits(handed.values(), slack=3)  # of three turns only
    assert all(check.value > 0 and check.baseline is None for check in handed.values())
    (stuck,) = bench._next_to_a_stuck_one()
    assert (stuck.value, stuck.baseline, stuck.ok) == (100, None, True)


@pytest.mark.alone
def test_looking_up_is_measured_for_both_kinds_D4() -> None:
    looked_up = measured(list(bench._looking_up(turns=3)))
    assert [name.partition(", ")[2] for name in looked_up] == ["in process", "in shared memory"]
    assert all(check.value > 0 for check in looked_up.values())
    assert_limits(looked_up.values(), slack=5)


@pytest.mark.engine
def test_vllms_ring_stores_little_beside_an_item_that_is_never_read_D4() -> None:
    (stuck,) = bench._next_to_a_stuck_one()
    assert stuck.value == 100
    assert stuck.baseline is not None
    assert stuck.baseline < 20
