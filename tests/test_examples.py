"""The programs of `examples/`, run as a reader would run them.

Those that ask a server are run by `tests/serve/test_examples.py` and `tests/engine/test_transcriptions.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_example(example: str, *arguments: object) -> str:
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
    printed = run_example("scheduler.py")
    assert printed.count("encodes the cat") == 1
    assert printed.count("encodes the dog") == 1 + printed.count("the dog has to go")
    assert printed.splitlines()[-1] == "6 uses of images, 4 encodes, 2 evictions"
