"""Media: how bytes become pixels and samples."""

from semel.media.decode import CANON, DecodeLimits, decode_audio, decode_image
from semel.media.video import Video, VideoHeader, decode_video

__all__ = ["CANON", "DecodeLimits", "Video", "VideoHeader", "decode_audio", "decode_image", "decode_video"]
