"""The pool, with real processes on a tiny model."""

from __future__ import annotations

import asyncio
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from semel.core import Feature, Layout, Mask, Media, Target, Tensor
from semel.errors import (
    ConfigError,
    InvalidRequest,
    MediaDegenerate,
    MediaTooLarge,
    MediaUndecodable,
    NotReady,
    ProtocolError,
    SemelError,
    ServiceError,
)
from semel.media import DecodeLimits
from semel.processing import HfProcessor
from semel.processing.pool import child
from semel.processing.pool.pipe import (
    Failed,
    Load,
    Made,
    TensorHead,
    decode_answer,
    encode,
    read_header,
    to_error,
    to_feature,
    to_made,
    to_payload,
)
from semel.processing.pool.pool import Pool
from semel.wire.layout_runs import to_runs
from tests.waiting import until

Folder = Callable[[str], Path]
TARGET = Target("float32", "engine")
TIMEOUT_S = 3.0
MAX_MEMORY_BYTES = 256 << 20
MAX_WAITING = 60
PATIENCE_S = 30.0
LOADING_S = 90.0

PARENT = """
import asyncio, sys
from pathlib import Path
from semel.core import Target
from semel.processing.pool.pool import Pool

async def main():
    pool = await Pool.start(Path(sys.argv[1]), Target("float32", "engine"), spares=0)
    print(*pool.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
async def pool(tiny: Folder) -> AsyncIterator[Pool]:
    pool = await Pool.start(
        tiny("qwen2-vl"),
        TARGET,
        processes=2,
        spares=0,
        timeout_s=TIMEOUT_S,
        max_memory_bytes=MAX_MEMORY_BYTES,
        max_waiting=MAX_WAITING,
    )
    yield pool
    await pool.close()


@pytest.fixture(scope="module")
def hf(tiny: Folder) -> HfProcessor:
    return HfProcessor.load(tiny("qwen2-vl"), TARGET)


@contextmanager
def stopped(pool: Pool) -> Iterator[tuple[int, ...]]:
    """All processes of the pool, in the middle of whatever they get meanwhile."""
    pids = pool.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in set(pids) & set(pool.pids):
            os.kill(pid, signal.SIGCONT)


def ended(pid: int) -> bool:
    """Whether a process has ended, as far as the kernel knows; who started it may not have noticed."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE_S)[0])
    finally:
        os.close(descriptor)


def open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def submit(pool: Pool, *media: Media) -> list[asyncio.Task[Feature]]:
    return [asyncio.create_task(pool.process(one)) for one in media]


def picture(width: int, height: int) -> Media:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, "PNG")
    return png(buffer)


def bomb(side: int) -> Media:
    """A few bytes that are many pixels."""
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return png(buffer)


def png(buffer: io.BytesIO) -> Media:
    return Media("image", buffer.getvalue(), "image/png")


def content(feature: Feature) -> object:
    tensors = {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in feature.tensors.items()}
    return feature.modality, tensors, feature.layout


@pytest.mark.slow
async def test_a_feature_is_what_the_processor_makes_in_this_process(pool: Pool, hf: HfProcessor) -> None:
    options = {"size": {"shortest_edge": 3_136, "longest_edge": 28 * 28 * 16}}
    for media, kwargs in ((picture(140, 84), {}), (picture(560, 560), options)):
        made = await pool.process(media, kwargs)
        assert content(made) == content(hf.process(media, kwargs))
        assert all(tensor.data.readonly for tensor in made.tensors.values())


@pytest.mark.slow
async def test_the_description_is_that_of_the_processor(pool: Pool, hf: HfProcessor) -> None:
    assert pool.description.fingerprint == hf.fingerprint
    assert pool.description.placeholders == hf.placeholders
    assert not pool.description.encoder_decoder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("media", "error"),
    [
        (picture(1, 1), MediaDegenerate),
        (picture(2, 2_000), MediaUndecodable),
        (Media("image", b""), MediaUndecodable),
        (Media("image", b"not an image"), MediaUndecodable),
        (Media("video", b"no video"), MediaUndecodable),
    ],
)
async def test_an_error_is_the_one_that_the_processor_raises(
    pool: Pool, hf: HfProcessor, media: Media, error: type[SemelError]
) -> None:
    failed = pool.failed
    with pytest.raises(error) as there:
        await pool.process(media)
    with pytest.raises(error) as here:
        hf.process(media)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    assert pool.failed == failed + 1


@pytest.mark.slow
async def test_media_that_need_more_memory_than_the_limit_are_refused_and_the_process_lives_S6(pool: Pool) -> None:
    pids = pool.pids
    with pytest.raises(MediaTooLarge, match="more memory than the limit of 268,435,456 bytes"):
        await pool.process(bomb(12_000))
    assert (await pool.process(picture(56, 56))).layout.num_embeds == 4
    assert pool.pids == pids


@pytest.mark.slow
@pytest.mark.parametrize("value", [10**30, "\ud800", object()])
async def test_options_that_cannot_travel_are_the_client_s_fault(pool: Pool, value: object) -> None:
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
        await pool.process(picture(56, 56), {"size": value})


@pytest.mark.slow
async def test_fifty_requests_at_once_each_get_their_own_feature(pool: Pool, hf: HfProcessor) -> None:
    processed, decoded = pool.processed, pool.decoded
    media = [picture(56 + 28 * (index % 10), 56 + 28 * (index // 10)) for index in range(50)]
    async with asyncio.timeout(PATIENCE_S):
        features = await asyncio.gather(*submit(pool, *media))
    assert [content(feature) for feature in features] == [content(hf.process(one)) for one in media]
    assert (pool.processed, pool.decoded) == (processed + 50, decoded + 50)


@pytest.mark.slow
async def test_an_answer_whose_caller_has_gone_is_dropped_and_the_next_is_right(pool: Pool, hf: HfProcessor) -> None:
    processed = pool.processed
    with stopped(pool) as pids:
        gone = submit(pool, *[picture(280, 280)] * (len(pids) + 1))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        next_ones = submit(pool, *[picture(84, 56)] * len(pids))
        await asyncio.sleep(0)
    expected = content(hf.process(picture(84, 56)))
    assert [content(feature) for feature in await asyncio.gather(*next_ones)] == [expected] * len(pids)
    async with asyncio.timeout(PATIENCE_S):  # one process may have made both, while the other is at what nobody wants
        await asyncio.gather(*(child.work for child in pool.processes.children if child.work is not None))
    assert pool.pids == pids
    assert pool.processed == processed + 2 * len(pids), "an item that only waited is never begun"


@pytest.mark.slow
async def test_a_tenant_that_fills_the_queue_yields_its_newest_items_to_another_S21(pool: Pool) -> None:
    one = picture(56, 56)
    with stopped(pool) as pids:
        flood = [asyncio.create_task(pool.process(one, tenant="A")) for _ in range(MAX_WAITING + len(pids))]
        await asyncio.sleep(0)
        assert pool.waiting == {"A": MAX_WAITING}
        other = [
            asyncio.create_task(pool.process(one, tenant="B")),
            asyncio.create_task(pool.lay_out(one, tenant="B")),
            asyncio.create_task(pool.cut(Media("audio", b"no clip"), lambda _: None, tenant="B")),
        ]
        await asyncio.sleep(0)
        assert pool.waiting == {"A": MAX_WAITING - 2, "B": 2}  # one process is not A's while others are about (S29)
        refused = await asyncio.gather(*flood[-3:], return_exceptions=True)
        with pytest.raises(NotReady, match="wait for preprocessing already"):
            await pool.process(one, tenant="A")
    for error in refused:
        assert isinstance(error, NotReady)
        assert "wait for preprocessing already" in str(error)
        assert error.retry_after_s is not None
        assert error.retry_after_s >= 1
    feature, layout, clip = await asyncio.gather(*other, return_exceptions=True)
    assert isinstance(feature, Feature)
    assert layout == feature.layout
    assert isinstance(clip, SemelError)
    assert not isinstance(clip, NotReady)
    assert len(pool.waiting) == 1, "it had its turns before most of the others"
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert pool.waiting == {}


def test_an_error_that_nobody_expects_stays_in_the_log_of_the_process_S7(caplog: pytest.LogCaptureFixture) -> None:
    load = Load("folder", Target("float32"), DecodeLimits(), timeout_s=1.0, max_memory_bytes=1)
    told = child._ours(RuntimeError("a secret at 0x7f00"), load)
    assert str(told) == "preprocessing failed; the log of its process says why"
    assert "a secret at 0x7f00" in caplog.text


@pytest.mark.slow
async def test_a_process_that_is_killed_while_idle_costs_nothing_S6(pool: Pool) -> None:
    await until(lambda: all(child.free for child in pool.processes.children))  # one may work for a caller that has gone
    failed, victim = pool.failed, pool.pids[0]
    os.kill(victim, signal.SIGKILL)
    assert ended(victim)
    assert victim in pool.pids, "nobody has noticed"
    assert len(await asyncio.gather(*submit(pool, *[picture(56, 56)] * 5))) == 5
    assert pool.failed == failed
    await until(lambda: victim not in pool.pids)


@pytest.mark.slow
async def test_the_processes_of_a_parent_that_is_killed_end_by_themselves(tiny: Folder) -> None:
    folder = str(tiny("qwen2-vl"))
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, folder, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    (pid,) = map(int, (await parent.stdout.readline()).split())
    parent.kill()
    await parent.wait()
    assert ended(pid)


@pytest.mark.slow
@pytest.mark.parametrize("is_tried_again", [True, False])
async def test_a_process_is_replaced_and_one_that_is_killed_at_work_costs_no_item_S6(
    is_tried_again: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without a second try it costs the item that it worked on, and no other."""
    if not is_tried_again:
        monkeypatch.setattr(Pool, "_try_again", lambda *_: False)
    await until(lambda: len(pool.pids) == 2, within_s=LOADING_S)
    replaced = pool.replaced
    with stopped(pool) as (victim, _):
        tasks = submit(pool, *[picture(56, 56)] * 5)
        await asyncio.sleep(0)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: victim not in pool.pids)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if not isinstance(result, Feature)]
    assert pool.replaced == replaced, "the others did not wait for its replacement"
    if is_tried_again:
        assert not errors
        return
    (error,) = errors
    assert isinstance(error, ServiceError)
    assert str(error) == "the preprocessing process that worked on the image died; send the request again"


@pytest.mark.slow
async def test_an_item_whose_process_is_stopped_is_made_by_another_S29(tiny: Folder) -> None:
    """Control: it stands still for good; without a second try the item is 503."""
    pool = await Pool.start(tiny("qwen2-vl"), TARGET, processes=2, timeout_s=4.0)
    try:
        await until(lambda: len(pool.pids) == 2, within_s=LOADING_S)
        os.kill(pool.pids[0], signal.SIGSTOP)
        made = await asyncio.gather(*submit(pool, *[picture(56, 56)] * 3))
        assert [feature.layout.num_embeds for feature in made] == [4] * 3
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pool, "_try_again", lambda *_: False)
            await until(lambda: len(pool.pids) == 2, within_s=LOADING_S)
            os.kill(pool.pids[0], signal.SIGSTOP)
            results = await asyncio.gather(*submit(pool, *[picture(56, 56)] * 3), return_exceptions=True)
        assert [type(result) for result in results if not isinstance(result, Feature)] == [NotReady]
    finally:
        await pool.close()


@pytest.mark.slow
async def test_an_item_that_takes_longer_than_the_limit_is_refused_and_its_process_killed_S6(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.processing.pool.pool._STOPPED_S", -1.0)  # as if it had worked all the time
    with stopped(pool) as pids:
        (task,) = submit(pool, picture(56, 56))
        with pytest.raises(MediaTooLarge, match="longer than the limit of 3 s"):
            await task
        assert len(set(pids) - set(pool.pids)) == 1


@pytest.mark.slow
async def test_a_pool_that_is_closed_takes_nothing_and_gives_up_what_waits_and_leaves_no_process(pool: Pool) -> None:
    """The last test on the pool: it closes it while processes work or are about to start."""
    with stopped(pool) as pids:
        tasks = submit(pool, *[picture(56, 56)] * 4)
        await asyncio.sleep(0)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
    await closing
    *_, waiting, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(waiting), str(last)] == ["this frontend is shutting down; send the request again"] * 2
    assert all(map(ended, pids))
    assert not pool.pids
    with pytest.raises(NotReady, match="shutting down"):
        await pool.process(picture(56, 56))


async def test_a_folder_without_a_model_is_the_operator_s_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        await Pool.start(tmp_path, TARGET)


@pytest.mark.slow
async def test_processes_that_end_before_they_are_ready_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    descriptors, tasks = open_descriptors(), asyncio.all_tasks()
    no_limits = DecodeLimits(max_image_pixels="many")  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match="ended before it was ready"):
        await Pool.start(tmp_path, TARGET, processes=2, limits=no_limits)
    assert open_descriptors() == descriptors
    assert asyncio.all_tasks() == tasks


NOTHING = to_runs(Layout(()))


def through_the_pipe(feature: Feature) -> Feature:
    made = to_made(7, feature)
    payload = b"".join(to_payload(made, feature))
    frame = encode(made, len(payload))
    message_bytes, payload_bytes = read_header(frame[:12], max_payload_bytes=1_000)
    answer = decode_answer(frame[12:], payload_bytes=payload_bytes)
    assert message_bytes == len(frame) - 12
    assert isinstance(answer, Made)
    return to_feature(answer, memoryview(payload))


def test_tensors_of_any_size_and_masks_survive_the_pipe() -> None:
    feature = Feature(
        "audio",
        {
            "empty": Tensor("float32", (0, 3), memoryview(b"")),
            "odd": Tensor("uint8", (5,), memoryview(b"12345")),
            "grid": Tensor("int64", (1, 3), memoryview(bytes(range(24)))),
        },
        Layout((1, 2, 2, 3), Mask((0, 1, 1, 0))),
    )
    assert content(through_the_pipe(feature)) == content(feature)


def test_lengths_are_checked_before_anything_is_allocated_S10() -> None:
    with pytest.raises(ProtocolError, match="the limits are"):
        read_header(b"\xff" * 12, max_payload_bytes=1 << 30)
    with pytest.raises(ProtocolError, match="the limits are"):
        read_header(encode(Failed("ServiceError", "no"), 1_001)[:12], max_payload_bytes=1_000)
    too_little = Made(0, "image", (TensorHead("pixels", "uint8", (10, 10)),), NOTHING)
    with pytest.raises(ProtocolError, match="100 bytes of payload came with 99"):
        decode_answer(encode(too_little)[12:], payload_bytes=99)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "load"}), encode(Failed("a", "b"))[:-1]]
)
def test_what_is_not_an_answer_is_a_breach_of_the_protocol_S10(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_answer(body, payload_bytes=0)


@pytest.mark.parametrize(
    "head", [TensorHead("x", "object", (1,)), TensorHead("x", "uint8", (-1,)), TensorHead("x", "int64", (0, -1))]
)
def test_a_tensor_that_cannot_be_is_a_breach_of_the_protocol_S10(head: TensorHead) -> None:
    with pytest.raises(ProtocolError, match="described no feature"):
        to_feature(Made(0, "image", (head,), NOTHING), memoryview(b""))


@pytest.mark.parametrize("name", ["SystemExit", "error_for", "ClassVar", ""])
def test_an_error_that_is_none_of_ours_is_a_service_error(name: str) -> None:
    assert type(to_error(Failed(name, "no"))) is ServiceError
