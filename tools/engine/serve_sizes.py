"""Images of random sizes through `semel serve`, one token each: no error of the server.

    scripts/sizes                      # every family that takes images, 300 sizes each
    scripts/sizes mistral3 --count 30

Each size is sent once. 400 is right for what a model's own processor refuses, and counted; 500 fails, and so does a
server that ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from semel.lab.testing.models import FAMILIES, build
from tests.serve.served import Served, image_url, serving
from tools.engine.sizes import image_of, random_sizes

_RIGHT: Final = frozenset({200, 400})


def main() -> None:
    """Send them, and show a line for each family."""
    takers = [
        name
        for name, model in FAMILIES.items()
        if model.serving.level == "engine" and "image" in model.serving.max_items
    ]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"all by default: {', '.join(takers)}")
    parser.add_argument("--count", type=int, default=300, help="how many sizes")
    options = parser.parse_args()
    if strangers := set(options.family) - set(takers):
        parser.error(f"no engine takes images of {', '.join(sorted(strangers))} here")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    results = [measure(family, options.count) for family in options.family or takers]
    sys.exit(not all(results))


def measure(family: str, count: int) -> bool:
    """Start a server, send everything, show what came of it."""
    with tempfile.TemporaryDirectory(prefix="sizes-") as folder:
        home = Path(folder) / "home"
        home.mkdir()
        model = build(family, Path(folder) / "model")
        with serving(model, home, *FAMILIES[family].serving.engine_flags, within_s=400) as served:
            statuses, wrong = send(served, count)
    counts = ", ".join(f"{amount} × {status}" for status, amount in sorted(statuses.items()))
    sys.stdout.write(f"{family}: {counts}\n" + "".join(f"    {line}\n" for line in wrong))
    sys.stdout.flush()
    return not wrong


def send(served: Served, count: int) -> tuple[Counter[int], list[str]]:
    """Return the statuses of all answers, and what was wrong."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    for width, height in random_sizes(count):
        answer = served.chat([image_url(image_of(width, height)), {"type": "text", "text": "What?"}], max_tokens=1)
        statuses[answer.status_code] += 1
        if answer.status_code not in _RIGHT:
            wrong.append(f"{width}×{height}: {answer.status_code} {answer.text[:200]}")
    return statuses, wrong


if __name__ == "__main__":
    main()
