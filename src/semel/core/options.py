"""The options of an item, under vLLM's names: `mm_processor_kwargs`, and for a video how its file is read. Pure.

They travel, and are hashed, as one mapping: the processor's options, and with them "media_io_kwargs" if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from semel.core.prompt import Modality

__all__ = ["MEDIA_IO", "VIDEO_OPTIONS", "item_options", "split_options", "with_media_io"]

MEDIA_IO: Final = "media_io_kwargs"
VIDEO_OPTIONS: Final = frozenset({"fps", "max_frames", "num_frames"})
"""Those of `mm_processor_kwargs` that only a video's processor has."""


def with_media_io(
    options: Mapping[str, object], media_io: Mapping[str, Mapping[str, object]] | None
) -> Mapping[str, object]:
    """Return a request's `mm_processor_kwargs` with its `media_io_kwargs`."""
    return {**options, MEDIA_IO: media_io} if media_io else options


def item_options(modality: Modality, options: Mapping[str, object]) -> Mapping[str, object]:
    """Return those of a request's options that can change an item of this modality."""
    if modality == "video" or not options:
        return options
    return {name: value for name, value in options.items() if name != MEDIA_IO and name not in VIDEO_OPTIONS}


def split_options(options: Mapping[str, object] | None) -> tuple[Mapping[str, object], Mapping[str, Any]]:
    """Return an item's options for the processor, and those with which a video is read."""
    if not options or MEDIA_IO not in options:
        return options or {}, {}
    media_io: Any = options[MEDIA_IO]
    return {name: value for name, value in options.items() if name != MEDIA_IO}, media_io.get("video", {})
