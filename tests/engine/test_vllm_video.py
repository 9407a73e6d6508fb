"""The frames of videos: those that vLLM's own loader gives the same model, for every loader and option."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from semel.core import Media, Rendering, Target
from semel.engine.vllm.model.processor import VllmProcessor
from semel.engine.vllm.model.video import VideoLoader
from semel.errors import ConfigError, MediaDegenerate, MediaTooLarge
from semel.media import DecodeLimits, VideoHeader
from semel.processing.families import FAMILIES
from semel.processing.hf import choose_frames
from tests.engine.parity import video

Folder = Callable[[str], Path]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GPU_LOADERS = {"pynvvideocodec"}


def loaders() -> list[str]:
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

    return sorted(VIDEO_LOADER_REGISTRY.name2class.keys() - GPU_LOADERS)


def loader_of(name: str, **options: object) -> VideoLoader:
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

    return VideoLoader(VideoMediaIO(ImageMediaIO(), video_backend=name, **options))


def film(frames: int, fps: int, side: int = 56) -> bytes:
    """A video whose frames have a grey of their own each."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for number in range(frames):
            pixels = np.full((side, side, 3), number % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def by_vllm(loader: VideoLoader, data: bytes) -> tuple[Any, dict[str, Any]]:
    """What vLLM's server makes of the same file, with its own decoder."""
    return loader.media_io.load_bytes(data).media  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", loaders())
@pytest.mark.parametrize(("frames", "fps"), [(5, 5), (31, 10), (100, 25), (451, 30)])
def test_frames_and_their_description_are_those_of_vllm_s_loader(name: str, frames: int, fps: int) -> None:
    data, loader = film(frames, fps), loader_of(name)
    pixels, described = loader.load(data, DecodeLimits())
    expected_pixels, expected = by_vllm(loader, data)
    assert described == expected
    assert pixels.shape == expected_pixels.shape
    assert np.abs(pixels.astype(int) - expected_pixels.astype(int)).max() <= 4  # another decoder's rounding


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("opencv", {"num_frames": 8}),
        ("opencv", {"num_frames": -1}),
        ("opencv", {"fps": 2}),
        ("qwen2_vl", {"fps": 4}),
        ("qwen3_vl", {"fps": 1, "max_frames": 6}),
        ("opencv_dynamic", {"fps": 1, "max_duration": 2}),
    ],
)
def test_media_io_kwargs_choose_the_frames_as_in_vllm(name: str, options: Mapping[str, object]) -> None:
    data, loader = film(100, 10), loader_of(name, **options)
    _, described = loader.load(data, DecodeLimits())
    assert described == by_vllm(loader, data)[1]
    _, without = loader_of(name).load(data, DecodeLimits())  # the option that is lost
    assert described["frames_indices"] != without["frames_indices"]


def test_another_model_s_loader_would_choose_other_frames() -> None:
    data = film(100, 10)
    chosen = {name: tuple(loader_of(name).load(data, DecodeLimits())[1]["frames_indices"]) for name in loaders()}
    assert len(set(chosen.values())) >= 6


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Qwen2VLVideoProcessor", "qwen2_vl"),
        ("Qwen3VLVideoProcessor", "qwen3_vl"),
        ("Glm4vVideoProcessor", "opencv_dynamic"),
        ("LlavaOnevisionVideoProcessor", "opencv"),
    ],
)
def test_the_loader_is_that_of_the_model_s_video_processor(tmp_path: Path, kind: str, name: str) -> None:
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

    (tmp_path / "video_preprocessor_config.json").write_text(f'{{"video_processor_type": "{kind}"}}')

    def loader(**video: object) -> VideoLoader:
        own = SimpleNamespace(media_io_kwargs={"video": video})
        return VideoLoader.from_config(
            SimpleNamespace(model=str(tmp_path), revision=None, get_multimodal_config=lambda: own)
        )

    assert type(loader().media_io.video_loader) is VIDEO_LOADER_REGISTRY.name2class[name]
    chosen = loader(video_backend="glm46v", num_frames=7)
    assert type(chosen.media_io.video_loader) is VIDEO_LOADER_REGISTRY.name2class["glm46v"]
    assert chosen.media_io.num_frames == 7


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_the_fast_path_chooses_the_frames_that_vllm_chooses(tiny: Folder, family: str) -> None:
    from transformers import AutoProcessor
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
    from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata

    fps = FAMILIES[family].video_fps
    assert fps is not None
    processor = AutoProcessor.from_pretrained(tiny("qwen2-vl")).video_processor
    loader = VIDEO_LOADER_REGISTRY.name2class["qwen2_vl"]

    def differences(rate: float) -> int:
        different = 0
        for frames in (4, 5, 31, 100, 451, 2_000):
            for source_fps in (5.0, 23.976, 30.0, 60.0):
                header = VideoHeader(frames, source_fps, 56, 56)
                source = VideoSourceMetadata(frames, source_fps, header.duration_s)
                target = VideoTargetMetadata(num_frames=32, fps=2, max_duration=300)
                theirs = loader.compute_frames_index_to_sample(source=source, target=target)
                different += choose_frames(processor, header, fps=rate) != theirs
        return different

    assert differences(fps) == 0
    assert differences(fps + 1) > 0


def test_options_that_no_loader_takes_are_refused_at_start(tiny: Folder) -> None:
    for options in ({"fps": "two"}, {"video_backend": "none"}, {"seek_mode": "exact"}):
        rendering = Rendering(media_io_kwargs={"video": options})
        with pytest.raises(ConfigError):
            VllmProcessor.load(tiny("qwen2-vl"), Target("float32", rendering=rendering))


def test_media_io_kwargs_reach_the_features(tiny: Folder) -> None:
    media = Media("video", film(60, 10))

    def embeds(options: Mapping[str, object]) -> int:
        rendering = Rendering(media_io_kwargs={"video": options} if options else None)
        processor = VllmProcessor.load(tiny("qwen2-vl"), Target("float32", "engine", rendering=rendering))
        return processor.process(media).layout.num_embeds

    assert embeds({"fps": 4}) == 2 * embeds({})  # 24 frames instead of 12


def test_the_limits_of_decoding_hold_for_every_loader_S5() -> None:
    data = film(100, 10)
    for name in loaders():
        with pytest.raises(MediaTooLarge):
            loader_of(name).load(data, DecodeLimits(max_video_pixels=56 * 56))


def test_a_video_with_too_few_frames_is_the_client_s_fault_S8() -> None:
    with pytest.raises(MediaDegenerate, match="too few"):
        loader_of("qwen2_vl").load(film(1, 10), DecodeLimits())


def test_videos_of_random_shape_decode_as_in_vllm() -> None:
    rng = np.random.default_rng(11)
    for codec, container in [("libx264", "mp4"), ("mpeg4", "mp4"), ("libvpx", "webm")]:
        data, loader = video(rng, codec, container), loader_of("opencv", num_frames=6)
        described, expected = loader.load(data, DecodeLimits())[1], by_vllm(loader, data)[1]
        assert described["frames_indices"] == expected["frames_indices"]
