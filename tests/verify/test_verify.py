"""The whole of `semel verify` beside two modelled servers: each planted fault is found and named."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from semel.lab.bench.serving import statistics
from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Effort
from semel.lab.bench.serving.figures import Row, compared
from semel.lab.bench.serving.run import Options
from semel.lab.bench.serving.statistics import Figure
from semel.lab.verify import run
from semel.lab.verify.questions import drawn_questions
from semel.lab.verify.report import Section, VerifyReport
from semel.lab.verify.run import Proof, capability_section, speed_of, verify
from tests.verify.modelled import Fault, Modelled

DRAWN = cache(drawn_questions)
CONFIGURED = Section("configuration", "passed", "as it was")


@pytest.fixture(autouse=True)
def _little_effort(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test of slow paths looks at what was measured."""
    monkeypatch.setattr(run, "drawn_questions", DRAWN)
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(Effort, "of", classmethod(lambda cls, **_: cls(4, 2, 2, 0.1, 8, 2)))
        monkeypatch.setattr(statistics, "_DRAWS", 50)


async def proven(mine: Fault | Modelled | None, theirs: Modelled | None = None, *, only: str = "text") -> VerifyReport:
    """Prove a server, or one with this fault, next to another."""
    if not isinstance(mine, Modelled):
        mine = Modelled(mine, image_s=0.002)
    async with mine.serving() as semel, (theirs or Modelled(image_s=0.02)).serving() as vllm:
        options = Options(baseline=vllm, semel=semel, only=(only,), quick=True)
        return await verify(Proof(options), CONFIGURED, lambda *_: None)


def part(report: VerifyReport, name: str) -> Section:
    return next(section for section in report.sections if section.name == name)


async def test_equal_servers_pass_and_what_nobody_takes_is_skipped() -> None:
    report = await proven(None)
    outcomes = {section.name: section.outcome for section in report.sections}
    assert outcomes["parity"] == outcomes["control"] == outcomes["once"] == "passed"
    assert outcomes["parity of audio"] == outcomes["parity of video"] == outcomes["self-test"] == "skipped"
    figures = part(report, "parity").figures
    assert figures["questions"] == figures["equal"] == 11


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("option", "processor option"),
        ("planes", "swapped planes"),
        ("values", "values"),
        ("lost", "lost item"),
        ("order", "order"),
        ("refused", "refused"),
        ("text", "text"),
    ],
)
async def test_each_planted_fault_is_named(fault: Fault, cause: str) -> None:
    report = await proven(fault)
    assert not report.ok
    assert part(report, "parity").outcome == "failed"
    assert cause in part(report, "parity").figures["causes"]
    assert part(report, "parity").lines[0].startswith(cause)


async def test_a_modality_that_only_semel_refuses_is_a_difference() -> None:
    report = await proven(Modelled(takes=()))
    assert part(report, "parity").figures["causes"] == ["refused"]


async def test_work_that_is_done_again_is_counted() -> None:
    report = await proven("again")
    assert part(report, "parity").outcome == "passed"
    assert part(report, "once").outcome == "failed"


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


async def test_answers_that_differ_only_at_once_are_found() -> None:
    report = await proven(Crowded(image_s=0.05), Modelled(image_s=0.05))
    parity = part(report, "parity")
    assert parity.outcome == "failed"
    assert not report.ok
    assert all(", at once only: " in line for line in parity.lines), parity.lines


@pytest.mark.slow
async def test_a_slow_path_is_named() -> None:
    # Beside other tests a figure may lie within its error; a path that is not slow never surely is.
    assert part(await proven(None, only="again"), "speed").outcome in ("passed", "unsure")
    slow = part(await proven("slow", only="again"), "speed")
    assert slow.outcome == "failed"
    assert "again: 1024, what the image adds" in slow.lines[0]


async def test_a_server_that_differs_from_itself_proves_nothing() -> None:
    report = await proven(Modelled(), Modelled("noise"))
    assert part(report, "parity").outcome == "unsure"
    assert not report.ok
    assert "**Nothing proven: parity, control.**" in report.to_markdown()


async def test_servers_that_refuse_every_question_prove_nothing() -> None:
    report = await proven(Modelled("mute"), Modelled("mute"))
    assert part(report, "parity").outcome == "unsure"
    assert part(report, "parity").lines == ("Requested 5 logprobs, at most 3 of …",)
    assert part(report, "once").outcome == "skipped"
    assert not report.ok


async def test_a_server_s_own_failure_is_not_a_refusal() -> None:
    """Where bare vLLM says 400 to audio, an answer of 500 is a difference. Control: 400 on both sides is none."""
    assert (await proven(None)).ok
    report = await proven("broken")
    assert part(report, "parity").figures["causes"] == ["refused"]
    assert not report.ok


@pytest.mark.parametrize("outcome", ["unsure", "skipped", None])
@pytest.mark.parametrize("name", ["parity", "control"])
def test_without_answers_that_were_compared_nothing_is_proven(name: str, outcome: Any) -> None:
    """Control: speed may be unsure, or not measured."""
    passed = {one: Section(one, "passed", "") for one in ("configuration", "parity", "control")}
    speed = Section("speed", "unsure", "")
    assert VerifyReport({}, {}, [], (*passed.values(), speed)).ok
    parts = dict(passed)
    if outcome is None:
        del parts[name]
    else:
        parts[name] = Section(name, outcome, "")
    report = VerifyReport({}, {}, [], (*parts.values(), speed))
    assert not report.ok
    assert report.verdict == f"Nothing proven: {name}"


def test_without_a_prefix_cache_a_repeat_has_no_limit_and_everything_else_has() -> None:
    slow = Pair([9.0] * 5, [10.0] * 5)
    rows = [compared("again: 1024, what the image adds", "ms", slow), compared("text: latency", "ms", slow)]
    judged, other = speed_of(rows), speed_of(rows, ["--no-enable-prefix-caching"])
    assert (judged.outcome, other.outcome) == ("failed", "passed")
    assert other.summary == "1 limits kept"
    assert "no limit without a prefix cache" in other.lines[0]
    slower = compared("text: latency", "ms", Pair([19.0] * 5, [10.0] * 5))
    assert speed_of([slower], ["--no-enable-prefix-caching"]).outcome == "failed"


def test_the_limit_that_is_unsure_is_marked_and_comes_first() -> None:
    """Control: a limit that is surely kept is not marked."""
    ratio = Figure(1.1, 1.0, 1.2)
    unsure = Row("text: latency", "ms", Figure(11, 10, 12), Figure(10, 9, 11), ratio)
    sure = compared("again: HD, what the image adds", "ms", Pair([1.0] * 5, [10.0] * 5))
    section = speed_of([sure, unsure])
    assert (section.outcome, "text: latency" in section.summary) == ("unsure", True)
    assert [line.partition(":")[0] for line in section.lines] == ["text", "again"]
    assert [line.endswith("(at most 1.15), unsure") for line in section.lines] == [True, False]


@pytest.mark.parametrize(
    ("states", "outcome"),
    [(("proven", "off"), "failed"), (("proven", "absent"), "passed"), (("absent",) * 2, "skipped")],
)
def test_a_part_that_failed_at_the_start_of_a_worker_fails_the_proof(states: tuple[str, ...], outcome: str) -> None:
    found = dict(zip(("host_tier", "lazy_transfer"), states, strict=True))
    section = capability_section(found, ["lazy_transfer is switched off for this run: why"] if "off" in states else [])
    assert section.outcome == outcome
    assert (section.lines[:1] == ("lazy_transfer is switched off for this run: why",)) == (outcome == "failed")


async def test_a_configuration_that_is_not_supported_starts_nothing() -> None:
    refused = Section("configuration", "failed", "not supported")
    report = await verify(Proof(Options(model="nowhere")), refused, lambda *_: None)
    assert not report.ok
    assert [section.outcome for section in report.sections] == ["failed", *["skipped"] * 5]


@pytest.mark.slow
async def test_a_server_that_does_not_start_is_told_without_its_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(model=str(tmp_path / "secret-model"), only=("text",), quick=True)
    report = await verify(Proof(options), CONFIGURED, lambda *_: None)
    assert part(report, "start").outcome == "failed"
    assert "secret-model" in capsys.readouterr().err, "the terminal has the server's own words"
    assert "secret-model" not in report.to_markdown() + report.to_json()


def test_nothing_of_the_user_is_in_a_report(tmp_path: Path) -> None:
    from semel.lab.verify.report import describe_flags, describe_model

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"], "model_type": "a", "_name": "secret"}))
    model = describe_model(str(tmp_path))
    flags = describe_flags(
        ["--tensor-parallel-size", "2", "--chat-template=/home/secret/t.jinja", "--served-model-name", "our secret"]
    )
    text: Any = VerifyReport({}, model, flags, (CONFIGURED,)).to_markdown()
    assert "secret" not in text.replace("--served-model-name", "")
    assert flags == ["--tensor-parallel-size", "2", "--chat-template=…", "--served-model-name", "…"]
    assert model["architectures"] == ["A"]
