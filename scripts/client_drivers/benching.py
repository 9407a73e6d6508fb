"""What the drivers of benchmarks share: each runs the benchmark's command, and reads its results from a file."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from driver import FORMAT, TOOL

REQUESTS = 4
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 8
EXTRAS: dict[str, dict[str, Any]] = {
    "text": {"temperature": 0},
    "image": {"temperature": 0},
    "stream": {"temperature": 0},
    "tools": {"temperature": 0, "tools": [TOOL], "tool_choice": "required"},
    "structured": {"temperature": 0, "response_format": FORMAT},
}


def tokens(request: str) -> int:
    return 200 if request in ("tools", "structured") else OUTPUT_TOKENS


def run(command: list[str], folder: Path, **variables: str) -> None:
    """Run a command of this environment; what it prints is for people."""
    found = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "NO_COLOR": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if found.returncode:
        raise RuntimeError(f"{command[0]} ended with {found.returncode}: {(found.stdout + found.stderr)[-1500:]}")
