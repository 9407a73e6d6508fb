"""Forms with files (`multipart/form-data`), parsed from a body that is in memory and charged to its account.

The number of parts and the length of fields and part headers are bounded here. The limit of the body bounds the files
(threats S4, S18). Nothing is written to disk, and file names are ignored. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from semel.errors import InvalidRequest

__all__ = ["FORM", "Form", "read_form"]

FORM: Final = "multipart/form-data"

_MAX_PARTS: Final = 64
_MAX_FIELD_BYTES: Final = 65_536
_MAX_HEADERS: Final = 8
_MAX_HEADER_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class Form:
    """A form: its text fields by name, and its files."""

    fields: Mapping[str, str | list[str]]
    """A field whose name ends in [] is a list."""

    files: Mapping[str, bytes]


def read_form(body: bytes | bytearray, content_type: str) -> Form:
    """Parse a form from a body; refuse what is not a form."""
    kind, options = parse_options_header(content_type)
    if kind.lower() != FORM.encode() or not (boundary := options.get(b"boundary")):
        raise InvalidRequest(f"this route takes a form: send {FORM} with a boundary, as OpenAI's clients do")
    reading = _Reading()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": reading.begin,
                "on_part_data": reading.add,
                "on_part_end": reading.end,
                "on_header_field": reading.name_header,
                "on_header_value": reading.add_to_header,
                "on_header_end": reading.end_header,
                "on_headers_finished": reading.name_part,
                "on_end": reading.finish,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )
        parser.write(body if isinstance(body, bytes) else memoryview(body).toreadonly().tobytes())
        parser.finalize()
    except FormParserError:
        raise InvalidRequest("the body is no form of the boundary that its header tells") from None
    if not reading.finished:
        raise InvalidRequest("the form has no end: send all of it")
    return Form(reading.fields, reading.files)


@dataclass(slots=True)
class _Reading:
    """The parts of a form so far."""

    fields: dict[str, str | list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    finished: bool = False
    _parts: int = 0
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _disposition: bytes = b""
    _name: str = ""
    _is_file: bool = False
    _data: bytearray = field(default_factory=bytearray)

    def begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequest(f"the form has more than {_MAX_PARTS} parts: send fewer")
        self._disposition, self._data = b"", bytearray()

    def name_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = _text(options.get(b"name", b""))
        self._is_file = b"filename" in options
        if not self._name:
            raise InvalidRequest("a part of the form has no name: each needs one in its Content-Disposition")

    def add(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file and len(self._data) + end - start > _MAX_FIELD_BYTES:
            raise InvalidRequest.of(
                self._name, f"a field has at most {_MAX_FIELD_BYTES:,} bytes; only files are longer"
            )
        self._data += memoryview(data)[start:end]

    def end(self) -> None:
        if self._name in self.files or (self._name in self.fields and not self._name.endswith("[]")):
            raise InvalidRequest.of(self._name, "the form has it twice; send it once")
        if self._is_file:
            self.files[self._name] = bytes(self._data)
        elif self._name.endswith("[]"):
            listed = self.fields.setdefault(self._name, [])
            assert isinstance(listed, list)
            listed.append(_text(self._data))
        else:
            self.fields[self._name] = _text(self._data)
        self._data = bytearray()

    def finish(self) -> None:
        self.finished = True


def _text(data: bytes | bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the form has a field that is not UTF-8: send it so") from None
