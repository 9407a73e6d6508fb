"""The programs of `examples/` that ask a server, run as a reader would run them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engine.parity import draw_image
from tests.serve.both import Both
from tests.test_examples import run_example

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Photos = Callable[[int, int], list[Path]]


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    """So many pictures in a folder, other ones for another seed."""

    def make(count: int, seed: int) -> list[Path]:
        rng = np.random.default_rng(seed)
        paths = [tmp_path / f"{number}.png" for number in range(count)]
        for path in paths:
            path.write_bytes(draw_image(rng))
        return paths

    return make


def test_a_second_question_about_the_same_photos_preprocesses_none_of_them(both: Both, photos: Photos) -> None:
    folder, questions = photos(4, 1_000)[0].parent, ["What is this?", "And which one is red?"]
    printed = run_example("photos.py", folder, *questions, "--url", both.served.url, "--max-tokens", 8)
    first, second = [line for line in printed.splitlines() if "photos preprocessed" in line]
    assert first.startswith("  [4 of 4 photos preprocessed, 0.0 MB")
    assert second.startswith("  [0 of 4 photos preprocessed, ")
    assert "0.0 MB" not in second


def test_images_that_were_preprocessed_elsewhere_are_hits_at_first_sight(both: Both, photos: Photos) -> None:
    images = photos(2, 1_001)
    keys = ["--fleet-key-file", both.fleet_key, "--admin-key-file", both.admin_key]
    printed = run_example("preprocess_elsewhere.py", both.model, *images, "--admin", both.admin_url, *keys)
    assert printed.splitlines() == ["0.png: stored", "1.png: stored"]
    answered = run_example("photos.py", images[0].parent, "What is this?", "--url", both.served.url, "--max-tokens", 4)
    assert "[0 of 2 photos preprocessed, " in answered


def test_rollouts_preprocess_an_image_once_for_all_answers_and_steps(both: Both, photos: Photos) -> None:
    folder = photos(2, 1_002)[0].parent
    options = ["--group", 4, "--steps", 2, "--max-tokens", 4]
    printed = run_example("rollouts.py", folder, "What is this?", "--url", both.served.url, *options).splitlines()
    assert [line.partition(": ")[2].partition(",")[0] for line in printed] == ["2 groups of 4 answers"] * 2
    assert [line.rpartition(", ")[2] for line in printed] == ["2 images preprocessed", "0 images preprocessed"]


def test_pages_are_read_once_and_one_that_is_broken_costs_no_other(both: Both, photos: Photos, tmp_path: Path) -> None:
    pages = photos(3, 1_003)
    pages[1].write_bytes(pages[1].read_bytes()[:100])
    output = tmp_path / "pages.jsonl"
    options = ["--url", both.served.url, "--max-tokens", 4, "--at-a-time", 2]
    assert run_example("pages.py", pages[0].parent, output, *options) == "3 pages, 3 of them read now\n"
    lines = {line["page"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert {name: "text" in line for name, line in lines.items()} == {"0.png": True, "1.png": False, "2.png": True}
    assert run_example("pages.py", pages[0].parent, output, *options) == "3 pages, 0 of them read now\n"
