"""Media: fetching bytes and decoding them to pixels and samples."""

from semel.media.decode.audio import decode_audio
from semel.media.decode.clip_cuts import Pieces, cut_audio
from semel.media.decode.image import decode_image, size_from_header
from semel.media.decode.limits import CANON, DecodeLimits
from semel.media.decode.video import Video, VideoHeader, decode_video

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
    "size_from_header",
]
