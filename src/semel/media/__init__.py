"""Media: fetching bytes and decoding them to pixels and samples."""

from semel.media.decode.audio import decode_audio
from semel.media.decode.clip_cuts import Pieces, cut_audio
from semel.media.decode.frame_list import FRAME_LIST, MAX_FRAMES, FrameReader, count_frames, decode_frames
from semel.media.decode.image import decode_image, size_from_header
from semel.media.decode.limits import CANON, DecodeLimits
from semel.media.decode.video import Video, VideoHeader, decode_video

__all__ = [
    "CANON",
    "FRAME_LIST",
    "MAX_FRAMES",
    "DecodeLimits",
    "FrameReader",
    "Pieces",
    "Video",
    "VideoHeader",
    "count_frames",
    "cut_audio",
    "decode_audio",
    "decode_frames",
    "decode_image",
    "decode_video",
    "size_from_header",
]
