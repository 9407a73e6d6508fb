"""Whether the tiny models say something: bare vLLM is asked the same text with other media, and must answer otherwise.

    scripts/families                     # every family that runs on a CPU, one engine after the other
    scripts/families qwen3-vl mistral3   # these

Each family is written to a temporary folder and served in a process of its own, with a deadline. Fails if two questions
of a family have the same answer, tokens and logprobs, or if the second answer to one differs from the first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from semel.testing.models import FAMILIES, build
from tests.engine.bare import Verdict

ROOT: Final = Path(__file__).resolve().parent.parent.parent
DEADLINE_S: Final = 600


def main() -> None:
    """Ask the families of the command line, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"all by default: {', '.join(runnable())}")
    chosen = parser.parse_args().family or runnable()
    if strangers := set(chosen) - set(runnable()):
        parser.error(f"no engine runs {', '.join(sorted(strangers))} here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the engine that runs is ended too
    write("| family | questions | different answers | different tokens | the same again | seconds | |")
    write("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        rights = [show(family, Path(folder)) for family in chosen]
    sys.exit(not all(rights))


def show(family: str, folder: Path) -> bool:
    """Write the row of a family; whether all is right."""
    began = time.monotonic()
    found = ask(family, build(family, folder / family))
    seconds = f"{time.monotonic() - began:.0f}"
    if isinstance(found, str):
        write(f"| {family} | | | | | {seconds} | {found} |")
        return False
    counts = map(str, (found.questions, found.distinct, found.distinct_tokens, found.repeats, seconds))
    write(f"| {family} | {' | '.join(counts)} | {'ok' if found.is_right else 'WRONG'} |")
    return found.is_right


def write(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def runnable() -> list[str]:
    """The families that have an engine on a CPU."""
    return [name for name, model in FAMILIES.items() if model.serving.level == "engine"]


def ask(family: str, folder: Path) -> Verdict | str:
    """What bare vLLM answered, or why it did not."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    log = folder.with_suffix(".log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.bare", family, str(folder)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        )
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            return f"no answers within {DEADLINE_S} s"
        finally:
            # The engine's own processes are of its group; one that hangs must not outlive it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for line in output.splitlines():
        if line.startswith('{"questions"'):
            return Verdict(**json.loads(line))
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return f"no answers: {lines[0][-200:] if lines else f'exit code {process.returncode}'}"


if __name__ == "__main__":
    main()
