"""S6: what a decoder does wrong costs one request. Real processes on a tiny model."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semel.core import Feature, Media
from semel.errors import InvalidRequest, MediaTooLarge, MediaUndecodable, ProtocolError, ServiceError
from semel.media import DecodeLimits, decode_audio
from semel.processing import HfProcessor
from semel.processing.pool import child
from semel.processing.pool.pipe import HEADER_BYTES, Failed, Load, Work, decode_answer, encode, read_header
from semel.processing.pool.pool import Pool
from tests.processing.test_pool import TARGET, bomb, picture, stopped
from tests.security.confined import confined
from tests.security.corpus import encode_image
from tests.security.messages import is_ours
from tests.waiting import until
from tools.security.memory import data_limit, status_bytes

Folder = Callable[[str], Path]
MAX_MEMORY_BYTES = 256 << 20


@pytest.fixture(scope="module")
async def pool(tiny: Folder) -> AsyncIterator[Pool]:
    pool = await Pool.start(
        tiny("qwen2-vl"), TARGET, processes=1, spares=1, timeout_s=5, max_memory_bytes=MAX_MEMORY_BYTES
    )
    yield pool
    await pool.close()


async def crash(pool: Pool, media: Media, number: int, tenant: str = "") -> BaseException | Feature:
    """Send an item, and let its process die of a signal while it works on it."""
    await until(lambda: len(pool.pids) == 1 and all(one.free for one in pool.processes.children), within_s=90)
    with stopped(pool) as (pid,):
        sent = asyncio.create_task(pool.process(media, tenant=tenant))
        await asyncio.sleep(0)
        await until(lambda: not pool.processes.children[0].free)
        os.kill(pid, number)
        if number != signal.SIGKILL:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: pid not in pool.pids)
    (result,) = await asyncio.gather(sent, return_exceptions=True)
    return result


@pytest.mark.slow
async def test_every_process_has_a_limit_of_memory_that_the_kernel_keeps_S6(pool: Pool) -> None:
    (pid,) = pool.pids
    limit = data_limit(pid)
    assert limit is not None
    assert status_bytes(pid, "VmData") <= limit <= status_bytes(pid, "VmData") + MAX_MEMORY_BYTES


@pytest.mark.slow
async def test_memory_beyond_the_limit_costs_one_request_and_no_process_S6(pool: Pool) -> None:
    pids, media = pool.pids, bomb(12_000)
    assert len(media.data) < 100_000
    with pytest.raises(MediaTooLarge, match=r"268,435,456 bytes \(--max-processing-memory-gb\)") as told:
        await pool.process(media)
    assert told.value.status == 413
    assert is_ours(str(told.value))
    assert (await pool.process(picture(56, 56))).layout.num_embeds == 4
    assert pool.pids == pids
    naive = confined('Image.open(io.BytesIO(data)).convert("RGB")', media.data)
    assert naive.said == "MemoryError", "the control wants it all"


@pytest.mark.parametrize(("left_behind", "goes_on"), [(100 << 20, True), (200 << 20, False)])
def test_a_process_that_its_items_have_used_up_gives_its_place_to_another_S6(
    left_behind: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by scripts/hostile: what a library leaks counts against the limit, and then every item is refused."""
    load = Load("", TARGET, DecodeLimits(), timeout_s=1.0, max_memory_bytes=MAX_MEMORY_BYTES)
    loaded = 400 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (loaded + MAX_MEMORY_BYTES, -1))
    monkeypatch.setattr(child, "_data_bytes", lambda: loaded + left_behind)
    assert child._is_used_up(load) is not goes_on


@pytest.mark.slow
@pytest.mark.parametrize("used_up", [False, True])
def test_a_process_that_is_used_up_says_so_in_its_last_answer_S6(
    tiny: Folder, used_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load("", TARGET, DecodeLimits(), timeout_s=1.0, max_memory_bytes=MAX_MEMORY_BYTES)
    monkeypatch.setattr(child, "_is_used_up", lambda _: used_up)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        processor = HfProcessor.load(tiny("qwen2-vl"), TARGET)
        goes_on = child._answer(theirs, processor, load, Work(0, "image", None, {}), b"no image", None)
        answer = decode_answer(ours.recv(1_000)[HEADER_BYTES:], payload_bytes=0)
    assert isinstance(answer, Failed)
    assert (answer.error, answer.last, goes_on) == ("MediaUndecodable", used_up, not used_up)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_process_that_gives_up_its_place_takes_no_item_with_it_S6(pool: Pool) -> None:
    """The next item waits already. A pool that gives it to a process about to end has it fail, and suspects it."""
    await until(lambda: len(pool.spare_pids) == 1 and all(one.free for one in pool.processes.children), within_s=90)
    failed = pool.failed
    with stopped(pool) as (pid,):
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        nearly = status_bytes(pid, "VmData") + MAX_MEMORY_BYTES // 4
        resource.prlimit(pid, resource.RLIMIT_DATA, (nearly, hard))
        media = (Media("image", b"no image"), *(picture(56, 56 + 28 * n) for n in range(8)))
        sent = [asyncio.create_task(pool.process(one)) for one in media]
        await asyncio.sleep(0)
    guilty, *innocent = await asyncio.gather(*sent, return_exceptions=True)
    assert isinstance(guilty, MediaUndecodable)
    assert [one for one in innocent if not isinstance(one, Feature)] == []
    assert pid not in pool.pids
    assert pool.failed == failed + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mime", "options"),
    [("image/" + "a" * (17 << 20), {}), (None, {"size": "a" * (17 << 20)}), ("image/png", {"size": [1] * (17 << 20)})],
)
async def test_words_about_an_item_that_are_too_many_are_refused_and_the_process_lives_S6(
    pool: Pool, mime: str | None, options: dict[str, object]
) -> None:
    pids, media = pool.pids, Media("image", b"x", mime)
    with pytest.raises(InvalidRequest, match="the limit is 16,777,216"):
        await pool.process(media, options)
    assert pool.pids == pids
    naive = encode(Work(0, "image", mime, options), 1)
    with pytest.raises(ProtocolError):  # what ends the process of a pool that sends it all the same
        read_header(naive[:HEADER_BYTES], max_payload_bytes=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_media_whose_process_is_killed_are_never_refused_for_it_S6(pool: Pool) -> None:
    """The kernel kills for want of memory, and so do people: the item may be innocent.

    The wrong implementation took a kill for a suspicion, and refused the item after the second.
    """
    media = picture(112, 84)
    for _ in range(2):
        await until(lambda: len(pool.pids) == 1, within_s=90)
        made = await crash(pool, media, signal.SIGKILL)
        assert isinstance(made, Feature)
        assert made.layout.num_embeds == 12


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_media_that_end_their_process_by_themselves_get_a_second_try_and_no_third_S6(pool: Pool) -> None:
    media = picture(112, 112)
    for _ in range(2):
        await until(lambda: len(pool.pids) == 1, within_s=90)
        assert isinstance(await crash(pool, media, signal.SIGTERM), ServiceError)
    await until(lambda: len(pool.pids) == 1, within_s=90)
    pids = pool.pids
    with pytest.raises(MediaUndecodable, match="crashes the process"):
        await pool.process(media)
    assert pool.pids == pids


def surround(channels: int) -> bytes:
    """A clip whose channels are one level each, from 0 up."""
    levels = (np.arange(channels) / 128)[:, None].repeat(160, axis=1)
    body = (levels.T * 32_768).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", 1, channels, 16_000, 32_000 * channels, 2 * channels, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


NAIVE_PLANES = """
with av.open(io.BytesIO(data)) as file:
    to_planes = av.AudioResampler(format="fltp")
    for frame in file.decode(audio=0):
        for part in to_planes.resample(frame):
            if len(part.planes) != part.layout.nb_channels:
                raise MemoryError
"""


def test_nothing_is_read_behind_the_last_channel_of_a_clip_S6() -> None:
    """Found by scripts/hostile: PyAV reads on behind the planes of more than eight channels, into foreign memory."""
    counts = (1, 2, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 63, 64)
    for channels in counts:
        samples = decode_audio(surround(channels), DecodeLimits(), sampling_rate=16_000)
        assert samples.shape == (160,)
        assert np.allclose(samples, (channels - 1) / 256, atol=1e-5), channels
    naive = [confined(NAIVE_PLANES, surround(channels)).said for channels in (9, 11, 13)]
    assert "MemoryError" in naive, "the control reads planes that are none"


@pytest.mark.slow
async def test_an_image_of_a_format_that_is_not_listed_is_not_opened_S6(pool: Pool) -> None:
    """CVE-2026-22778. Pillow, left alone, opens it."""
    data = encode_image(Image.new("RGB", (64, 64)), "JPEG2000")
    with pytest.raises(MediaUndecodable):
        await pool.process(Media("image", data, "image/png"))
    assert confined("Image.open(io.BytesIO(data)).load()", data).said == "done"
