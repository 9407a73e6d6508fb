"""The lines of a batch file: read some at a time, each identified by its number and a digest of its bytes.

A line that waits is its place in the file and the items in it; its bytes are read again when it is sent.
"""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import msgspec
from blake3 import blake3

from semel.errors import ConfigError, InvalidRequest

__all__ = ["BatchFile", "BatchRequest", "Line", "check_file", "replaced_urls"]

_MEDIA_FIELDS: Final = frozenset(
    {"audio_url", "data", "file_data", "file_id", "file_url", "image_url", "url", "video_url"}
)
"""The fields of parts, in all APIs, whose text is an item or names one."""

_MAX_DEPTH: Final = 12
_PATH: Final = re.compile(r"/(?!/)[!-~]{0,2000}")


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was not sent yet."""

    number: int
    """From 1."""

    offset: int
    length: int
    digest: int
    items: tuple[int, ...] = ()
    """Digests of its media, or of what names them."""


class BatchRequest(msgspec.Struct, frozen=True):
    """The request in a line."""

    custom_id: str
    url: str
    body: msgspec.Raw
    """The JSON object, as it stands in the file."""

    method: str = "POST"

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse a line; one that no server could answer is an `InvalidRequest`."""
        try:
            found = msgspec.json.decode(data, type=cls)
            options = msgspec.json.decode(found.body, type=_Options)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the line is no request of a batch: {error}") from None
        if found.method != "POST":
            raise InvalidRequest('"method" must be "POST"')
        if not _PATH.fullmatch(found.url):
            raise InvalidRequest('"url" must be a path, such as "/v1/chat/completions"')
        if options.stream:
            raise InvalidRequest('"stream" must be false: a line has one response')
        return found


class _Options(msgspec.Struct):
    stream: bool | None = False


class BatchFile:
    """A batch file, open for reading."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._number = 0
        self.is_at_end = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file; a `ConfigError` says why that cannot be."""
        try:
            check_file(path)
            file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        return cls(file)

    def read(self, count: int, is_done: Callable[[int, int], bool]) -> list[Line]:
        """Read on; return those of the next `count` lines that are not done, by their numbers and digests."""
        found = []
        for _ in range(count):
            offset = self._file.tell()
            if not (data := self._file.readline()):
                self.is_at_end = True
                break
            self._number += 1
            digest = _digest(data.strip())
            if not data.isspace() and not is_done(self._number, digest):
                found.append(Line(self._number, offset, len(data), digest, _items(data)))
        return found

    def load(self, line: Line) -> bytes:
        """Return the bytes of a line."""
        return os.pread(self._file.fileno(), line.length, line.offset)

    def count(self) -> int:
        """Count the lines, apart from what is read."""
        with Path(self._file.name).open("rb") as file:
            return sum(not data.isspace() for data in file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_file(path: Path) -> None:
    """Refuse a device or a pipe: both files of a batch are read from their beginning, more than once."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file: name one")


def replaced_urls(body: Any, replace: Callable[[str], str]) -> Any:
    """Return a body in which each URL of a file is replaced."""
    if isinstance(body, list):
        return [replaced_urls(one, replace) for one in body]
    if not isinstance(body, dict):
        return body
    return {
        name: replace(value)
        if name in _MEDIA_FIELDS and isinstance(value, str) and value[:7].lower() == "file://"
        else replaced_urls(value, replace)
        for name, value in body.items()
    }


def _items(data: bytes) -> tuple[int, ...]:
    try:
        body = msgspec.json.decode(data)["body"]
    except (msgspec.MsgspecError, ValueError, RecursionError, KeyError, TypeError):
        return ()  # its error comes when it is sent
    return tuple(dict.fromkeys(_digest(text.encode("utf-8", "surrogatepass")) for text in _media(body, _MAX_DEPTH)))


def _media(value: Any, depth: int) -> Iterator[str]:
    if not depth or not isinstance(value, dict | list):
        return
    named = value.items() if isinstance(value, dict) else (("", one) for one in value)
    for name, inner in named:
        if name in _MEDIA_FIELDS and isinstance(inner, str):
            yield inner
        else:
            yield from _media(inner, depth - 1)


def _digest(data: bytes) -> int:
    """Return 64 bits that are never zero."""
    return int.from_bytes(blake3(data).digest(8), "big") or 1
