"""Media: how bytes become pixels and samples."""

from semel.media.decode import CANON, DecodeLimits, decode_audio, decode_image

__all__ = ["CANON", "DecodeLimits", "decode_audio", "decode_image"]
