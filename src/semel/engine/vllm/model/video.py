"""The frames of a video that a model looks at: chosen by vLLM's own loader for its video processor, decoded by semel.

vLLM's loaders decide which frames, from a file's header, and what a processor learns about them. They hand decoding to
a function of theirs; here that function is semel's decoder, with its limits (threats S5, S6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from semel.errors import ConfigError, InvalidRequest, MediaDegenerate, SemelError
from semel.media import FRAME_LIST, DecodeLimits, FrameReader, VideoHeader, decode_video
from semel.media.decode.frame_list import MISFIT

__all__ = ["VideoLoader"]

_PROBE: Final = VideoHeader(num_frames=240, fps=24.0, width=56, height=56)
"""A video whose frames any sensible option can choose."""

logger = logging.getLogger(__name__)

_Choose = Callable[[VideoHeader], Sequence[int]]
_Decode = Callable[[bytes, _Choose], tuple[VideoHeader, Sequence[int], Any]]


@dataclass(frozen=True, slots=True)
class VideoLoader:
    """vLLM's loader of videos for one model, with the options of `--media-io-kwargs` and those of a request."""

    media_io: Any

    @classmethod
    def from_config(cls, model_config: Any, own: Mapping[str, Any] | None = None) -> Self:
        """Return the loader that vLLM takes for this model; `own` are the `media_io_kwargs` of a request's videos."""
        from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
        from vllm.multimodal.video import get_video_loader_backend_for_processor
        from vllm.transformers_utils.processor import get_video_processor_cls_name

        configured = model_config.get_multimodal_config().media_io_kwargs.get("video", {})
        options = VideoMediaIO.merge_kwargs(configured, dict(own or {}))
        if named := get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config)):
            options.setdefault("video_backend", named)
        try:
            return cls(VideoMediaIO(ImageMediaIO(), **options))
        except (AssertionError, TypeError, ValueError) as error:  # vLLM asserts that there is a loader of that name
            raise ConfigError(f"--media-io-kwargs: vLLM has no such loader of videos: {error}") from error

    def check(self) -> None:
        """Refuse options that the loader does not take, before a client's video meets them."""
        import numpy as np

        def decode(_: bytes, choose: _Choose) -> tuple[VideoHeader, Sequence[int], Any]:
            indices = choose(_PROBE)
            return _PROBE, indices, np.zeros((len(indices), _PROBE.height, _PROBE.width, 3), np.uint8)

        try:
            self._load(b"", decode, DecodeLimits())
        except (SemelError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ConfigError(f"--media-io-kwargs: vLLM's loader of videos refuses its options: {error}") from error

    def load(self, data: bytes, limits: DecodeLimits) -> tuple[Any, dict[str, Any]]:
        """Return the frames that the model looks at, and what its processor learns about them."""
        if data.startswith(FRAME_LIST):
            return self._load_list(data, limits)

        def decode(encoded: bytes, choose: _Choose) -> tuple[VideoHeader, Sequence[int], Any]:
            video = decode_video(encoded, limits, choose=choose)
            return video.header, video.indices, video.frames

        return self._load(data, decode, limits)

    def _load_list(self, data: bytes, limits: DecodeLimits) -> tuple[Any, dict[str, Any]]:
        """Return the frames of a list, as vLLM takes it: the first `num_frames`."""
        from vllm.multimodal.media import VideoMediaIO

        reader = FrameReader.of(data, self.media_io.num_frames, limits)
        options = {"num_frames": self.media_io.num_frames, **self.media_io.kwargs}
        text = data[len(FRAME_LIST) :].decode("ascii", "replace")
        try:
            frames, metadata = VideoMediaIO(reader, **options).load_base64("video/jpeg", text).media
        except ValueError as error:
            logger.info("vLLM refuses a list of frames: %r", error)
            raise InvalidRequest(MISFIT) from None
        limits.check_length(metadata["total_num_frames"], metadata["duration"])
        return frames, metadata

    def _load(self, data: bytes, decode: _Decode, limits: DecodeLimits) -> tuple[Any, dict[str, Any]]:
        loader, calls = self.media_io.video_loader, 0

        def decoding(
            backend: str, kind: Any, encoded: bytes, target: Any, sampling: Any, _: Any, *, frame_recovery: bool
        ) -> tuple[Any, Any, list[int], list[int]]:
            nonlocal calls
            calls += 1
            wanted: list[int] = []

            def choose(header: VideoHeader) -> list[int]:
                limits.check_rate(header.duration_s, target.fps)
                wanted[:] = _chosen(kind, _source(kind, header), target, sampling)
                reads_each_once = backend == "opencv" and not frame_recovery and _reads_as_opencv(kind)
                return sorted(set(wanted)) if reads_each_once else wanted

            header, indices, frames = decode(encoded, choose)
            return frames, _source(kind, header), wanted, list(indices)

        with _decoder(decoding):
            frames, metadata = loader.load_bytes(data, num_frames=self.media_io.num_frames, **self.media_io.kwargs)
        if not calls:
            raise InvalidRequest(f"this model's videos are not supported: {type(loader).__name__} decodes them itself")
        return frames, metadata


def _source(kind: Any, header: VideoHeader) -> Any:
    from vllm.multimodal.video_decoders import VideoSourceMetadata

    return kind._prepare_source(VideoSourceMetadata(header.num_frames, header.fps, header.duration_s))


def _chosen(kind: Any, source: Any, target: Any, sampling: Any) -> list[int]:
    try:
        return [int(index) for index in kind.compute_frames_index_to_sample(source=source, target=target, **sampling)]
    except (ValueError, ArithmeticError, IndexError) as error:
        logger.info("%s chooses no frames: %r", kind.__name__, error)
        raise MediaDegenerate(f"the video has {source.total_frames_num} frames, too few for this model") from None


def _reads_as_opencv(kind: Any) -> bool:
    """Check that frames are read as vLLM's decoder does by default: a frame once, however often it is named."""
    from vllm.multimodal.video import VideoLoader as Base

    return bool(kind.read_frames.__func__ is Base.read_frames.__func__)


@contextmanager
def _decoder(decode: Callable[..., Any]) -> Iterator[None]:
    """Let vLLM's loaders decode with this. Used by one thread at a time, as a processor is."""
    from vllm.multimodal import video

    before = video.decode_video
    video.decode_video = decode
    try:
        yield
    finally:
        video.decode_video = before
