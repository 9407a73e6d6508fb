"""The programs of `examples/`, run as a reader would run them.

Those that ask a server are run by `tests/serve/test_examples.py` and `tests/engine/test_transcriptions.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from semel.lab.testing.references import ReferenceServer, serve_references

ROOT = Path(__file__).parent.parent


def run_example(example: str, *arguments: object, within_s: float = 120) -> str:
    """What an example prints."""
    command = [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
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


def test_an_agent_sends_each_screenshot_once() -> None:
    with serve_references(ReferenceServer(text="I click on the red window.")) as server:
        url = server.url.removesuffix("/v1")
        once = run_example("screenshots.py", "--url", url, "--turns", 8).splitlines()
        again = run_example("screenshots.py", "--url", url, "--turns", 8, "--plain").splitlines()
    assert [len(once), len(again)] == [9, 9]
    sent = [int(line.rpartition(",  ")[2].split()[-3].replace(",", "")) for line in once[:-1]]
    assert max(sent) < 1.5 * min(sent), "each turn sends one screenshot"
    total, plain = (int(lines[-1].split()[0].replace(",", "")) for lines in (once, again))
    assert total < plain / 4
    assert server.expanded[7]["messages"] == server.expanded[15]["messages"]
