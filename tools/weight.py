"""The weight of the project next to its limits: `scripts/weight` prints a table; over a limit its exit code is 1.

Lines are those of files, blank ones included. Calls are Python calls inside semel, counted by a profiler while requests
pass an ASGI application, a zmq link and a worker whose engine has no model, all in one process: without uvicorn and
vLLM, the same number on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import semel
from semel.cache import LruCache
from semel.lab.testing.pacing import PacedEngine
from semel.render import ChatRenderer, ChatTemplate, Tokenizer
from tests.frontend.rig import Rig, rig
from tests.render.conftest import PLACEHOLDERS, insertion, write_model
from tests.render.drawn import Drawing, image_part

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = Path(semel.__file__).parent
WORKSHOP: Final = ("lab",)
CHAT: Final = "/v1/chat/completions"
TOKENS: Final = 65
TOKENS_PER_S: Final = 100.0
SAMPLES: Final = 15


@dataclass(frozen=True)
class Row:
    """A figure and the most that it may be, None without a limit."""

    name: str
    value: int
    limit: int | None = None
    missed: int = 0
    """Where the limit is missed, the most that CI takes until it is reached. A feature may add its own lines to it."""

    @property
    def is_kept(self) -> bool:
        return self.limit is None or self.value <= self.limit

    @property
    def is_taken(self) -> bool:
        """Whether CI takes it."""
        return self.is_kept or self.value <= self.missed


@dataclass(frozen=True)
class Walk:
    """The Python functions of semel that a request calls."""

    calls: Counter[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}


def lines(folder: Path, *, without: tuple[str, ...] = ()) -> int:
    """Count the lines of a folder's Python files."""
    files = (path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in without)
    return sum(len(path.read_bytes().splitlines()) for path in files)


def largest_folder() -> tuple[str, int]:
    """Find the folder of the package with the most modules on one level."""
    counts = Counter(path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    folder, count = counts.most_common(1)[0]
    return str(folder.relative_to(SOURCE)), count


@contextmanager
def walking() -> Iterator[Walk]:
    """Count the calls of this thread, and of those that begin meanwhile."""
    walk, inside = Walk(Counter()), str(SOURCE) + "/"
    outside = tuple(f"{inside}{name}/" for name in WORKSHOP)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside) and not code.co_filename.startswith(outside):
            walk.calls[code.co_filename, code.co_qualname] += 1

    threading.setprofile(profile)  # of threads that begin meanwhile
    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def walk_of(request: Callable[[], Awaitable[object]]) -> Walk:
    """Count one request of a kind that has been sent before: the shortest of several, so that no heartbeat counts."""
    for _ in range(SAMPLES):
        await request()
    walks = []
    for _ in range(SAMPLES):
        with walking() as walk:
            await request()
        walks.append(walk)
    return min(walks, key=lambda walk: walk.calls.total())


async def requests(app: Rig) -> list[Row]:
    """Count a text chat, a repeated image and a token of a stream."""

    def ask(content: object, **more: Any) -> Callable[[], Awaitable[object]]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}

        async def send() -> None:
            response = await app.post(CHAT, body)
            assert response.status_code == 200, response.text

        return send

    text = await walk_of(ask("Hello there"))
    image = await walk_of(ask([image_part(7), {"type": "text", "text": "?"}]))
    short = await walk_of(ask("Hello there", stream=True))
    long = await walk_of(ask("Hello there", stream=True, max_tokens=TOKENS))
    per_token = {call: (count - short.calls[call]) / (TOKENS - 1) for call, count in long.calls.items()}
    steady = {call: count for call, count in per_token.items() if count > 0.5}
    return [
        Row("calls of a text chat", text.calls.total(), 750),
        Row("functions of a text chat", len(text.calls)),
        Row("files of a text chat", len(text.files), 65),
        Row("calls of a repeated image", image.calls.total()),
        Row("files of a repeated image", len(image.files)),
        Row("calls of a streamed token", round(sum(per_token.values())), 95),
        Row("files of a streamed token", len({file for file, _ in steady}), 18),
    ]


async def journeys() -> list[Row]:
    """Send them through an application of their own."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        renderer = ChatRenderer(ChatTemplate.load(model), Tokenizer.load(model), PLACEHOLDERS, insertion)
        drawing = Drawing(renderer, LruCache(1 << 20))
        paced = partial(PacedEngine, rate=TOKENS_PER_S)
        async with rig(model, drawing.pipeline, engine_bytes=1 << 20, make_engine=paced) as app:
            return await requests(app)


def weigh() -> list[Row]:
    """Count lines and modules."""
    folder, count = largest_folder()
    return [
        Row("lines of the product", lines(SOURCE, without=WORKSHOP), 60_350, missed=73_700),
        Row("lines of the workshop (lab)", lines(SOURCE / "lab")),
        Row("lines of tests", lines(ROOT / "tests"), 78_000, missed=95_100),
        Row("lines of tools", lines(ROOT / "tools")),
        Row(f"modules in a folder ({folder})", count, 20),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args()
    rows = [*weigh(), *asyncio.run(journeys())]
    if options.json:
        print(json.dumps({row.name: row.value for row in rows}, indent=1))
    else:
        print("| what | now | at most | |", "|---|---|---|---|", sep="\n")
        for row in rows:
            limit = "" if row.limit is None else f"{row.limit:,}"
            print(f"| {row.name} | {row.value:,} | {limit} | {'' if row.is_kept else 'over'} |")
    sys.exit(not all(row.is_kept for row in rows))


if __name__ == "__main__":
    main()
