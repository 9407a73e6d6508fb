"""`semel bench processing`: both sides really render, and a killed process is really replaced."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pybase64
import pytest
from PIL import Image

from semel.lab.bench import processing as bench
from semel.lab.bench.report import Check

Folder = Callable[[str], Path]


def test_the_images_are_what_the_name_of_the_check_says() -> None:
    urls = [
        message["content"][0]["image_url"]["url"]
        for body in bench._bodies(3)
        for message in msgspec.json.decode(body)["messages"]
    ]
    images = [pybase64.b64decode(url.removeprefix("data:image/jpeg;base64,"), validate=True) for url in urls]
    assert len(set(images)) == 3
    for image in images:
        assert Image.open(io.BytesIO(image)).size == (1_024, 1_024)
        assert 230_000 < len(image) < 290_000


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as is needed to see that everything is measured."""
    for name, value in {"_IMAGES": 4, "_REPEATS": 2, "_KILLED_DURING": 30, "_KILLED_AFTER": 5}.items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(200)
async def test_without_vllm_our_side_is_measured_alone_D3(small: None, tiny: Folder) -> None:
    checks = {check.name: check for check in await bench._measure(tiny("qwen2-vl"), None, turns=1)}
    assert not [name for name in checks if "vLLM" in name]
    killed = [check for name, check in checks.items() if name.startswith("a process killed")]
    measured = [check for check in checks.values() if check not in killed]
    assert len(measured) == 3
    assert all(check.value > 0 and check.baseline is None for check in measured)
    assert len(killed) >= 2
    assert killed[0].value <= 1
    assert killed[1].ok


def test_the_ratio_is_taken_turn_by_turn() -> None:
    turns = bench._Turns()
    for mine_s, theirs_s in ((1.0, 2.0), (10.0, 30.0), (2.0, 8.0)):
        turns.add(bench._Span(mine_s, mine_s), bench._Span(theirs_s, theirs_s))
    assert turns.ratio() == 3
    assert turns.medians() == (bench._Span(2.0, 2.0), bench._Span(8.0, 8.0))
    rate, ratio, _ = bench._new_checks(turns)
    assert ratio == Check(f"{rate.name}, times vLLM's images per second", 3.0, "×", None, 2.5, ok=True)


@pytest.mark.engine
@pytest.mark.timeout(200)
def test_vllms_renderer_answers_from_a_process_of_its_own(tiny: Folder) -> None:
    with bench._bare_renderer(tiny("qwen2-vl")) as bare:
        assert bare is not None
        new, known = bare.ask("new"), bare.ask("known")
    assert new.cpu_s / bench._IMAGES > known.cpu_s / bench._REPEATS > 0
