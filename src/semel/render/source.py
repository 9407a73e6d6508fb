"""From a source to media: the one place where what a request names becomes bytes.

Data URLs only, so far. Their base64 is checked strictly: a character that does not belong is an error, not skipped.
"""

from __future__ import annotations

from typing import Final

import pybase64

from semel.core import Media, Modality
from semel.errors import InvalidRequest, MediaError

__all__ = ["media_from", "media_from_base64"]

_SHOWN_CHARS: Final = 32


def media_from(source: str, modality: Modality, *, where: str) -> Media:
    """The media behind a URL; `where` says in errors which part of the request named it."""
    scheme, colon, rest = source.partition(":")
    match scheme.lower():
        case "data" if colon:
            return _from_data_url(rest, modality, where)
        case "http" | "https":
            raise InvalidRequest(
                f"{where}: fetching {_shown(source)} is not available yet: send the {modality} itself as a data URL "
                f"(data:{modality}/…;base64,…)"
            )
    raise InvalidRequest(f"{where}: {_shown(source)} is not a URL of a known scheme: send a data URL")


def media_from_base64(text: str, modality: Modality, *, mime: str | None, where: str) -> Media:
    """The media that `text` encodes."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise MediaError(f"{where}: the {modality} is not valid base64: encode it without line breaks") from error
    if not data:
        raise MediaError(f"{where}: the {modality} is empty: send its bytes in base64")
    return Media(modality, data, mime)


def _from_data_url(rest: str, modality: Modality, where: str) -> Media:
    head, comma, text = rest.partition(",")
    mime, *parameters = (field.strip() for field in head.split(";"))
    if not comma or not parameters or parameters[-1] != "base64":
        raise InvalidRequest(f"{where}: {_shown('data:' + rest)} is not of the form data:{modality}/…;base64,…")
    if mime and mime.partition("/")[0].lower() != modality:
        raise InvalidRequest(f"{where}: a data URL of type {_shown(mime)} cannot be used as {modality}")
    return media_from_base64(text, modality, mime=mime or None, where=where)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
