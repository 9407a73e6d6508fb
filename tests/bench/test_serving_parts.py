"""The parts of `semel bench serve` that need no server: turns, images, plans, limits, tables, drawings."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from semel.errors import ConfigError
from semel.lab.bench.ports import free_port
from semel.lab.bench.serving.alternate import Pair, order, take_turns
from semel.lab.bench.serving.bench import Bench, Effort
from semel.lab.bench.serving.client import Answer, Client
from semel.lab.bench.serving.figures import LIMITS, TARGETS, Row, checks_of, compared, counted
from semel.lab.bench.serving.images import Images, Size, chat, image_part, text_part
from semel.lab.bench.serving.plots import draw, drawings
from semel.lab.bench.serving.procfs import cpu_s, descendants, pss_bytes, words_of
from semel.lab.bench.serving.report import ServeReport, format_figure
from semel.lab.bench.serving.run import SCENARIOS, Options
from semel.lab.bench.serving.scenarios.evicted import added_rows
from semel.lab.bench.serving.scenarios.latency import stream
from semel.lab.bench.serving.scenarios.mixed_load import Kind, drive, plan
from semel.lab.bench.serving.scenarios.restart import encoder_inputs, restart, running_store
from semel.lab.bench.serving.servers import Launch, Server, role_of, vllm_server
from semel.lab.bench.serving.socket_bytes import read_counts
from semel.lab.bench.serving.stages import stage_rows
from semel.lab.bench.serving.statistics import Figure, exactly
from semel.lab.bench.settings import SCENARIO_NAMES
from semel.lab.cli.benches import bench
from semel.telemetry.scrape import Scrape


async def test_both_sides_take_turns_and_who_begins_alternates() -> None:
    asked: list[str] = []

    async def work(side: str, turn: int) -> int:
        asked.append(side)
        return turn

    results = await take_turns(Pair("s", "v"), work, turns=3)
    assert asked == ["v", "s", "s", "v", "v", "s"]
    assert results == Pair([0, 1, 2], [0, 1, 2])
    assert {order(turn)[0] for turn in range(2)} == {"semel", "vllm"}


def test_no_picture_is_drawn_twice_and_a_seed_gives_the_same_again() -> None:
    images, others = Images(1), Images(2)
    first = [images.draw(Size.SMALL) for _ in range(3)]
    assert len({*first, others.draw(Size.SMALL)}) == 4
    assert Images(1).draw(Size.SMALL) == first[0]


@pytest.mark.parametrize(("size", "kilobytes"), [(Size.SQUARE, (200, 320)), (Size.HD, (400, 640))])
def test_a_picture_is_as_large_as_those_of_the_published_figures(size: Size, kilobytes: tuple[int, int]) -> None:
    jpeg = Images(1).draw(size)
    assert Image.open(io.BytesIO(jpeg)).size == size.value
    assert kilobytes[0] <= len(jpeg) / 1e3 <= kilobytes[1]


def test_a_request_alternates_between_user_and_assistant() -> None:
    body = json.loads(chat([image_part(b"jpeg"), text_part("?")], "yes", "and?", max_tokens=4))
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]) == b"jpeg"
    assert (body["max_tokens"], body["temperature"]) == (4, 0.0)


def test_four_in_five_of_a_stream_were_shown_before() -> None:
    shown_ = stream(2_000, random.Random(0))
    new = sum(image not in shown_[:number] for number, image in enumerate(shown_))
    assert 0.17 < new / 2_000 < 0.23
    assert sorted(set(shown_)) == list(range(new))


def test_a_mixed_load_is_planned_from_its_seed_with_a_tenth_refused_and_a_tenth_aborted() -> None:
    asks = plan(3_000, seed=1)
    assert asks == plan(3_000, seed=1) != plan(3_000, seed=2)
    for kind in (Kind.REFUSED, Kind.ABORTED):
        assert 0.07 < sum(ask.kind is kind for ask in asks) / 3_000 < 0.13
    spoiled = {ask.image for ask in asks if ask.kind is not Kind.GOOD}
    assert any(ask.image in spoiled for ask in asks if ask.kind is Kind.GOOD)


class Spoiled(Client):
    """A server that fails the next good request for an image whose request it has refused, as bare vLLM does."""

    def __init__(self, *, spoils: bool) -> None:
        super().__init__("http://nowhere")
        self.spoils = spoils
        self.spoiled: set[bytes] = set()
        self.failed = 0

    async def ask(self, path: str, body: bytes, *, accept: str = "*/*") -> Answer:  # noqa: ARG002
        await asyncio.sleep(0)
        asked = json.loads(body)
        image = json.dumps(asked["messages"]).encode()
        if asked.keys() - {"messages", "temperature", "max_tokens"}:
            self.spoiled.add(image)
            return Answer(400, b"", 0.0)
        fails = self.spoils and image in self.spoiled
        self.spoiled.discard(image)
        self.failed += fails
        return Answer(500 if fails else 200, b"", 0.0)

    async def leave(self, path: str, body: bytes) -> None:  # noqa: ARG002
        await asyncio.sleep(0)


@pytest.mark.parametrize("spoils", [False, True])
async def test_every_good_request_that_fails_in_a_mixed_load_is_counted(spoils: bool) -> None:
    asks = plan(400, seed=1)
    images = [number.to_bytes(4, "big") for number in range(400)]
    done: list[int] = []
    client = Spoiled(spoils=spoils)
    assert await drive(client, asks, images, done.append) == client.failed
    assert (client.failed > 5) is spoils
    assert sorted(done) == list(range(1, 401))


async def test_the_cause_is_first_when_a_server_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's last line only says that it stands above."""
    head = "(VllmWorker-0 pid=7) ERROR 11-19 00:07:54 [a.py:9] "
    lines = f"{head}Traceback (most recent call last):", f"{head}ValueError: no memory", "RuntimeError: See above."
    program = f"for line in {lines}: print(line)\nraise SystemExit(1)"
    monkeypatch.setattr("semel.lab.bench.serving.servers._PYTHON", (sys.executable, "-c", program))
    with pytest.raises(ConfigError, match=r"\(exit code 1\): ValueError: no memory\n"):
        async with vllm_server(Launch("", (), tmp_path)):
            pass


async def test_a_server_that_is_gone_fails_its_good_requests_and_not_the_run() -> None:
    asks = plan(60, seed=1)
    async with Client(f"http://127.0.0.1:{free_port()}") as client:
        failed = await drive(client, asks, [b""] * 60, lambda _: None)
    assert failed == sum(ask.kind is Kind.GOOD for ask in asks) < 60


def limited(value: float, low: float, high: float) -> Row:
    return Row("text: latency", "ms", exactly(10), exactly(10), Figure(value, low, high))


@pytest.mark.parametrize(
    ("row", "ok", "is_sure"),
    [
        (limited(1.0, 0.9, 1.04), True, True),
        (limited(1.0, 0.9, 1.3), True, False),
        (limited(1.1, 1.0, 1.3), False, False),
        (limited(1.3, 1.2, 1.4), False, True),
        (Row("mixed: good requests that fail", "requests", exactly(0), exactly(3)), True, True),
        (Row("mixed: good requests that fail", "requests", exactly(1), exactly(3)), False, True),
        (Row("new: 1024, latency", "ms", exactly(1)), None, False),
    ],
)
def test_a_limit_is_kept_or_not_and_sure_only_if_the_whole_interval_is(
    row: Row, ok: bool | None, is_sure: bool
) -> None:
    assert row.ok is ok
    assert row.is_sure is is_sure


def test_throughput_has_to_be_at_least_its_limit() -> None:
    name = "saturation: text requests per second"
    assert compared(name, "1/s", Pair([96.0] * 3, [100.0] * 3)).ok is True
    assert compared(name, "1/s", Pair([90.0] * 3, [100.0] * 3)).ok is False
    assert replace(compared(name, "1/s", Pair([90.0] * 3, [100.0] * 3)), is_promised=True).ok is True


def test_a_count_of_zero_has_no_ratio_to_it() -> None:
    assert counted("mixed: good requests that fail", "requests", 0, 0).ratio is None


def report() -> ServeReport:
    ratio = Figure(0.5, 0.4, 0.6)
    rows = [
        Row(
            "text: latency", "ms", Figure(10.2, 10, 12, 10, 12, 40), Figure(10, 9, 11, 9, 11, 40), Figure(1.02, 1, 1.2)
        ),
        Row("again: 1024, latency", "ms", Figure(20, 19, 21), Figure(30, 29, 31), ratio),
        Row("again: 1024, what the image adds", "ms", Figure(9, 8, 10), Figure(20, 19, 21), ratio),
        counted("frontends: tensor bytes between processes, per repeat", "bytes", 0, 6_440_000),
        counted("frontends: all bytes between processes, per repeat", "bytes", 4_000, 6_450_000),
        compared("saturation: text requests per second", "1/s", Pair([80.0] * 3, [100.0] * 3)),
        counted("rollouts: n=16, preprocessings per group", "", 1, 2),
        counted("rollouts: n=16, encodes per group", "", 1),
        compared("pages: new pages per second", "1/s", Pair([3.0] * 3, [2.0] * 3)),
    ]
    return ServeReport({"cores": 2}, {"quick": True}, tuple(rows))


def test_the_json_has_every_figure_with_its_error_and_checks_in_the_shape_of_all_benchmarks() -> None:
    told = json.loads(report().to_json())
    assert told["bench"] == "serve"
    assert told["machine"]["cores"] == 2
    by_name = {row["name"]: row for row in told["rows"]}
    text = by_name["text: latency"]
    assert text["semel"] == {"value": 10.2, "low": 10, "high": 12, "q1": 10, "q3": 12, "count": 40}
    assert (text["ok"], text["sure"], text["limit"]["value"]) == (True, False, 1.05)
    assert {check["name"]: check["ok"] for check in told["checks"]}["saturation: text requests per second"] is False
    assert set(told["checks"][0]) == {"name", "value", "unit", "baseline", "limit", "ok"}


def test_a_ratio_to_nothing_is_null_in_the_json() -> None:
    told = json.loads(ServeReport({}, {}, (limited(math.inf, 0.9, math.inf),)).to_json(), parse_constant=pytest.fail)
    assert told["rows"][0]["ratio"]["value"] is told["checks"][0]["value"] is None


def test_one_limit_that_is_not_kept_makes_the_report_not_ok() -> None:
    whole = report()
    assert not whole.ok
    assert ServeReport({}, {}, whole.rows[:5]).ok
    assert [check.ok for check in checks_of(whole.rows)].count(False) == 1


def test_the_tables_say_what_is_kept_and_what_is_unsure() -> None:
    text = printed(report(), width=160)
    for words in (
        "semel bench serve: again",
        "1.02 [1, 1.2]",
        "kept?",
        "missed",
        "≤ 0.65×",
        "≥ 0.95×",
        "6,440,000",
    ):
        assert words in text
    assert format_figure(None) == ""


def printed(whole: ServeReport, *, width: int, has_stages: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width)
    whole.print_table(console, has_stages=has_stages)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_fits_80_columns_with_a_line_for_each_row_and_stages_only_if_asked_for() -> None:
    """Control: with stages there are more lines, which may be wrapped."""
    ratio, figure = Figure(0.3222, 0.3011, 0.3513), Figure(17.71, 17.12, 18.23)
    names = [f"again: {size}, {what}" for size in ("1024", "HD") for what in ("latency", "what the image adds")]
    rows = [Row(name, "ms", figure, Figure(1_234.5, 1_200, 1_300), ratio) for name in names]
    rows.append(Row("again: HD, CPU time of all processes", "ms", figure, figure, ratio))
    rows.append(counted("again: HD, stage render, mean", "ms", 1.5))
    whole = ServeReport({}, {}, tuple(rows))
    lines = printed(whole, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("0.322 [0.301, 0.351]" in line for line in lines) == 5
    assert [line for line in lines if line.startswith("1024, image adds, ms")]
    assert not [line for line in lines if "stage" in line]
    assert len(lines) == len(printed(whole, width=160).splitlines()), "no row is wrapped"
    assert "stage render" in printed(whole, width=80, has_stages=True)


def test_help_names_every_scenario_in_its_order() -> None:
    assert tuple(SCENARIOS) == SCENARIO_NAMES
    shown = " ".join(CliRunner().invoke(bench, ["serve", "--help"]).output.split())
    assert ", ".join(SCENARIO_NAMES) in shown
    assert "about 4 minutes" in shown


def test_every_drawing_has_a_title_that_says_what_was_found(tmp_path: Path) -> None:
    titles = {drawing.file: drawing.title for drawing in drawings(report().rows)}
    assert "0.50×" in titles["again.png"]
    assert titles["bytes.png"] == "Two frontends: a repeat ships 0 bytes of tensors; vLLM ships 6.44 MB"
    assert "1.50×" in titles["jobs.png"]
    assert [one.file for one in drawings(report().rows) if len(one.rows) == 1 and "rollouts" in one.file]
    assert titles["limits.png"] == "Ratio to bare vLLM: 2 of 3 limits are kept"
    made = draw(report(), tmp_path / "plots")
    assert {path.name for path in made} == set(titles)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    assert not list(drawings(()))


def test_only_names_scenarios_that_there_are() -> None:
    assert Options().scenarios() == [name for name in SCENARIOS if name not in ("evicted", "restart")]
    assert Options(only=("evicted",)).scenarios() == ["evicted"]
    assert Options(only=("again", "text")).scenarios() == ["text", "again"]
    with pytest.raises(ConfigError, match="--only nothing: there is no such scenario; choose from text"):
        Options(only=("nothing",)).scenarios()


def test_two_servers_elsewhere_or_none() -> None:
    assert not Options().are_elsewhere()
    assert Options(baseline="http://a", semel="http://b").are_elsewhere()
    with pytest.raises(ConfigError, match="--baseline and --semel go together"):
        Options(baseline="http://a").are_elsewhere()


def test_every_limit_is_of_a_scenario_that_there_is() -> None:
    assert {name.partition(":")[0] for name in LIMITS | TARGETS} <= set(SCENARIOS)


def test_the_mean_of_a_stage_is_of_what_came_in_between() -> None:
    def scrape(seconds: float, times: int) -> Scrape:
        sample = 'semel_stage_seconds_{}{{stage="parse"}} {}\n'
        head = "# TYPE semel_stage_seconds histogram\n"
        bucket = f'semel_stage_seconds_bucket{{stage="parse",le="+Inf"}} {times}\n'
        return Scrape.parse(head + bucket + sample.format("count", times) + sample.format("sum", seconds))

    (row,) = stage_rows("again: 1024, stage", scrape(10.0, 5), scrape(10.2, 105))
    assert (row.name, row.unit) == ("again: 1024, stage parse, mean", "ms")
    assert row.semel.value == pytest.approx(2.0)
    assert not stage_rows("again:", scrape(10.0, 5), scrape(10.0, 5))


@pytest.mark.parametrize(
    ("words", "is_root", "role"),
    [
        (["python", "-m", "semel", "frontend", "MODEL"], False, "frontend"),
        (["python", "-m", "semel", "worker", "MODEL"], False, "worker"),
        (["python", "-m", "semel", "serve", "worker"], True, "other"),
        (["VLLM::EngineCore"], False, "engine core"),
        (["VLLM::Worker_0"], False, "engine worker"),
        (["python", "-m", "semel.processing.pool.child", "7"], False, "other"),
        ([], False, "other"),
    ],
)
def test_a_process_is_known_by_its_command_line(words: list[str], is_root: bool, role: str) -> None:
    assert role_of(words, is_root=is_root) == role


def test_the_frontend_of_a_server_without_one_is_the_process_that_was_started() -> None:
    me = os.getpid()
    assert Server(("http://x",), (me,)).roles()["frontend"] == [me]


def test_the_kernel_tells_of_a_process_and_its_children() -> None:
    me = os.getpid()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            assert {me, child.pid} <= set(descendants(me))
            assert child.pid in Server(("http://x",), (me,)).pids()
        finally:
            child.kill()
    assert cpu_s([me]) > 0
    assert pss_bytes([me]) > 1_000_000
    assert words_of(me)[0]
    assert words_of(child.pid) == []
    assert cpu_s([child.pid]) == 0


_SENDER = """
import sys, zmq
from pathlib import Path
from semel.lab.bench.serving.bench import Bench, Effort
from semel.lab.bench.serving.client import Answer, Client
from semel.lab.bench.serving.socket_bytes import count
count(Path(sys.argv[1]))
context = zmq.Context()
pair = [context.socket(zmq.PAIR) for _ in range(2)]
pair[0].bind("inproc://x"), pair[1].connect("inproc://x")
pair[0].send_multipart([b"head", memoryview(bytearray(100_000))], copy=False)
pair[1].recv_multipart()
print("sent", flush=True)
input()
"""


@pytest.mark.timeout(60)
def test_what_a_process_gives_to_zmq_is_counted_and_large_frames_apart(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SENDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        try:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "sent\n"
            counts = read_counts(tmp_path)
        finally:
            sender.kill()
    assert (counts.all_bytes, counts.large_bytes) == (100_004, 100_000)


def test_what_an_eviction_adds_is_compared_with_what_it_adds_to_bare_vllm() -> None:
    resident = [100.0, 104.0, 96.0]
    slow = [(value + 1_300.0, value) for value in resident]
    for mine, is_kept in (([(value + 1.0, value) for value in resident], True), (slow, False)):
        adds = added_rows("evicted: HD", "the eviction", Pair(mine, slow))[-1]
        assert adds.name == "evicted: HD, what the eviction adds"
        assert adds.ok is is_kept


def test_what_vllm_encodes_is_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    step = "Iteration(3): 1 context requests, 20 context tokens"
    log.write_text(f"{step}, encoder inputs: 2, encoder output embeddings: 90\n{step}\n{step}, encoder inputs: 1, e\n")
    assert encoder_inputs(Server(("http://127.0.0.1:1",), log=log)) == 3


async def test_a_restart_needs_servers_that_are_started_here() -> None:
    sides = Pair(None, None)
    bench = Bench(sides, None, Images(1), Effort.of(quick=True), lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--baseline"):
        await restart(bench)


async def test_without_a_server_for_the_store_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="install valkey-server or redis-server"):
        async with running_store():
            pass
