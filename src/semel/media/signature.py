"""The kind of a file, by its first bytes. Pure.

It decides only how a file that was uploaded is used in a chat. Decoding looks for itself, and trusts nothing of it.
"""

from __future__ import annotations

from typing import Final, Literal

from semel.core import Modality

__all__ = ["SIGNATURE_BYTES", "FileKind", "kind_of"]

SIGNATURE_BYTES: Final = 12

FileKind = Modality | Literal["document"]
"""The modality of a file, or a document, whose pages are images."""

_PREFIXES: Final[tuple[tuple[bytes, FileKind], ...]] = (
    (b"%PDF-", "document"),
    (b"\x89PNG\r\n\x1a\n", "image"),
    (b"\xff\xd8\xff", "image"),
    (b"GIF8", "image"),
    (b"BM", "image"),
    (b"II*\0", "image"),
    (b"MM\0*", "image"),
    (b"fLaC", "audio"),
    (b"OggS", "audio"),
    (b"ID3", "audio"),
    (b"caff", "audio"),
    (b"\x1aE\xdf\xa3", "video"),  # Matroska, WebM
    (b"\0\0\x01\xba", "video"),
    (b"\0\0\x01\xb3", "video"),
)
_CONTAINERS: Final[dict[bytes, dict[bytes, Modality]]] = {
    b"RIFF": {b"WEBP": "image", b"WAVE": "audio", b"AVI ": "video"},
    b"FORM": {b"AIFF": "audio", b"AIFC": "audio"},
}
_AUDIO_BRANDS: Final = (b"M4A ", b"M4B ", b"F4A ")


def kind_of(head: bytes) -> FileKind | None:
    """Return the kind of a file that begins so; None if it is none that can be decoded."""
    for prefix, kind in _PREFIXES:
        if head.startswith(prefix):
            return kind
    if (kinds := _CONTAINERS.get(head[:4])) is not None:
        return kinds.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "audio" if head[8:12] in _AUDIO_BRANDS else "video"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # a frame of MPEG audio, or of AAC
        return "audio"
    return None
