"""Media that differ as much as clients' do: from them a model's contract and its self-test are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from semel.core import Modality

__all__ = ["probes"]

_SIDES: Final = (
    *((112, 112), (56, 56), (168, 224), (640, 480), (1024, 1024)),
    *((1920, 1080), (300, 900), (2000, 300), (4096, 64)),
)
"""Widths and heights."""

_SECONDS: Final = (1.0, 0.4, 2.5, 5.0, 15.0, 31.0)
_VIDEOS: Final = ((4, 112, 112), (8, 112, 112), (8, 168, 224), (16, 224, 112))
"""Frames, heights and widths."""


def probes(processor: Any, modality: Modality) -> Iterator[Any]:
    """Media of a modality as vLLM's processor takes them. They are not black: a processor may look for content."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    if modality == "image":
        for width, height in (*_SIDES, *_largest(processor)):
            yield Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
    elif modality == "audio":
        rate = processor.info.get_feature_extractor().sampling_rate
        for seconds in _SECONDS:
            yield random.standard_normal(int(seconds * rate), np.float32) * np.float32(0.1)
    else:
        for shape in _VIDEOS:
            pixels = random.integers(0, 256, (*shape, 3), np.uint8)
            yield (pixels, _times(shape[0])) if processor.data_parser.video_needs_metadata else pixels


def _times(frames: int) -> dict[str, Any]:
    """Return the timing for a model that wants it: two frames take a second."""
    described = {"total_num_frames": frames, "fps": 2.0, "duration": frames / 2, "video_backend": "opencv"}
    return {**described, "frames_indices": list(range(frames)), "do_sample_frames": False}


def _largest(processor: Any) -> Iterator[tuple[int, int]]:
    """Yield the size of the image with the most tokens, where the model tells and it is no larger than a photograph."""
    tell = getattr(processor.info, "get_image_size_with_most_features", None)
    if tell is None:
        return
    try:
        width, height = tell()
    except Exception:  # noqa: BLE001 - foreign code; there are other probes
        return
    if width * height <= 4096 * 4096:
        yield width, height
