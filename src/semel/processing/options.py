"""The `mm_processor_kwargs` that a request may set, and the origin of an item, which records them.

They are keyword arguments of foreign code, some of which fetch URLs, open files, choose devices or pad to any length.
So names are taken from a list, and values are numbers and switches within a bound (threats S1, S5, S15).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from semel.core import Modality, Origin
from semel.errors import InvalidRequest
from semel.media import MAX_FRAMES

__all__ = ["check_options", "to_origin"]

_MOST: Final[Mapping[str, int]] = {"fps": 1_000, "max_frames": MAX_FRAMES, "num_frames": MAX_FRAMES}
"""A video's options. Each is above 0: some processors take a list of so many frames before they look at the video."""


def check_options(options: Mapping[str, object], allowed: Collection[str], *, max_value: int) -> None:
    """Refuse an option that is not listed, or whose value is not a bounded number, a switch, or a mapping to these."""
    for name, value in options.items():
        if name not in allowed:
            raise InvalidRequest(
                f"mm_processor_kwargs.{name[:64]}: not available; choose of {', '.join(sorted(allowed))}"
            )
        if (most := _MOST.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
                raise InvalidRequest(f"mm_processor_kwargs.{name}: must be a number above 0 and up to {most:,}")
            continue
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if not isinstance(part, int | float) or not abs(part) <= max_value:
                raise InvalidRequest(
                    f"mm_processor_kwargs.{name}: must be a number up to {max_value:,}, or true or false"
                )


def to_origin(
    modality: Modality, decoded: Any, options: Mapping[str, object], metadata: Mapping[str, Any] | None = None
) -> Origin:
    """Return the origin of an image of Pillow's, of samples, or of the frames of a video with their metadata."""
    if modality == "image":
        width, height = decoded.size
        shape: tuple[int, ...] = (height, width)
    else:
        shape = tuple(decoded.shape[:3])
    return Origin(shape, None if metadata is None else dict(metadata), dict(options) or None)
