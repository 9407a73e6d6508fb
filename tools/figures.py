"""The commands behind the figures of README and docs: `scripts/figures` runs them all, and keeps what each prints.

A figure in a page has its command next to it. The table here has all of these commands, and `tests/test_figures.py`
holds it to the pages: a command that measures and is in a page but not here is an error, and so is the reverse.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FIGURES", "MEASURING", "Figures", "commands_of", "main"]

ROOT: Final = Path(__file__).parent.parent
LIMIT_S: Final = 3 * 3_600.0
MODEL: Final = "MODEL"
"""In a command: a tiny Qwen2-VL, which is made for the run."""

MEASURING: Final = (
    *("semel bench", "semel simulate", "scripts/load", "scripts/matrix", "scripts/families", "scripts/sizes"),
    *(
        "scripts/attack",
        "scripts/shares",
        "scripts/failing-worker",
        "scripts/faults",
        "scripts/pool-cost",
        "scripts/image-cost",
    ),
    *("scripts/generic-cost", "scripts/hostile", "python -m tools."),
)
"""How the commands begin that measure something."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One command, and the pages that have its figures."""

    command: str
    pages: tuple[str, ...]
    minutes: float
    """About how long it takes on a quiet machine with 2 cores."""

    by_hand: str = ""
    """Why it does not run with the others, if it does not."""


FIGURES: Final[dict[str, Figures]] = {
    "request": Figures(
        "semel bench serve --only text --only answers --only again --only agent --only saturation --json",
        ("docs/get-started/performance.md", "README.md"),
        13,
    ),
    "serve": Figures(
        "semel bench serve --json --plot docs/performance",
        ("docs/get-started/performance.md", "README.md", "docs/get-started/verify.md"),
        18,
    ),
    "agent": Figures(
        "semel bench serve --only agent --json --plot docs/performance",
        ("docs/get-started/performance.md", "README.md"),
        6,
    ),
    "conversation": Figures("semel bench serve --only conversation --json", ("docs/get-started/performance.md",), 4),
    "evicted": Figures(
        "semel bench serve --only evicted --only restart --json", ("docs/get-started/performance.md",), 12
    ),
    "restart": Figures("semel bench serve --only restart", ("docs/internals/embedding-store.md",), 8),
    "memory": Figures(
        "semel bench serve --only memory",
        ("docs/get-started/performance.md", "docs/operate/capacity.md", "docs/security/sandbox.md"),
        2,
    ),
    "tier": Figures(
        "semel bench serve --baseline URL_WITHOUT --semel URL_WITH --only text --only again",
        ("docs/get-started/performance.md",),
        10,
        by_hand="it needs two servers that run already",
    ),
    "rollouts": Figures("semel bench serve --only rollouts", ("docs/use-cases/rollouts.md",), 3),
    "pages": Figures("semel bench serve --only pages", ("docs/use-cases/documents.md",), 3),
    "batch": Figures("semel bench batch", ("docs/use-cases/documents.md",), 16),
    "video": Figures("semel bench serve --only video", ("docs/api/media.md",), 4),
    "processing": Figures(
        "semel bench processing", ("docs/internals/rendering.md", "docs/get-started/performance.md"), 3
    ),
    "encoder": Figures("semel bench encoder", ("docs/internals/encoder.md",), 2),
    "cache": Figures("semel bench cache", ("docs/internals/caching.md",), 2),
    "streams": Figures("semel bench streams", ("docs/get-started/performance.md",), 2),
    "fleet": Figures("semel bench fleet", ("docs/operate/scale.md",), 2),
    "trace-table": Figures(
        "python -m tools.fleet.trace_table 1000", ("docs/deploy/fleet.md", "docs/operate/scale.md"), 10
    ),
    "random-fleets": Figures("python -m tools.fleet.random_fleets 100000", ("docs/operate/scale.md",), 10),
    "dashboard": Figures("python -m tools.fleet.dashboard docs/dashboard.png", ("docs/operate/metrics.md",), 5),
    "load": Figures("scripts/load --compare --requests 300 --rounds 3 --seed 40", ("docs/deploy/fleet.md",), 10),
    "faults": Figures("scripts/faults", ("docs/deploy/fleet.md",), 14),
    "store": Figures("scripts/load --compare --store", ("docs/internals/embedding-store.md",), 10),
    "store-at-once": Figures(
        "scripts/load --compare --store --publish-after 1", ("docs/internals/embedding-store.md",), 10
    ),
    "causes": Figures(
        "scripts/load --compare --store --frontends 3 --requests 400 --seed 41", ("docs/deploy/fleet.md",), 10
    ),
    "transports": Figures("scripts/load --transports --rounds 6", ("docs/operate/scale.md",), 10),
    "transports-alone": Figures(
        "scripts/load --transports --without-engines --rounds 6", ("docs/operate/scale.md",), 10
    ),
    "load-tcp": Figures("scripts/load --requests 2000 --transport tcp", ("docs/operate/scale.md",), 5),
    "serve-tcp": Figures("semel bench serve --transport tcp", ("docs/get-started/performance.md",), 18),
    "again-tcp": Figures("semel bench serve --transport tcp --quick --only again", ("docs/operate/scale.md",), 3),
    "simulate": Figures(
        "semel simulate --level whole --frontends 4 --workers 3 --workload conversations --rate 20 --seconds 60"
        " --seed 1",
        ("docs/operate/capacity.md",),
        1,
    ),
    "capacity": Figures(
        "semel simulate --frontends 8 --workers 250 --workload conversations --rate 906 --seconds 10 --compare"
        " --plot docs/capacity",
        ("docs/operate/capacity.md",),
        3,
    ),
    "capacity-crash": Figures(
        "semel simulate --frontends 8 --workers 250 --workload conversations --rate 906 --seconds 10"
        " --fault crash:worker=7,at_s=5,for_s=60",
        ("docs/operate/capacity.md",),
        1,
    ),
    "viral": Figures(
        "semel simulate --frontends 100 --workers 100 --workload viral --rate 360 --seconds 15 --json",
        ("docs/operate/capacity.md",),
        1,
    ),
    "thousand": Figures(
        "semel simulate --frontends 1000 --workers 1000 --workload conversations --rate 3600 --seconds 55.6",
        ("docs/operate/capacity.md",),
        2,
    ),
    "scenarios": Figures("python -m tools.simulate.scenarios", ("docs/operate/capacity.md",), 10),
    "real-sockets": Figures(
        "python -m tools.simulate.real_sockets --fit 40 --seed 41", ("docs/operate/capacity.md",), 1
    ),
    "makespans": Figures("python -m tools.fleet.trace_makespans 3000", ("docs/operate/capacity.md",), 30),
    "aborts-tcp": Figures(
        "scripts/load --requests 2000 --transport tcp --without-engines", ("docs/operate/scale.md",), 5
    ),
    "matrix": Figures("scripts/matrix", ("docs/internals/encoder.md",), 30),
    "families": Figures("scripts/families --write", ("docs/get-started/models.md",), 30),
    "door": Figures("semel bench serve --door", ("docs/deploy/plain-vllm.md",), 45),
    "door-families": Figures("scripts/families --door", ("docs/deploy/plain-vllm.md",), 90),
    "door-rl-loop": Figures("python -m tools.engine.rl_loop", ("docs/deploy/plain-vllm.md",), 10),
    "sizes": Figures("scripts/sizes", ("docs/get-started/models.md",), 30),
    "generic-cost": Figures("scripts/generic-cost", ("docs/get-started/models.md",), 5),
    "attack": Figures("scripts/attack --seconds 8", ("docs/security/threats.md",), 25),
    "documents": Figures('scripts/attack --only "8 documents" --against semel', ("docs/security/threats.md",), 3),
    "review": Figures("scripts/attack --review --seconds 12", ("docs/security/threats.md",), 12),
    "scoreboard": Figures("scripts/attack --scoreboard --write", ("docs/security/threats.md",), 8),
    "shares": Figures("scripts/shares", ("docs/security/threats.md",), 10),
    "failing-worker": Figures("scripts/failing-worker", ("docs/deploy/fleet.md",), 5),
    "hostile": Figures("scripts/hostile --files 100000 --seed 1", ("docs/api/media.md",), 20),
    "pool-cost": Figures(f"scripts/pool-cost {MODEL} --times 7", ("docs/security/sandbox.md",), 3),
    "image-cost": Figures(
        f"scripts/image-cost {MODEL} --other CHECKOUT --images 500",
        ("docs/security/sandbox.md",),
        10,
        by_hand="it needs a checkout of the commit that is compared",
    ),
}
"""By name."""


def commands_of(page: str) -> Iterator[str]:
    """Yield the commands of a page that measure: in back quotes, or behind the prompt of a console."""
    for words in re.findall(r"`([^`\n]+)`", page) + re.findall(r"^\$ (.+)$", page, re.MULTILINE):
        command = words.partition("#")[0].strip()
        if command.startswith(MEASURING):
            yield command


def main() -> None:
    """Run the commands that are named, or all that need nothing else."""
    parser = argparse.ArgumentParser(description="Make the figures of README and docs anew.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--into", type=Path, default=ROOT / "figures", help="where what each prints is kept")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in FIGURES]:
        parser.error(f"{unknown[0]}: there is no such name; --list has them")
    chosen = {name: FIGURES[name] for name in options.names or FIGURES}
    if options.list:
        for name, one in chosen.items():
            _say(f"{name:16}{one.minutes:4g} min  {one.command}  ({', '.join(one.pages)}){_reason(one)}")
        return
    sys.exit(_run({name: one for name, one in chosen.items() if not one.by_hand}, options.into))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _reason(one: Figures) -> str:
    return f"; by hand: {one.by_hand}" if one.by_hand else ""


def _run(chosen: dict[str, Figures], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, one in chosen.items():
        began = time.monotonic()
        with (folder / f"{name}.txt").open("w") as output:
            code = subprocess.run(_words(one, folder), cwd=ROOT, stdout=output, timeout=LIMIT_S, check=False).returncode
        failed += code != 0
        verdict = "" if code == 0 else f", exit code {code}"
        _say(f"{name}: {one.command}: {(time.monotonic() - began) / 60:.1f} min{verdict} → {name}.txt")
    return int(failed > 0)


def _words(one: Figures, folder: Path) -> list[str]:
    if MODEL not in one.command.split():
        return shlex.split(one.command)
    model = folder / "model"
    if not model.exists():
        subprocess.run(["semel", "testing", "model", "qwen2-vl", str(model)], check=True, timeout=600)
    return shlex.split(one.command.replace(MODEL, shlex.quote(str(model))))


if __name__ == "__main__":
    main()
