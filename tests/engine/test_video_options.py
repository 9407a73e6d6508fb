"""The options of a request for its videos, and lists of frames: the prompt and tensors that vLLM makes, bit by bit."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from semel.core import Media, Target, with_media_io
from semel.engine.vllm.model.processor import VllmProcessor
from semel.errors import InvalidRequest, MediaDegenerate, MediaError, MediaTooLarge, MediaUndecodable, SemelError
from semel.media import FRAME_LIST, MAX_FRAMES, DecodeLimits, decode_image
from semel.processing import HfProcessor
from tests.engine.engineless import Engineless
from tests.engine.parity import Chat, video, video_part
from tests.engine.rendering import same_embeddings, same_items
from tests.engine.test_rendering_flags import content
from tests.engine.test_vllm_video import film

Folder = Callable[[str], Path]
Options = Mapping[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAMILIES: Final = ("qwen2.5-vl", "qwen3-vl", "glm-4.1v", "llava-onevision")
"""A fast path, and three loaders of vLLM's."""

READ: Final[tuple[Options, ...]] = (
    {"fps": 1},
    {"fps": 5.5},
    {"num_frames": 6},
    {"num_frames": -1},
    {"fps": 3, "num_frames": 8},
    {"fps": 4, "max_frames": 6},
)
PROCESSED: Final[Options] = {"fps": 1, "num_frames": 4, "max_frames": 8}


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, tiny: Folder) -> Iterator[Engineless]:
    made = Engineless.of(request.param, tiny(request.param))
    yield made
    made.renderer.shutdown()


def chat_of(part: dict[str, Any]) -> Chat:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]


def jpeg(seed: int, side: int = 56) -> bytes:
    blocks = np.random.default_rng(seed).integers(0, 256, (side // 14, side // 14, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(blocks).resize((side, side), Image.Resampling.NEAREST).save(buffer, "JPEG")
    return buffer.getvalue()


def frame_list(count: int, side: int = 56) -> str:
    return ",".join(base64.b64encode(jpeg(seed, side)).decode() for seed in range(count))


async def compared(both: Engineless, chat: Chat, **options: Any) -> int:
    """Assert that both sides make the same of a chat; the number of its tokens."""
    bare, (_, ours) = both.bare(chat, **options), await both.ours(chat, **options)
    assert ours.token_ids == bare.token_ids
    same_embeddings(ours, bare)
    assert same_items(ours, bare) == 1
    return len(ours.token_ids)


async def test_a_video_is_read_with_the_options_of_its_request_as_by_vllm(both: Engineless) -> None:
    chat = chat_of(video_part(video(np.random.default_rng(3), seconds=4.0)))
    sizes = [await compared(both, chat)]
    sizes += [await compared(both, chat, media_io_kwargs={"video": options}) for options in READ]
    assert len(set(sizes)) >= 3  # the options that are lost
    assert await compared(both, chat, mm_processor_kwargs=PROCESSED)


async def test_a_list_of_frames_is_read_as_by_vllm(both: Engineless) -> None:
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frame_list(40)}"}}
    chosen = {"fps": 2, "frames_indices": list(range(0, 80, 10)), "total_num_frames": 90, "num_frames": 8}
    sizes = [await compared(both, chat_of(part), media_io_kwargs={"video": one}) for one in ({}, {"num_frames": 6})]
    assert sizes[0] > sizes[1]
    await compared(both, chat_of(part), media_io_kwargs={"video": {"num_frames": -1, "fps": 4}})
    await compared(both, chat_of(part), media_io_kwargs={"video": chosen})


def options_of(**video: Any) -> Options:
    return with_media_io({}, {"video": video})


@pytest.fixture(scope="module", params=[HfProcessor, VllmProcessor])
def processor(request: pytest.FixtureRequest, tiny: Folder) -> Any:
    return request.param.load(tiny("qwen2-vl"), Target("float32", "engine"))


@pytest.mark.parametrize("options", [*READ, {"min_frames": 12}, {"max_frames": 100_000, "fps": 900}])
def test_the_fast_path_reads_as_the_generic_path_does(tiny: Folder, options: Options) -> None:
    ours, hf = (kind.load(tiny("qwen2-vl"), Target("float32", "engine")) for kind in (VllmProcessor, HfProcessor))
    for media in (Media("video", film(60, 10)), Media("video", FRAME_LIST + frame_list(40).encode())):
        own = options_of(**options)
        assert content(ours.process(media, own)) == content(hf.process(media, own))


HOSTILE: Final[Mapping[str, tuple[bytes, Options, type[SemelError], str]]] = {
    "frames a second beyond all frames": (film(60, 10), {"fps": 40_000}, MediaTooLarge, "frames a second"),
    "fewer frames than the model takes": (film(60, 10), {"max_frames": 1}, MediaDegenerate, "too few"),
    "no base64": (FRAME_LIST + b"====", {}, MediaError, "frame 0 of the list"),
    "not ASCII": (FRAME_LIST + b"\xff\xfe", {}, MediaError, "frame 0 of the list"),
    "an empty frame": (FRAME_LIST + frame_list(1).encode() + b",", {}, MediaUndecodable, "frame 1 of the list"),
    "not an image": (FRAME_LIST + base64.b64encode(b"GIF8"), {}, MediaUndecodable, "frame 0 of the list"),
    "two sizes": (
        FRAME_LIST + f"{frame_list(1)},{frame_list(1, 84)}".encode(),
        {},
        MediaUndecodable,
        "84×84, the first one 56×56",
    ),
    "too few indices": (FRAME_LIST + frame_list(4).encode(), {"frames_indices": [1]}, InvalidRequest, "frames_indices"),
    "fewer frames in all": (FRAME_LIST + frame_list(4).encode(), {"total_num_frames": 2}, InvalidRequest, "total_num"),
    "frames beyond those that are counted": (
        FRAME_LIST + b"QUJ," * (1 << 18),
        {"num_frames": -1},
        MediaTooLarge,
        "the limit is 65,536",
    ),
    "hours": (FRAME_LIST + frame_list(4).encode(), {"fps": 1e-6}, MediaTooLarge, "--max-video-s"),
    "more frames than any video": (
        FRAME_LIST + frame_list(4).encode(),
        {"total_num_frames": 10**8, "fps": 1_000},
        MediaTooLarge,
        "--max-video",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_request_says_of_a_video_is_bounded_S5_S15(processor: Any, case: str) -> None:
    data, options, error, message = HOSTILE[case]
    if isinstance(processor, HfProcessor) and case == "frames a second beyond all frames":
        pytest.skip("this path takes 30 a second at most, and names no others")
    with pytest.raises(error, match=message):
        processor.process(Media("video", data), options_of(**options))


def test_the_frames_of_a_list_are_counted_and_their_pixels_checked_before_they_are_decoded_S5(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel.media.decode import frame_list as module

    decoded: list[bytes] = []

    def counted(data: bytes, limits: DecodeLimits) -> Image.Image:
        decoded.append(data)
        return decode_image(data, limits)

    monkeypatch.setattr(module, "decode_image", counted)
    many = FRAME_LIST + b",".join([base64.b64encode(jpeg(0))] * 100)
    for kind in (HfProcessor, VllmProcessor):
        for limits, used in ((DecodeLimits(max_video_frames=99), 0), (DecodeLimits(max_video_pixels=56 * 56 * 10), 10)):
            loaded: Any = kind.load(tiny("qwen2-vl"), Target("float32", "engine"), limits)
            decoded.clear()
            with pytest.raises(MediaTooLarge):
                loaded.process(Media("video", many), options_of(num_frames=-1))
            assert len(decoded) == used
            loaded.process(Media("video", many), options_of(num_frames=4))  # the limits are of what is used
            assert len(decoded) == used + 4


@pytest.mark.parametrize("name", ["fps", "num_frames", "max_frames"])
@pytest.mark.parametrize("value", [0, -1, True, "2", MAX_FRAMES + 1, float("inf"), float("nan"), [1], {"a": 1}])
def test_a_hostile_option_of_the_processor_is_refused_S15(processor: Any, name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"mm_processor_kwargs.{name}"):
        processor.process(Media("video", film(8, 4)), {name: value})
