"""Documents through a sandboxed pool process: `pdf` again, and the process, its pipe and the pool's rules for it."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from semel.core import Media, Page, Target
from semel.errors import RequestError, SemelError
from semel.lab.testing.models import build
from semel.media import DecodeLimits
from semel.processing.pool.pool import Pool
from tests.security.messages import is_ours
from tools.fuzz.oracle import check_decoders_message, expect
from tools.fuzz.pdf import mutate as edited
from tools.fuzz.pdf import seeds
from tools.security.mutate import mutate as damaged

__all__ = ["mutate", "run", "seeds"]

_LIMITS: Final = DecodeLimits(max_image_pixels=1 << 20)
_TARGET: Final = Target("float32", "engine")
_DPI: Final = 36
_EDITED: Final = 0.7
_TIMEOUT_S: Final = 60.0
"""So long that a process which a busy machine keeps waiting is not taken for one that was stopped."""

_MAX_MEMORY_BYTES: Final = 256 << 20


def run(data: bytes) -> None:
    """Whatever the bytes, there is a feature with the layout that it said, or an error that is the client's."""
    runner, pool = _started()
    try:
        runner.run(_ask(pool, data))
    except RequestError as error:
        check_decoders_message(error)
        expect(is_ours(str(error)), f"a message that nobody knows: {error} (S7)")
    except SemelError as error:
        expect(False, f"{type(error).__name__}: {error} (S6)")


async def _ask(pool: Pool, data: bytes) -> None:
    pages = await pool.count_pages(Media("image", data))
    expect(0 < pages < 1 << 31, f"there are {pages:,} pages")
    page = Media("image", data, page=Page(1 + len(data) % min(pages, 4), _DPI))
    layout = await pool.lay_out(page)
    feature = await pool.process(page)
    expect(feature.layout == layout, f"a layout of {len(feature.layout)}, and not of {len(layout)}")


def mutate(data: bytes, random: Random) -> bytes | None:
    """Edit its tokens, or damage it as bad disks do: no branch of PDFium guides the fuzzer."""
    return edited(data, random) if random.random() < _EDITED else damaged(data, [*seeds().values()], random)


@cache
def _started() -> tuple[asyncio.Runner, Pool]:
    """Return a pool with one process, which ends with this one, and the loop that it belongs to."""
    runner, folder = asyncio.Runner(), tempfile.TemporaryDirectory(prefix="semel-fuzz-model-")
    model = build("qwen2-vl", Path(folder.name) / "model")
    pool = runner.run(
        Pool.start(
            model, _TARGET, processes=1, limits=_LIMITS, timeout_s=_TIMEOUT_S, max_memory_bytes=_MAX_MEMORY_BYTES
        )
    )

    def close() -> None:
        runner.run(pool.close())
        runner.close()
        folder.cleanup()

    atexit.register(close)
    return runner, pool
