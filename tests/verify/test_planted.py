"""`semel verify` with real engines: each of five planted faults is found and named; without one it passes.

By night, since it starts bare vLLM and semel: `pytest -m nightly tests/verify/test_planted.py`.
"""

from __future__ import annotations

import logging

import pytest

from semel.lab.bench.serving.run import Options, running
from semel.lab.verify.report import Section, VerifyReport
from semel.lab.verify.run import Proof, verify
from tests.verify.planted import Planted, PlantedFault

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1_500)]

CONFIGURED = Section("configuration", "passed", "as it was")
CAUSES: dict[PlantedFault, str] = {"option": "processor option", "planes": "swapped planes", "lost": "lost item"}

logger = logging.getLogger(__name__)


def part(report: VerifyReport, name: str) -> Section:
    return next(section for section in report.sections if section.name == name)


async def test_each_of_five_faults_is_found_and_named() -> None:
    async with running(Options(quick=True), ["text", "again"], lambda *_: None) as servers:
        sides = servers.bench.sides

        async def proven(fault: PlantedFault | None, only: str) -> VerifyReport:
            async with Planted(sides.semel.server.url, fault).serving() as url:
                options = Options(baseline=sides.vllm.server.url, semel=url, only=(only,), quick=True)
                report = await verify(Proof(options), CONFIGURED, lambda *_: None)
            logger.info("%s:\n%s", fault, report.to_markdown())
            return report

        right = await proven(None, "text")
        assert part(right, "parity").outcome == part(right, "control").outcome == "passed"
        for fault, cause in CAUSES.items():
            found = part(await proven(fault, "text"), "parity")
            assert found.outcome == "failed"
            assert cause in found.figures["causes"], found
            assert any(line.startswith(cause) for line in found.lines)
        slow = part(await proven("slow", "again"), "speed")
        assert slow.outcome == "failed"
        assert slow.lines[0].startswith("too slow: again: ")
