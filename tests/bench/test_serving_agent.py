"""The parts of `semel bench serve --only agent` that need no engine: screens, conversations, slopes, rows, drawings."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semel.errors import ConfigError, ServiceError
from semel.lab.bench.serving import plots, screens, statistics
from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Effort, Side
from semel.lab.bench.serving.client import Answer, Client
from semel.lab.bench.serving.figures import LIMITS, Row, checks_of, grown
from semel.lab.bench.serving.floor import EngineAnswer, Floor
from semel.lab.bench.serving.images import Images
from semel.lab.bench.serving.plots import draw, drawings
from semel.lab.bench.serving.report import ServeReport
from semel.lab.bench.serving.scenarios.agent import (
    Look,
    Talk,
    agent_rows,
    by_reference,
    compare_with_engine,
    continued,
    inline,
    turns_that_fit,
)
from semel.lab.bench.serving.screens import HEIGHT, WIDTH, Screens
from semel.lab.bench.serving.servers import Server
from semel.lab.bench.serving.statistics import slope_of, slope_ratio
from semel.lab.bench.serving.work import Work
from tests.bench.limits import assert_limits

TURNS = 50


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """How exact an interval is, is for tests/bench/test_serving_statistics.py."""
    monkeypatch.setattr(statistics, "_DRAWS", 100)


# Screens.


def check_screens(make: Callable[[int], Screens]) -> None:
    one, other = make(1), make(2)
    drawn = [one.draw() for _ in range(3)]
    assert len({*drawn, other.draw()}) == 4
    assert make(1).draw() == drawn[0]
    for png in drawn:
        image = Image.open(io.BytesIO(png))
        assert (image.format, image.size) == ("PNG", (WIDTH, HEIGHT)) == ("PNG", (1_280, 720))
        assert 150_000 <= len(png) <= 400_000


def test_every_screen_is_new_and_a_png_as_large_as_a_screenshot() -> None:
    check_screens(Screens)


def test_a_mutant_that_draws_the_same_screen_again_is_found() -> None:
    class Still(Screens):
        def draw(self) -> bytes:
            self.drawn = 0
            return super().draw()

    with pytest.raises(AssertionError):
        check_screens(Still)


def test_a_mutant_without_a_photo_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "_photo", lambda _: Image.new("RGB", (9, 9)))
    with pytest.raises(AssertionError):
        check_screens(Screens)


# Slopes.


def series(slope: float, *, seed: int, count: int = TURNS, start: float = 80.0, noise: float = 2.0) -> list[float]:
    """A line with noise, and a tenth of turns that took far longer, the first one among them."""
    chance = random.Random(seed)
    values = [start + slope * turn + chance.gauss(0, noise) for turn in range(count)]
    for turn in {0, *chance.sample(range(count), count // 10)}:
        values[turn] += 400
    return values


def check_slope_resists() -> None:
    for seed in range(5):
        figure = slope_of(series(3.0, seed=seed))
        assert figure.value == pytest.approx(3.0, rel=0.15)
        assert figure.low <= 3.05
        assert figure.high >= 2.95
        assert figure.high - figure.low < 1.0


def test_a_slope_is_that_of_the_line_though_some_turns_took_far_longer() -> None:
    check_slope_resists()


def test_a_mutant_that_fits_by_least_squares_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def least_squares(values: Any, rounds: Any) -> Any:
        return np.asarray([np.polyfit(at, value, 1)[0] for value, at in zip(values, rounds, strict=True)])

    monkeypatch.setattr(statistics, "_slope", least_squares)
    with pytest.raises(AssertionError):
        check_slope_resists()


def test_a_constant_that_one_side_adds_to_every_turn_is_not_in_a_ratio_of_slopes() -> None:
    mine, theirs = series(2.0, seed=1, start=500), series(20.0, seed=2, start=10)
    assert slope_ratio(mine, theirs).value == pytest.approx(0.1, rel=0.1)


def test_a_slope_of_a_single_turn_is_none_and_no_ratio_to_it_meets_a_limit() -> None:
    assert slope_of([7.0]).value == 0
    assert slope_ratio([1.0, 2.0], [3.0, 3.0]).value == float("inf")
    assert slope_of([1.0, 3.0]).value == 2


# Conversations.


@pytest.fixture
def plain_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Screens of as many bytes that nobody has to draw."""

    def draw(one: Screens) -> bytes:
        one.drawn += 1
        return random.Random(f"{one.seed}/{one.drawn}").randbytes(200_000)

    monkeypatch.setattr(Screens, "draw", draw)


plain = pytest.mark.usefixtures("plain_screens")


@plain
def test_every_turn_sends_all_earlier_messages_byte_by_byte_and_one_new_screen() -> None:
    talk = Talk(Screens(1), {"max_pixels": 9})
    first, second, third = (json.loads(talk.next()) for _ in range(3))
    assert [len(body["messages"]) for body in (first, second, third)] == [1, 3, 5]
    assert third["messages"][:3] == second["messages"]
    assert second["messages"][:1] == first["messages"]
    urls = re.findall(r"data:image/png;base64,[^\"]+", json.dumps(third))
    assert len(set(urls)) == 3
    assert third["mm_processor_kwargs"] == {"max_pixels": 9}
    assert third["max_tokens"] == 1
    assert "mm_processor_kwargs" not in json.loads(Talk(Screens(1), {}).next())


@pytest.mark.parametrize(
    ("max_tokens", "first", "second", "turns"),
    [(16_384, 290, 570, 58), (571, 290, 570, 2), (570, 290, 570, 1), (10, 290, 570, 1)],
)
def test_as_many_turns_as_the_context_has_room_for(max_tokens: int, first: int, second: int, turns: int) -> None:
    assert turns_that_fit(max_tokens, first, second) == turns
    if turns > 1:
        assert first + (turns - 1) * (second - first) + 1 <= max_tokens


class Fake(Client):
    """A server that returns ids, and can forget what it knows."""

    def __init__(self, status: int = 200, seconds: float = 0.25) -> None:
        super().__init__("http://127.0.0.1:1")
        self.bodies: list[Any] = []
        self.known: set[str] = set()
        self.status = status
        self.seconds = seconds

    async def ask(self, path: str, body: bytes, *, accept: str = "*/*") -> Answer:  # noqa: ARG002
        await asyncio.sleep(0)
        asked = json.loads(body)
        self.bodies.append(asked)
        images = [part["image_url"] for part in _parts(asked) if part["type"] == "image_url"]
        ids = [image.get("file_id") or f"file-{hash(image['url']) & (1 << 256) - 1:064x}" for image in images]
        if any("file_id" in image and image["file_id"] not in self.known for image in images):
            return Answer(404, b'{"error": {"code": "unknown_media"}}', 0.5)
        self.known |= set(ids)
        usage = {"prompt_tokens": 10 * len(images)}
        return Answer(self.status, json.dumps({"usage": usage, "media_ids": ids}).encode(), self.seconds)


def _parts(body: Any) -> list[Any]:
    return [part for message in body["messages"] if isinstance(message["content"], list) for part in message["content"]]


async def check_each_screen_is_sent_once(server: Fake) -> None:
    talk, ask = Talk(Screens(3), {}), by_reference(server)
    looks = [await ask(talk.next()) for _ in range(4)]
    assert [json.dumps(body).count("data:image/png") for body in server.bodies] == [1, 1, 1, 1]
    assert [look.latency_ms for look in looks] == [250.0] * 4
    assert [look.prompt_tokens for look in looks] == [10, 20, 30, 40]
    assert max(look.sent_bytes for look in looks) < 1.5 * min(look.sent_bytes for look in looks)


@plain
async def test_by_reference_each_screen_is_sent_once_and_what_is_sent_is_counted_and_timed() -> None:
    await check_each_screen_is_sent_once(Fake())


@plain
async def test_what_continues_a_response_sends_the_newest_screen_and_the_id_of_the_one_before() -> None:
    class Storing(Fake):
        async def ask(self, path: str, body: bytes, *, accept: str = "*/*") -> Answer:  # noqa: ARG002
            self.bodies.append(json.loads(body))
            answer = {"id": f"resp_{len(self.bodies)}", "usage": {"input_tokens": 10 * len(self.bodies)}}
            return Answer(200, json.dumps(answer).encode(), 0.25)

    server = Storing()
    ask, talk = continued(server), Talk(Screens(3), {"max_pixels": 9})
    looks = [await ask(talk.next()) for _ in range(3)]
    assert [body["previous_response_id"] for body in server.bodies] == [None, "resp_1", "resp_2"]
    assert [len(body["input"]) for body in server.bodies] == [1] * 3
    assert len({json.dumps(body["input"]) for body in server.bodies}) == 3
    assert [json.dumps(body).count("data:image/png") for body in server.bodies] == [1] * 3
    assert server.bodies[0]["mm_processor_kwargs"] == {"max_pixels": 9}
    assert [(look.latency_ms, look.prompt_tokens) for look in looks] == [(250.0, 10), (250.0, 20), (250.0, 30)]


@plain
async def test_a_mutant_server_that_returns_no_ids_is_found() -> None:
    class Forgetful(Fake):
        async def ask(self, path: str, body: bytes, *, accept: str = "*/*") -> Answer:
            answer = await super().ask(path, body, accept=accept)
            return replace(answer, body=json.dumps({"usage": {"prompt_tokens": 1}}).encode())

    with pytest.raises(AssertionError):
        await check_each_screen_is_sent_once(Forgetful())


@plain
async def test_what_is_sent_again_counts_again() -> None:
    server, talk = Fake(), Talk(Screens(3), {})
    ask = by_reference(server)
    first = await ask(talk.next())
    server.known.clear()
    second = await ask(talk.next())
    assert len(server.bodies) == 3
    assert second.sent_bytes > 1.9 * first.sent_bytes
    assert second.latency_ms == 750.0


@plain
async def test_the_work_of_the_client_is_timed_apart() -> None:
    server = Fake(seconds=0.0)
    look = await by_reference(server)(Talk(Screens(1), {}).next())
    assert look.latency_ms == 0 < look.client_ms
    assert (await inline(server)(Talk(Screens(1), {}).next())).client_ms == 0


@plain
async def test_a_refusal_ends_the_run_and_is_shown() -> None:
    server = Fake(status=500)
    for ask in (inline(server), by_reference(server)):
        with pytest.raises(ServiceError, match="answers 500"):
            await ask(Talk(Screens(1), {}).next())


# The engine in process.


_ENGINE = """
import json, sys
print(json.dumps({"max_tokens": 64}), flush=True)
for line in sys.stdin:
    images = line.count('"image_url": {')
    if images > int(sys.argv[1]):
        sys.exit("no more")
    took = {"seconds": 0.01 * images, "cpu_s": 0.02 * images, "prompt_tokens": 10 * images}
    print(json.dumps(took), flush=True)
"""


@contextmanager
def floor_of(tmp_path: Path, images: int) -> Iterator[Floor]:
    """A process that answers as the engine's does, for chats of so many images at most."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", _ENGINE, str(images)]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output) as process,
    ):
        try:
            yield Floor(process, log)
        finally:
            process.kill()


@plain
@pytest.mark.timeout(60)
async def test_semel_and_the_engine_in_process_take_turns_as_far_as_the_context_goes(tmp_path: Path) -> None:
    bench = Bench(Pair(*[Side(Server(()), Fake())] * 2), None, Images(1), Effort.of(quick=True), lambda *_: None)
    server = Fake()
    with floor_of(tmp_path, images=99) as floor:
        await floor.start()
        slopes, last = await compare_with_engine(bench, by_reference(server), floor)
    assert slopes.turns is not None
    assert len(slopes.turns.semel) == 6  # 10 tokens each, and one of the answer, within 64
    assert slopes.turns.vllm == pytest.approx([10, 20, 30, 40, 50, 60])
    assert slopes.vllm is not None
    assert slopes.vllm.value == pytest.approx(10)
    assert slopes.limit is not None
    assert last.vllm is not None
    assert last.vllm.value == pytest.approx(35)


@plain
@pytest.mark.timeout(60)
async def test_an_engine_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with floor_of(tmp_path, images=1) as floor:
        await floor.start()
        talk = Talk(Screens(1), {})
        assert await floor.ask(talk.next()) == EngineAnswer(0.01, 0.02, 10)
        with pytest.raises(ConfigError, match="no more"):
            await floor.ask(talk.next())


# Rows.


def looks(slope: float, work: Work | None, *, sent: Callable[[int], int], seed: int = 1) -> list[Look]:
    return [
        Look(value, sent(turn), 10 * turn, 0.1 * turn, work)
        for turn, value in enumerate(series(slope, seed=seed), start=1)
    ]


def measured(*, inline_slope: float = 2.0, sent: int = 1_000, encoded: float | None = 1.0) -> list[Row]:
    bare = looks(25.0, Work(TURNS / 2, 1), sent=lambda turn: turn * 1_000)
    mine = looks(inline_slope, Work(1, 1, encoded), sent=lambda turn: turn * 1_000)
    flat = looks(0.4, Work(1, 1, encoded), sent=lambda _: sent)
    return agent_rows(bare, mine, flat, flat)


def compared_row(slope: float) -> Row:
    name = "agent: per image of history, by reference, next to the engine in process"
    return grown(name, "ms", Pair(series(slope, seed=1), series(0.4, seed=2, noise=0.1)))


def all_rows(**changes: Any) -> list[Row]:
    slope = changes.pop("reference_slope", 0.4)
    return [*measured(**changes), compared_row(slope)]


def test_the_rows_have_all_limits_of_the_scenario_and_good_ones_keep_them() -> None:
    rows = all_rows()
    named = {row.name: row for row in rows}
    limits = {name for name in LIMITS if name.startswith("agent:")}
    assert len(limits) == 5
    assert limits <= named.keys()
    assert_limits(checks_of(rows))
    assert named["agent: per image of history, data URLs"].semel.value == pytest.approx(2.0, rel=0.1)
    sent = named["agent: bytes sent, by reference"]
    assert sent.vllm is not None
    assert (sent.semel.value, sent.vllm.value) == (50_000, 1_275_000)
    decoded = named["agent: 50 turns, data URLs, decoded"]
    assert decoded.vllm is not None
    assert (decoded.semel.value, decoded.vllm.value) == (50, 1_250)


@pytest.mark.parametrize(
    "changes",
    [
        {"inline_slope": 5.0},
        {"reference_slope": 0.8},
        {"sent": 2_000},
        {"encoded": 1.02},
        {"encoded": 0.98},
        {"encoded": 0.0},
    ],
    ids=str,
)
def test_mutants_that_miss_one_limit_are_found(changes: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="the limit is"):
        assert_limits(checks_of(all_rows(**changes)))


def test_what_nobody_counts_has_no_row() -> None:
    assert not [row for row in measured(encoded=None) if row.name.endswith(", encoded")]
    (row,) = [row for row in measured() if row.name == "agent: 50 turns, by reference, encoded"]
    assert row.vllm is None


def test_processor_time_is_compared_if_it_is_known_of_every_turn() -> None:
    def rows(known: int) -> list[Row]:
        bare, mine = ([Look(1.0, 1, 1, cpu_ms=slope * turn) for turn in range(9)] for slope in (20, 2))
        mine = [replace(look, cpu_ms=None) if turn >= known else look for turn, look in enumerate(mine)]
        return [row for row in agent_rows(bare, mine, mine) if row.name.endswith("CPU time")]

    assert [row.ratio.value for row in rows(9) if row.ratio is not None] == pytest.approx([0.1, 0.1])
    assert rows(8) == []


def titles(rows: Sequence[Row]) -> dict[str, str]:
    return {drawing.file: drawing.title for drawing in drawings(rows)}


def test_the_turns_are_drawn_and_the_title_says_what_was_found(tmp_path: Path) -> None:
    rows = all_rows()
    title = titles(rows)["agent.png"]
    assert "data URLs 0.08× of vLLM's" in title
    assert "of the engine's" in title
    assert "agent.png" not in titles([replace(row, turns=None) for row in rows])
    made = draw(ServeReport({}, {}, tuple(rows)), tmp_path)
    assert {"agent.png", "ttft.png"} <= {path.name for path in made}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_the_front_page_s_chart_has_the_servers_and_not_the_engine_in_process() -> None:
    (alone,) = [drawing for drawing in drawings(all_rows()) if drawing.file == "ttft.png"]
    (both,) = [drawing for drawing in drawings(all_rows()) if drawing.file == "agent.png"]
    assert not [row.name for row in alone.rows if "in process" in row.name]
    assert len(alone.rows) < len(both.rows), "the control: the other chart has it"


def test_a_turn_that_took_far_longer_does_not_flatten_the_lines() -> None:
    assert 150 < plots._top([[100.0] * 49 + [9_000.0], [110.0] * 50]) < 200
    assert plots._top([[5.0]]) == 7.5


def test_the_json_has_every_turn() -> None:
    report = json.loads(ServeReport({}, {}, tuple(all_rows())).to_json())
    (row,) = [row for row in report["rows"] if row["name"] == "agent: per image of history, data URLs"]
    assert len(row["turns"]["semel"]) == len(row["turns"]["vllm"]) == TURNS
