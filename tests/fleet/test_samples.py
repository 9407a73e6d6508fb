"""What a frontend shows of its workers: by state always, each by itself unless that is switched off."""

from __future__ import annotations

from pathlib import Path

from semel.fleet.fleet import Fleet, fleet_samples
from semel.telemetry.metrics import WORKERS
from tests.waiting import until
from tests.worker.pairing import rig


def states(fleet: Fleet) -> dict[str, float]:
    return {labels[0]: value for metric, value, labels in fleet_samples(fleet) if metric is WORKERS}


async def test_workers_are_counted_by_state_and_each_by_itself_unless_that_is_switched_off(tmp_path: Path) -> None:
    async with rig(tmp_path, frontends=2) as made:
        fleet = Fleet(frontend.worker for frontend in made.frontends)
        assert states(fleet) == {"serving": 2, "ejected": 0, "refused": 0, "not_connected": 0}
        named = [labels for _, _, labels in fleet_samples(fleet) if made.listener.address in labels]
        assert len(named) >= 6
        few = list(fleet_samples(fleet, per_worker=False))
        assert not [labels for _, _, labels in few if made.listener.address in labels]
        assert len(few) == 4
        await made.worker.drain(0)
        await until(lambda: states(fleet)["not_connected"] == 2)
