"""Media: how bytes become pixels and samples."""

from semel.media.audio import decode_audio
from semel.media.image import decode_image
from semel.media.limits import CANON, DecodeLimits
from semel.media.pieces import Pieces, cut_audio
from semel.media.video import Video, VideoHeader, decode_video

__all__ = [
    "CANON",
    "DecodeLimits",
    "Pieces",
    "Video",
    "VideoHeader",
    "cut_audio",
    "decode_audio",
    "decode_image",
    "decode_video",
]
