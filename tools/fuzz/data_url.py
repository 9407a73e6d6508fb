"""Data URLs as a client may write them. The first byte chooses the modality."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from random import Random
from typing import Final

from semel.core import Modality
from semel.errors import RequestError
from semel.render import MediaUrl, source_from
from tools.fuzz.mutation import edited_text
from tools.fuzz.oracle import Finding, check_message, expect

_MODALITIES: Final[tuple[Modality, ...]] = ("audio", "image", "video")
_WORDS: Final = (
    *("data:", "DATA:", ";base64,", ";base64", "base64", ",", ";", "image/png", "audio/", "video/mp4", "charset=utf-8"),
    *("=", "==", "AAAA", "-_", "%3D", "\n", " ", "\0", "\ud800", "é", "http://", "https://", "file:///", "//"),
)


def run(data: bytes) -> None:
    modality = _MODALITIES[data[0] % len(_MODALITIES)] if data else "image"
    url = data[1:].decode(errors="surrogateescape")
    try:
        source = source_from(url, modality, where="messages[0].content[0]")
    except RequestError as error:
        check_message(error)
        return
    expect(source.modality == modality, f"{source!r} is no {modality}")
    if isinstance(source, MediaUrl):
        expect(url.lower().startswith(("http://", "https://", "file:///", "file://localhost/")), f"{url!r} is no URL")
        return
    expect(url[:5].lower() == "data:", f"{url!r} is no data URL")
    _check_bytes(url, source.data)


def _check_bytes(url: str, found: bytes) -> None:
    """The bytes are those that the standard library decodes strictly, so that no two readers can differ."""
    text = url.partition(",")[2]
    try:
        expected = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Finding(f"{text!r} is taken for base64") from error
    expect(found == expected and bool(found), f"{text!r} is read as {found!r}")


def mutate(data: bytes, random: Random) -> bytes | None:
    """Edit the text by the words of such URLs, or the bytes behind its base64."""
    head, comma, text = data.partition(b",")
    if comma and random.random() < 0.3:
        return head + comma + base64.b64encode(random.randbytes(random.randint(0, 8)) + text[: random.randint(0, 8)])
    words = [word for word in _WORDS if random.random() < 0.5]
    edited = edited_text(data[1:].decode(errors="surrogateescape"), random, words)
    return data[:1] + edited.encode(errors="replace" if "\ud800" in edited else "surrogateescape")


def seeds() -> Mapping[str, bytes]:
    """Each modality, with and without a type, and forms that are refused."""
    return {
        "audio": b"\0data:audio/wav;base64,UklGRg==",
        "image": b"\1data:image/png;base64,iVBORw0KGgo=",
        "image-parameters": b"\1data:image/png;charset=utf-8;name=a;base64,AAAA",
        "image-without-type": b"\1data:;base64,AAAA",
        "video": b"\2DATA:Video/mp4; base64,AAAA",
        "plain": b"\1data:image/svg+xml,%3Csvg%3E",
        "broken": b"\1data:image/png;base64,AA=A\nA",
        "https": b"\1https://example.com/a.png",
    }
