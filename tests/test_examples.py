"""The programs of `examples/`, run as a reader would run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from semel.bench.ports import free_port
from semel.settings import create_key
from tests.engine.parity import clip, picture
from tests.serve.served import Served, serving

ROOT = Path(__file__).parent.parent


def run(example: str, *arguments: object) -> str:
    """What an example prints."""
    command = [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_in_the_table_and_says_how_to_run_it() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert f"]({example.name})" in table
        assert f"python examples/{example.name}" in example.read_text()


def test_the_scheduler_encodes_an_image_again_only_where_it_had_to_go() -> None:
    printed = run("scheduler.py")
    assert printed.count("encodes the cat") == 1
    assert printed.count("encodes the dog") == 1 + printed.count("the dog has to go")
    assert printed.splitlines()[-1] == "6 uses of images, 4 encodes, 2 evictions"


@dataclass(frozen=True)
class Keyed:
    """A `semel serve` whose keys are known, and its pictures."""

    served: Served
    model: Path
    admin: str
    keys: Path
    pictures: list[Path]


@pytest.fixture(scope="module")
def keyed(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    home, port, model = tmp_path_factory.mktemp("keyed"), free_port(), tiny("qwen2-vl")
    create_key(home / "fleet.key")
    create_key(home / "admin.key")
    (home / "pictures").mkdir()
    rng = np.random.default_rng(0)
    pictures = [home / "pictures" / f"{number}.png" for number in range(4)]
    for path in pictures:
        path.write_bytes(picture(rng))
    flags = ["--key-file", home / "fleet.key", "--admin-port", port, "--admin-key-file", home / "admin.key"]
    with serving(model, home, *map(str, flags)) as served:
        yield Keyed(served, model, f"http://127.0.0.1:{port}", home, pictures)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_second_question_about_the_same_photos_preprocesses_none_of_them(keyed: Keyed) -> None:
    questions = ["What is this?", "And which one is red?"]
    printed = run("photos.py", keyed.pictures[0].parent, *questions, "--url", keyed.served.url, "--max-tokens", 8)
    first, second = [line for line in printed.splitlines() if "photos preprocessed" in line]
    assert first.startswith("  [4 of 4 photos preprocessed, 0.0 MB")
    assert second.startswith("  [0 of 4 photos preprocessed, ")
    assert "0.0 MB" not in second


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_images_that_were_preprocessed_elsewhere_are_hits_at_first_sight(keyed: Keyed, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    images = [tmp_path / f"{number}.png" for number in range(2)]
    for path in images:
        path.write_bytes(picture(rng))
    keys = ["--key-file", keyed.keys / "fleet.key", "--admin-key-file", keyed.keys / "admin.key"]
    printed = run("preprocess_elsewhere.py", keyed.model, *images, "--admin", keyed.admin, *keys)
    assert printed.splitlines() == ["0.png: stored", "1.png: stored"]
    asked = run("photos.py", tmp_path, "What is this?", "--url", keyed.served.url, "--max-tokens", 4)
    assert "[0 of 2 photos preprocessed, " in asked


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_many_clips_are_transcribed_and_one_that_is_none_does_not_stop_them(
    tiny: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(2)
    clips = [tmp_path / f"{number}.wav" for number in range(6)]
    for path in clips:
        path.write_bytes(clip(rng))
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"no clip at all")
    with serving(tiny("whisper"), tmp_path_factory.mktemp("clips"), "--max-model-len", "448") as served:
        printed = run("transcribe.py", *clips, broken, "--url", served.url, "--at-once", 3)
    told = {line["file"]: line for line in map(json.loads, printed.splitlines())}
    assert set(told) == {path.name for path in [*clips, broken]}
    assert all("text" in told[path.name] for path in clips)
    assert "error" in told["broken.wav"]
