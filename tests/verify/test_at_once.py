"""What `semel verify` says of a server that is wrong only while it is asked several questions at a time."""

from __future__ import annotations

import pytest
from aiohttp import web

from semel.lab.bench.serving import statistics
from semel.lab.bench.serving.bench import Effort
from semel.lab.bench.serving.run import Options
from semel.lab.verify.report import Section
from semel.lab.verify.run import Proof, verify
from tests.verify.modelled import Modelled


class Crowded(Modelled):
    """Confuses its answers while there are several."""

    running = 0

    async def _chat(self, request: web.Request) -> web.Response:
        self.running += 1
        try:
            self.fault = "text" if self.running > 1 else None
            return await super()._chat(request)
        finally:
            self.running -= 1


async def test_answers_that_differ_only_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Effort, "of", classmethod(lambda cls, **_: cls(4, 2, 2, 0.1, 8, 2)))
    monkeypatch.setattr(statistics, "_DRAWS", 50)
    async with Crowded(image_s=0.05).serving() as semel, Modelled(image_s=0.05).serving() as vllm:
        options = Options(baseline=vllm, semel=semel, only=("text",), quick=True)
        report = await verify(Proof(options), Section("configuration", "passed", "as it was"), lambda *_: None)
    (parity,) = [section for section in report.sections if section.name == "parity"]
    assert parity.outcome == "failed" and not report.ok
    assert all(", at once only: " in line for line in parity.lines), parity.lines
