"""Workloads: the same seed asks the same, at the rate that was asked for; traces are read as they were written."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from semel.errors import ConfigError
from semel.lab.simulate.traces import NAMES, load_workload, read_trace, write_trace
from semel.lab.simulate.workload import Ask, Chats, Screens, Talks, Traffic, Viral, digest_of, image


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_asks_the_same_in_order_of_time(name: str) -> None:
    workload = load_workload(name, rate=40.0, seconds=20.0)
    asks = list(workload.asks(Random(1)))
    assert asks == list(workload.asks(Random(1)))
    assert asks != list(workload.asks(Random(2)))
    assert all(one.at_s <= other.at_s < 20.0 for one, other in pairwise(asks))
    assert all(ask.prompt_tokens > sum(item.tokens for item in ask.items) for ask in asks)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "diurnal"])
def test_a_workload_has_its_rate_from_the_first_second(name: str) -> None:
    asks = list(load_workload(name, rate=60.0, seconds=60.0).asks(Random(3)))
    first, last = (sum(low <= ask.at_s < low + 10.0 for ask in asks) for low in (0.0, 50.0))
    assert 400 < first < 800
    assert 400 < last < 800


def test_a_day_has_its_mean_and_its_peak() -> None:
    traffic = Traffic(1_000.0, 86_400.0, peak=2.5)
    rates = [traffic.rate_at(60.0 * minute) for minute in range(1_440)]
    assert fmean(rates) == pytest.approx(1_000.0, rel=1e-3)
    assert max(rates) == pytest.approx(2_500.0, rel=1e-3)
    assert rates.index(max(rates)) == 720
    assert Traffic(7.0, 1.0).rate_at(0.3) == 7.0


def test_a_later_turn_has_the_images_of_the_earlier_ones() -> None:
    seen: dict[int, Ask] = {}
    grown = 0
    for ask in Talks(Chats(), Traffic(50.0, 60.0)).asks(Random(1)):
        if (before := seen.get(ask.conversation)) is not None:
            assert ask.items[: len(before.items)] == before.items
            assert ask.prompt_tokens > before.prompt_tokens
            grown += len(ask.items) > len(before.items)
        seen[ask.conversation] = ask
    assert grown > 500


def test_an_agent_keeps_the_last_screens() -> None:
    asks = list(Talks(Screens(window=3), Traffic(50.0, 60.0)).asks(Random(1)))
    assert max(len(ask.items) for ask in asks) == 3
    last: dict[int, Ask] = {}
    for ask in asks:
        if (before := last.get(ask.conversation)) is not None:
            assert ask.items[:-1] == before.items[-2:]
        last[ask.conversation] = ask


def test_one_image_is_everywhere_for_a_while() -> None:
    asks = list(Talks(Viral(at_s=10.0, for_s=5.0, share=0.5), Traffic(100.0, 20.0)).asks(Random(1)))
    first: dict[tuple[int, int], float] = {}
    for ask in asks:
        for item in ask.items:
            first.setdefault((ask.conversation, item.key), ask.at_s)
    shown = [at for (_, key), at in first.items() if key == 1 << 39]
    assert len(shown) > 50
    assert min(shown) >= 10.0
    assert max(shown) < 15.0


def test_the_same_image_has_another_digest_for_each_tenant() -> None:
    assert digest_of("a", 1) == digest_of("a", 1) != digest_of("b", 1)
    assert image(5) == image(5)
    assert image(5, (1024, 1024)).tokens == 37 * 37


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    asks = list(load_workload("documents", rate=20.0, seconds=10.0).asks(Random(1)))
    path = tmp_path / "day.jsonl"
    assert write_trace(path, asks) == len(asks) > 100
    assert list(read_trace(path)) == asks
    assert list(load_workload(str(path), rate=1.0, seconds=5.0).asks(Random())) == [a for a in asks if a.at_s < 5.0]


def test_a_file_sets_what_a_workload_does(tmp_path: Path) -> None:
    path = tmp_path / "agents.json"
    path.write_text('{"workload": "agents", "window": 2, "size": [512, 512], "tenants": 5}')
    asks = list(load_workload(str(path), rate=50.0, seconds=10.0).asks(Random(1)))
    assert max(len(ask.items) for ask in asks) == 2
    assert len({ask.tenant for ask in asks}) == 5
    assert {item.width for ask in asks for item in ask.items} == {512}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"workload": "agents", "windows": 2}', "no setting 'windows'"),
        ("b.json", '{"workload": "nothing"}', "not one of"),
        ("c.json", "{", "c.json"),
        ("d.jsonl", '{"at_s": 1}', "line 1"),
        ("e.jsonl", None, "neither a file nor"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_workload(str(path), rate=1.0, seconds=1.0)


def test_a_trace_that_goes_back_in_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    asks = list(load_workload("catalogue", rate=20.0, seconds=10.0).asks(Random(1)))
    write_trace(path, [asks[5], asks[1]])
    with pytest.raises(ConfigError, match="line 2"):
        list(read_trace(path))
