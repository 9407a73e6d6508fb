"""Sources: the media that a request names. A data URL is decoded here; any other URL is parsed here and fetched later.

Base64 is checked strictly: an invalid character is an error, not skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import ClassVar, Final

import pybase64

from semel.core import Digest, Media, Modality, Page
from semel.errors import InvalidRequest, MediaError
from semel.media import FRAME_LIST, MAX_FRAMES, count_frames
from semel.media.fetch.url import Url, parse_url

__all__ = [
    "PDF",
    "Document",
    "DocumentPage",
    "LongString",
    "MediaFile",
    "MediaName",
    "MediaUrl",
    "Source",
    "media_from_base64",
    "source_from",
]


_PIECE: Final = 1 << 18


@dataclass(frozen=True, slots=True, repr=False)
class LongString:
    """A string of ASCII characters that have no escapes."""

    data: memoryview

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> str:
        return str(self.data[part], "ascii")

    def __repr__(self) -> str:
        return f"LongString({self[:32]!r}…, {len(self):,} characters)"

    def pieces(self) -> Iterator[bytes]:
        """Yield copies of all of it, each of 256 KiB at most."""
        return (bytes(self.data[start : start + _PIECE]) for start in range(0, len(self), _PIECE))

    def from_(self, start: int) -> LongString:
        """Return the rest of the string, without a copy."""
        return LongString(self.data[start:])


PDF: Final = "application/pdf"
"""The type of documents."""

_EXCERPT_CHARS: Final = 32
_MAX_HEAD_CHARS: Final = 512
_FRAMES: Final = "video/jpeg"


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """Media that has to be fetched."""

    modality: Modality
    url: Url
    where: str
    """The part of the request that names it, for errors."""


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file of the media store, whose bytes are read only if nobody has its feature."""

    modality: Modality
    id: Digest
    where: str
    digest: Digest | None = None
    """The digest of the item, if it is known already."""

    nbytes: ClassVar[int] = 0
    """None of its bytes is in memory."""


@dataclass(frozen=True, slots=True)
class MediaName:
    """Media that a client has sent before under a name of its own (`uuid`), and does not send again."""

    modality: Modality
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class Document:
    """A PDF, which becomes images: one per page, once their number is known."""

    document: Media | MediaUrl | MediaFile
    where: str
    first_page: int = 1
    last_page: int | None = None
    """None for the document's last."""

    dpi: int | None = None
    """The resolution of its images; None for the default."""

    modality: ClassVar[Modality] = "image"


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """A page of a document whose pages have been counted."""

    document: Media | MediaFile
    content: Digest
    """The id that the document has as a file."""

    page: Page
    digest: Digest
    where: str
    nbytes: int = 0
    """The bytes of the document that are in memory, with the first of its pages."""

    modality: ClassVar[Modality] = "image"


Source = Media | MediaUrl | MediaFile | MediaName | Document | DocumentPage


def source_from(text: str | LongString, modality: Modality, *, where: str, mime: str | None = None) -> Media | MediaUrl:
    """Return the source that a URL names; `where` is the part of the request for errors.

    `mime` is the type that a data URL has to have, if it is not one of the modality's.
    """
    if text[:5].lower() == "data:":
        return _from_data_url(text, modality, where, mime)
    try:
        return MediaUrl(modality, parse_url(text[:]), where)
    except InvalidRequest as error:
        raise InvalidRequest.of(where, str(error)) from None


def media_from_base64(text: str | LongString, modality: Modality, *, mime: str | None, where: str) -> Media:
    """Return the media that `text` encodes."""
    name = "document" if mime == PDF else modality
    try:
        data = pybase64.b64decode(text if isinstance(text, str) else text.data, validate=True)
    except ValueError:
        raise MediaError.of(where, f"the {name} is not valid base64: encode it without line breaks") from None
    if not data:
        raise MediaError.of(where, f"the {name} is empty: send its bytes in base64")
    return Media(modality, data, mime)


def _from_data_url(text: str | LongString, modality: Modality, where: str, wanted: str | None) -> Media:
    # The head is bounded before it is split: a URL of semicolons alone would become as many strings.
    head, comma, _ = text[5 : 5 + _MAX_HEAD_CHARS].partition(",")
    mime, *parameters = (field.strip() for field in head.split(";"))
    if not comma or not parameters or parameters[-1] != "base64":
        raise InvalidRequest.of(
            where, f"{_excerpt('data:' + text[5 : 6 + _EXCERPT_CHARS])} is not of the form data:{modality}/…;base64,…"
        )
    if mime and (mime.partition("/")[0].lower() != modality if wanted is None else mime.lower() != wanted):
        raise InvalidRequest.of(where, f"a data URL of type {_excerpt(mime)} cannot be used as {wanted or modality}")
    start = 6 + len(head)
    data = text[start:] if isinstance(text, str) else text.from_(start)
    if mime.lower() == _FRAMES:
        return _frame_list(data, where)
    return media_from_base64(data, modality, mime=wanted or mime or None, where=where)


def _frame_list(text: str | LongString, where: str) -> Media:
    """Return a video whose frames are images in base64, between commas. They are counted, and decoded later."""
    made = BytesIO()  # `bytes.join` would hold all pieces at a time, which nobody has paid for
    try:
        made.writelines(chain((FRAME_LIST,), [text.encode("ascii")] if isinstance(text, str) else text.pieces()))
    except UnicodeEncodeError:
        raise MediaError.of(where, "the frames are not valid base64: encode each without line breaks") from None
    if len(data := made.getvalue()) == len(FRAME_LIST):
        raise MediaError.of(where, "the list has no frames: send each in base64, with commas between them")
    if count_frames(data) > MAX_FRAMES:
        raise InvalidRequest.of(where, f"the list has over {MAX_FRAMES:,} frames: send fewer")
    return Media("video", data, _FRAMES)


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "…")
