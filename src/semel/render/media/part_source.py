"""The media of a chat's messages: which fields have it, and what a part of a message says of where it comes from.

Pure: a URL is fetched and a file is read later. What a part cannot say so is an error that names its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from semel.core import Digest, Media, Modality
from semel.errors import InvalidRequest, UnknownMedia, excerpt
from semel.media.signature import FileKind
from semel.render.media.json_values import kind_of, string_of
from semel.render.media.names import MAX_NAME_CHARS
from semel.render.media.source import (
    PDF,
    Document,
    LongString,
    MediaFile,
    MediaName,
    MediaUrl,
    Source,
    media_from_base64,
    source_from,
)

__all__ = ["MEDIA_TYPES", "NO_FILES", "Files", "name_of", "named_files", "put_media", "source_of"]

_URL_FIELDS: Final[Mapping[str, tuple[str, Modality]]] = {
    "audio_url": ("audio_url", "audio"),
    "image_url": ("image_url", "image"),
    "input_image": ("image_url", "image"),
    "video_url": ("video_url", "video"),
}
_URL_NAMES: Final = frozenset(name for name, _ in _URL_FIELDS.values())
_FILE_NAMES: Final = ("file", *_URL_NAMES)
_ARTICLES: Final[Mapping[FileKind | None, str]] = {
    "audio": "audio",
    "document": "a document",
    "image": "an image",
    "video": "a video",
    None: "neither image, audio, video nor PDF",
}
MEDIA_TYPES: Final = frozenset({*_URL_FIELDS, "document", "file", "image", "input_audio"})
"""The types of parts that have media."""

_IMAGE_DATA: Final = "data:image/"
_PDF_DATA: Final = f"data:{PDF}"
_PAGE_RANGE: Final = re.compile(r"(\d{1,9})(?:(-)(\d{1,9})?)?", re.ASCII)
_MAX_DPI: Final = 1 << 20
_MAX_MIME_CHARS: Final = 64
_AUDIO_FORMAT: Final = re.compile(r"[\w.+/;= -]{0,64}", re.ASCII)

Files = Mapping[str, tuple[Digest, FileKind | None]]
"""Files of the request's tenant, by the ids that it has written: what each is, if it can be an item."""

NO_FILES: Final[Files] = {}


def put_media(messages: Sequence[dict[str, Any]], strings: Mapping[str, LongString]) -> int:
    """Put long strings into messages where a field that takes media has their token. Returns how many were put."""
    put = 0
    for fields, name in _media_fields(messages):
        value = fields.get(name)
        if isinstance(value, str) and value in strings:
            fields[name] = strings[value]
            put += 1
    return put


def _media_fields(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects in messages that may have media, each with the name of the field."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            for name in _URL_NAMES:
                value = part.get(name)
                yield (value, "url") if isinstance(value, dict) else (part, name)
            if isinstance(audio := part.get("input_audio"), dict):
                yield audio, "data"
            if isinstance(file := part.get("file"), dict):
                yield file, "file_data"
            if isinstance(source := part.get("source"), dict):
                yield from ((source, "data"), (source, "url"))


def named_files(messages: Sequence[object]) -> list[str]:
    """Return the ids of all files that messages name, each once, in the order of the parts."""
    found: dict[str, None] = {}
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                values = (part.get(name) for name in _FILE_NAMES)
                found |= {id_: None for value in values if isinstance(value, dict) and (id_ := _file_id(value))}
    return list(found)


def source_of(part: dict[str, Any], kind: str, name: str | None, files: Files, where: str) -> Source:
    """Return where the media of a part of this type comes from; `name` is what its client calls it."""
    if kind == "file":
        return _any_file(part.get("file"), files, where)
    if kind == "document":
        return _document(_block_source(part.get("source"), f"{where}.source", mime=PDF), part, where)
    if kind == "image":
        return _block_source(part.get("source"), f"{where}.source")
    field_name, modality = _URL_FIELDS.get(kind, ("input_audio", "audio"))
    value = part.get(field_name)
    if name is not None and _is_stripped(value):
        return MediaName(modality, name, where)
    if kind == "input_audio":
        return _input_audio(value, where)
    if isinstance(value, dict) and "file_id" in value:
        return _file(value, modality, files, where)
    return source_from(_url(value, f"{where}.{field_name}"), modality, where=where)


def _is_stripped(value: object) -> bool:
    """Return whether a client left the media out: it sends null, or an object whose URL or data are null or empty."""
    if isinstance(value, dict) and "file_id" not in value:
        value = value.get("data") or value.get("url")
    return value is None or value == ""


def _uuid(part: dict[str, Any], kind: str) -> object:
    """Return what the client calls the media. Dynamo's clients also have it in the object with the URL."""
    value = part.get(_URL_FIELDS[kind][0]) if kind in _URL_FIELDS else None
    nested = value.get("uuid") if isinstance(value, dict) else None
    return part.get("uuid", nested)


def name_of(part: dict[str, Any], kind: str, where: str) -> str | None:
    """Return what the client calls the media of a part, if it does."""
    if (value := _uuid(part, kind)) is None:
        return None
    name = string_of(value, f"{where}.uuid")
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest.of(f"{where}.uuid", f"must have 1 to {MAX_NAME_CHARS} characters, not {len(name):,}")
    return name


def _url(value: object, where: str) -> str | LongString:
    """A URL is a string, or an object with the string in "url"."""
    return _encoded(value.get("url") if isinstance(value, dict) else value, where)


def _file_id(value: Mapping[str, Any]) -> str | None:
    file_id = value.get("file_id")
    return file_id if isinstance(file_id, str) else None


def _any_file(value: object, files: Files, where: str) -> Source:
    """Return the image or document that a part of type "file" sends, or the file that it names."""
    if isinstance(value, dict) and value.get("file_data") is not None:
        return _inline_file(value, where)
    if isinstance(value, dict) and value.get("file_url") is not None:
        if value.get("file_id") is not None:
            raise InvalidRequest.of(where, 'has a "file_url" and a "file_id": send one of them')
        url = _encoded(value["file_url"], f"{where}.file.file_url")
        return _document(source_from(url, "image", where=where, mime=PDF), value, where)
    return _file(value, None, files, where)


def _file(value: object, modality: Modality | None, files: Files, where: str) -> MediaFile | Document:
    """Return the file that a part names; `modality` is what the part takes, if it does not take all."""
    if not isinstance(value, dict) or (file_id := _file_id(value)) is None:
        raise InvalidRequest.of(where, 'must have a "file_id", the id of a file that was uploaded to /v1/files')
    if value.get("url") is not None:
        raise InvalidRequest.of(where, 'has a "url" and a "file_id": send one of them')
    if file_id not in files:
        raise UnknownMedia.of(where, f"there is no file {excerpt(repr(excerpt(file_id)))}; upload it again")
    digest, found = files[file_id]
    if found is None or (modality is not None and found != modality):
        raise InvalidRequest.of(where, f"the file is {_ARTICLES[found]}, and cannot be used as {modality or 'media'}")
    if found == "document":
        return _document(MediaFile("image", digest, where), value, where)
    return MediaFile(found, digest, where)


def _document(document: Media | MediaUrl | MediaFile, options: Mapping[str, Any], where: str) -> Document:
    """Return a document with the pages and the resolution that its part asks for."""
    first, last, dpi = 1, None, options.get("dpi")
    if (pages := options.get("page_range")) is not None:
        found = _PAGE_RANGE.fullmatch(pages) if isinstance(pages, str) else None
        first = int(found[1]) if found is not None else 0
        last = None if found is None else first if found[2] is None else int(found[3]) if found[3] else None
        if first < 1 or (last is not None and last < first):
            raise InvalidRequest.of(f"{where}.page_range", 'must be a page or a range such as "7", "2-5" or "3-"')
    if dpi is not None and (isinstance(dpi, bool) or not isinstance(dpi, int) or not 0 < dpi <= _MAX_DPI):
        raise InvalidRequest.of(f"{where}.dpi", "must be a whole number of dots per inch, such as 150")
    return Document(document, where, first, last, dpi)


def _block_source(value: object, where: str, *, mime: str | None = None) -> Media | MediaUrl:
    """Return an image, or what is of this type, as Anthropic's API has it: its URL, or its base64."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("base64", "url"):
        raise InvalidRequest.of(where, 'must be of type "base64" with "data", "url" with "url", or "file" with an id')
    if kind == "url":
        return source_from(_encoded(value.get("url"), f"{where}.url"), "image", where=where, mime=mime)
    found = string_of(value.get("media_type", mime or "image/jpeg"), f"{where}.media_type")
    if mime is not None and found != mime:
        raise InvalidRequest.of(f"{where}.media_type", f'must be "{mime}": other documents are not read')
    if mime is None and (found.partition("/")[0].lower() != "image" or len(found) > _MAX_MIME_CHARS):
        raise InvalidRequest.of(f"{where}.media_type", f'must be a short name such as "image/png", not {found[:32]!r}')
    return media_from_base64(_encoded(value.get("data"), f"{where}.data"), "image", mime=found, where=where)


def _inline_file(value: Mapping[str, Any], where: str) -> Source:
    """Return an image or a document in OpenAI's form of a file that is not uploaded: its data URL."""
    if value.get("file_id") is not None:
        raise InvalidRequest.of(where, 'has "file_data" and a "file_id": send one of them')
    data = _encoded(value["file_data"], f"{where}.file.file_data")
    if data[: len(_PDF_DATA)].lower() == _PDF_DATA:
        return _document(source_from(data, "image", where=where, mime=PDF), value, where)
    if data[: len(_IMAGE_DATA)].lower() != _IMAGE_DATA:
        raise InvalidRequest.of(
            where, f'"file_data" is read of PDFs and images only, as {_PDF_DATA};base64,… or {_IMAGE_DATA}…;base64,…'
        )
    return source_from(data, "image", where=where)


def _input_audio(value: object, where: str) -> Media:
    if not isinstance(value, dict):
        raise InvalidRequest.of(
            f"{where}.input_audio", f'must be an object with "data" and "format", not {kind_of(value)}'
        )
    data = _encoded(value.get("data"), f"{where}.input_audio.data")
    format_ = string_of(value.get("format"), f"{where}.input_audio.format")
    if not _AUDIO_FORMAT.fullmatch(format_):
        raise InvalidRequest.of(
            f"{where}.input_audio.format",
            f'must be a short name such as "wav", not {format_[:32]!r} of {len(format_):,} characters',
        )
    return media_from_base64(data, "audio", mime=f"audio/{format_}", where=where)


def _encoded(value: object, where: str) -> str | LongString:
    return value if isinstance(value, LongString) else string_of(value, where)
