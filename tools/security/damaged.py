"""Damaged files by the thousand: `python -m tools.security.damaged --files 100000 --seed 1`.

Valid files of every format are damaged and sent through real pools with tiny models. Each must be answered, within its
time, with a feature or with an error that is the client's and in our words; no process may grow past its memory. Exit
code 1 if one is not so. What failed is written to `--keep`, to be looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from semel.core import Media, Modality, Target
from semel.errors import RequestError, SemelError
from semel.media import DecodeLimits
from semel.media.signature import FileKind
from semel.processing.pool.pool import Pool
from tests.security.corpus import Specimen, documents, specimens
from tests.security.messages import is_ours
from tools.security.memory import Memory
from tools.security.mutate import mutate

__all__ = ["KINDS", "LIMITS", "Findings", "attack", "damaged", "main"]

LIMITS: Final = DecodeLimits(max_audio_s=60, max_video_s=60, max_image_pixels=4_000_000, max_video_pixels=8_000_000)
MAX_MEMORY_BYTES: Final = 512 << 20
TIMEOUT_S: Final = 10.0
MARGIN_S: Final = 10.0
"""On a busy machine a process that is ended takes a while to be gone."""

_LOOK_S: Final = 0.25
_WEIGHTS: Final[dict[FileKind, int]] = {"image": 14, "audio": 3, "video": 3, "document": 4}
KINDS: Final = tuple(_WEIGHTS)
_MODELS: Final[dict[Modality, str]] = {"image": "qwen2-vl", "video": "qwen2-vl", "audio": "qwen2-audio"}


@dataclass(slots=True)
class Findings:
    """The result of the files."""

    values: Counter[FileKind] = field(default_factory=Counter)
    errors: Counter[tuple[FileKind, str]] = field(default_factory=Counter)
    slowest_s: float = 0.0
    took_s: float = 0.0
    """All of them, the start of the processes left out."""

    late: int = 0
    crashed: int = 0
    faults: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    keep: Path | None = None

    @property
    def answered(self) -> int:
        """Files that were answered as they should be."""
        return self.values.total() + self.errors.total()

    def note(self, specimen: str, media: Media, error: SemelError | None, took_s: float) -> None:
        """Judge one answer."""
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > TIMEOUT_S + MARGIN_S:
            self._fault(specimen, media, f"took {took_s:.1f} s")
        if error is None:
            self.values[_kind(media)] += 1
        elif not isinstance(error, RequestError) or not is_ours(str(error)):
            self._fault(specimen, media, f"{type(error).__name__}: {error}")
        else:
            self.errors[_kind(media), type(error).__name__] += 1
            self.late += "--max-processing-s" in str(error)
            self.crashed += "crashes the process" in str(error)
            if "--max-processing" in str(error) or "crashes" in str(error):
                self._keep(media)

    def _fault(self, specimen: str, media: Media, what: str) -> None:
        self.faults.append(f"{_kind(media)} made of {specimen} ({self._keep(media)}): {what}")

    def _keep(self, media: Media) -> str:
        name = f"{hashlib.sha256(media.data).hexdigest()[:16]}.{_kind(media)}"
        if self.keep is not None:
            (self.keep / name).write_bytes(media.data)
        return name


async def attack(
    folder: Path,
    *,
    files: int,
    seed: int,
    kinds: Sequence[FileKind] = KINDS,
    processes: int = 2,
    progress: Progress | None = None,
    keep: Path | None = None,
) -> Findings:
    """Send that many damaged files; `folder` takes the models."""
    findings = Findings(keep=keep)
    task = None if progress is None else progress.add_task("damaged files", total=files)
    async with _pools(folder, processes) as pools:
        pending = damaged(files, seed, kinds)
        watching = asyncio.create_task(_watch(set(pools.values()), findings.memory))

        async def send() -> None:
            for specimen, media in pending:  # shared: each sender takes the next one
                sent = time.monotonic()
                error = None
                try:
                    if media.page is not None:
                        await pools[media.modality].count_pages(media)
                    await pools[media.modality].process(media)
                except SemelError as raised:
                    error = raised
                findings.note(specimen, media, error, time.monotonic() - sent)
                if progress is not None and task is not None:
                    progress.advance(task)

        began = time.monotonic()
        await asyncio.gather(*(send() for _ in range(processes + 1)))
        findings.took_s = time.monotonic() - began
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    findings.faults += findings.memory.faults
    return findings


def _kind(media: Media) -> FileKind:
    return media.modality if media.page is None else "document"


def damaged(files: int, seed: int, kinds: Sequence[FileKind] = KINDS) -> Iterator[tuple[str, Media]]:
    """Damaged files, and what each was made of; the same seed gives the same ones."""
    rng = Random(seed)
    whole: dict[FileKind, list[Specimen]] = {kind: [] for kind in _WEIGHTS}
    for specimen in (*specimens(), *documents()):
        whole[_kind(specimen.media)].append(specimen)
    data = {kind: [specimen.media.data for specimen in of_kind] for kind, of_kind in whole.items()}
    for kind in rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds], k=files):
        specimen = rng.choice(whole[kind])
        yield specimen.name, replace(specimen.media, data=mutate(specimen.media.data, data[kind], rng))


@contextlib.asynccontextmanager
async def _pools(folder: Path, processes: int) -> AsyncIterator[dict[Modality, Pool]]:
    from semel.lab.testing.models import build

    async with contextlib.AsyncExitStack() as stack:
        started: dict[str, Pool] = {}
        for name in dict.fromkeys(_MODELS.values()):
            pool = await Pool.start(
                build(name, folder / name),
                Target("float32", "engine" if name == "qwen2-vl" else "processor"),
                processes=processes,
                limits=LIMITS,
                timeout_s=TIMEOUT_S,
                max_memory_bytes=MAX_MEMORY_BYTES,
            )
            stack.push_async_callback(pool.close)
            started[name] = pool
        yield {modality: started[name] for modality, name in _MODELS.items()}


async def _watch(pools: set[Pool], memory: Memory) -> None:
    while True:
        for pool in pools:
            for pid in (*pool.pids, *pool.spare_pids):
                memory.look(pid)
        await asyncio.sleep(_LOOK_S)


def main(words: list[str] | None = None) -> int:
    """Attack as the command line asks for it, and print what came of it."""
    options = _parser().parse_args(words)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    logging.getLogger("semel").setLevel(logging.CRITICAL)
    with (options.keep / "log" if options.keep else Path(os.devnull)).open("wb") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())  # the processes say there what was wrong with each file
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory(prefix="semel-damaged-") as folder, Progress(*columns) as progress:
        running = attack(
            Path(folder),
            files=options.files,
            seed=options.seed,
            kinds=options.kind or KINDS,
            processes=options.processes,
            progress=progress,
            keep=options.keep,
        )
        findings = asyncio.run(running)
    console = Console()
    console.print(_table(findings))
    for fault in findings.faults[:20]:
        console.print(fault, style="red", highlight=False, markup=False)
    return int(bool(findings.faults) or findings.answered < options.files)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("scripts/hostile", description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="of files; all kinds without it")
    parser.add_argument(
        "--preprocessing-processes",
        dest="processes",
        type=int,
        default=2,
        help="pool processes for each of the two models",
    )
    parser.add_argument("--keep", type=Path, help="a folder for files that failed, crashed or took too much, and a log")
    return parser


def _table(findings: Findings) -> Table:
    table = Table("", *_WEIGHTS, "all", title="damaged files")
    table.add_row("features", *(f"{findings.values[m]:,}" for m in _WEIGHTS), f"{findings.values.total():,}")
    for kind in sorted({kind for _, kind in findings.errors}):
        counts = [findings.errors[modality, kind] for modality in _WEIGHTS]
        table.add_row(kind, *(f"{count:,}" for count in counts), f"{sum(counts):,}")
    for name, value in (
        ("answered a second", f"{findings.answered / findings.took_s:,.0f}"),
        ("slowest, s", f"{findings.slowest_s:.2f}"),
        ("over their time", str(findings.late)),
        ("crashed a process", str(findings.crashed)),
        ("most memory, MiB", f"{findings.memory.most_bytes / 2**20:,.0f}"),
        ("of its limit", f"{findings.memory.most_share:.0%}"),
        ("faults", str(len(findings.faults))),
    ):
        table.add_row(name, *("" for _ in KINDS), value)
    return table


if __name__ == "__main__":
    sys.exit(main())
