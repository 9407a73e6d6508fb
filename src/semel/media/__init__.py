"""Media: fetching bytes and decoding them to pixels and samples."""

from semel.media.decode.audio import decode_audio
from semel.media.decode.clip_cuts import Pieces, cut_audio
from semel.media.decode.frame_list import FRAME_LIST, MAX_FRAMES, FrameReader, count_frames, decode_frames
from semel.media.decode.image import decode_image, size_from_header
from semel.media.decode.limits import CANON, DecodeLimits, DocumentLimits
from semel.media.decode.pages import count_pages, image_of, image_size, pdfium_version
from semel.media.decode.video import Video, VideoHeader, decode_video

__all__ = [
    "CANON",
    "FRAME_LIST",
    "MAX_FRAMES",
    "DecodeLimits",
    "DocumentLimits",
    "FrameReader",
    "Pieces",
    "Video",
    "VideoHeader",
    "count_frames",
    "count_pages",
    "cut_audio",
    "decode_audio",
    "decode_frames",
    "decode_image",
    "decode_video",
    "image_of",
    "image_size",
    "pdfium_version",
    "size_from_header",
]
