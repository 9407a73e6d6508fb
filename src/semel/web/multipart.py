"""Forms with files (`multipart/form-data`), parsed from a body that is in memory, or piece by piece as it comes.

The number of parts and the length of fields and part headers are bounded here. The limit of the body bounds the files,
and `max_file_bytes` each of them (threats S4, S18). The caller has charged a piece to an account. Nothing is
written to disk, and the names of files are names, not paths. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from semel.errors import InvalidRequest, MediaTooLarge

__all__ = ["FORM", "Form", "FormReader", "read_form"]

FORM: Final = "multipart/form-data"

_MAX_PARTS: Final = 64
_MAX_FIELD_BYTES: Final = 65_536
_MAX_HEADERS: Final = 8
_MAX_HEADER_BYTES: Final = 4_096
_MAX_OPTIONS_BYTES: Final = 2_048
_MAX_OPTIONS: Final = 32
"""A header with options is split on the event loop, in 1 µs for each: 60,000 semicolons would take 60 ms."""

_NO_FORM: Final = "the body is no form of the boundary that its header tells"


@dataclass(frozen=True, slots=True)
class Form:
    """A form: its text fields by name, and its files."""

    fields: Mapping[str, str | list[str]]
    """A field whose name ends in [] is a list."""

    files: Mapping[str, bytes | bytearray]
    file_names: Mapping[str, str] = field(default_factory=dict)
    """The names that the client gave to its files, by field."""


def read_form(body: bytes | bytearray, content_type: str) -> Form:
    """Parse a form from a body; refuse what is not a form."""
    reader = FormReader(content_type)
    reader.feed(body if isinstance(body, bytes) else memoryview(body).toreadonly().tobytes())
    form = reader.finish()
    return Form(form.fields, {name: bytes(data) for name, data in form.files.items()}, form.file_names)


class FormReader:
    """Parses a form piece by piece. A piece of 64 KiB takes 0.1 ms."""

    def __init__(self, content_type: str, *, max_file_bytes: int | None = None) -> None:
        kind, options = _options(content_type.encode("latin-1", "replace"), "the Content-Type")
        if kind.lower() != FORM.encode() or not (boundary := options.get(b"boundary")):
            raise InvalidRequest(f"this route takes a form: send {FORM} with a boundary, as OpenAI's clients do")
        self._reading = reading = _Reading(max_file_bytes)
        self._delimiter = b"\r\n--" + boundary
        self._delimiters = 0
        try:
            self._parser = MultipartParser(
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
        except FormParserError:
            raise InvalidRequest(_NO_FORM) from None

    def feed(self, piece: bytes) -> None:
        """Parse the next piece."""
        # The parser stops at each, also where none ends a part: 40,000 of them in a piece would take 80 ms.
        self._delimiters += piece.count(self._delimiter)
        if self._delimiters > _MAX_PARTS + 1:
            raise InvalidRequest(
                f"the form has more than {_MAX_PARTS} parts, or its boundary is in them: send fewer, or another one"
            )
        try:
            self._parser.write(piece)
        except FormParserError:
            raise InvalidRequest(_NO_FORM) from None

    def finish(self) -> Form:
        """Return the form, if all of it has come."""
        try:
            self._parser.finalize()
        except FormParserError:
            raise InvalidRequest(_NO_FORM) from None
        reading = self._reading
        if not reading.finished:
            raise InvalidRequest("the form has no end: send all of it")
        return Form(reading.fields, reading.files, reading.file_names)


@dataclass(slots=True)
class _Reading:
    """The parts of a form so far."""

    max_file_bytes: int | None = None
    fields: dict[str, str | list[str]] = field(default_factory=dict)
    files: dict[str, bytes | bytearray] = field(default_factory=dict)
    file_names: dict[str, str] = field(default_factory=dict)
    finished: bool = False
    _parts: int = 0
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _disposition: bytes = b""
    _name: str = ""
    _is_file: bool = False
    _file_name: str = ""
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
        _, options = _options(self._disposition, "a Content-Disposition of the form")
        self._name = _text(options.get(b"name", b""))
        self._is_file = b"filename" in options
        self._file_name = _text(options.get(b"filename", b""))
        if not self._name:
            raise InvalidRequest("a part of the form has no name: each needs one in its Content-Disposition")

    def add(self, data: bytes, start: int, end: int) -> None:
        size = len(self._data) + end - start
        if self._is_file and self.max_file_bytes is not None and size > self.max_file_bytes:
            raise MediaTooLarge.of(
                self._name,
                f"a file has at most {self.max_file_bytes:,} bytes; send a smaller one, or raise it with "
                "--max-media-bytes",
            )
        if not self._is_file and size > _MAX_FIELD_BYTES:
            raise InvalidRequest.of(
                self._name, f"a field has at most {_MAX_FIELD_BYTES:,} bytes; only files are longer"
            )
        self._data += memoryview(data)[start:end]

    def end(self) -> None:
        if self._name in self.files or (self._name in self.fields and not self._name.endswith("[]")):
            raise InvalidRequest.of(self._name, "the form has it twice; send it once")
        if self._is_file:
            self.files[self._name] = self._data
            self.file_names[self._name] = self._file_name
        elif self._name.endswith("[]"):
            listed = self.fields.setdefault(self._name, [])
            assert isinstance(listed, list)
            listed.append(_text(self._data))
        else:
            self.fields[self._name] = _text(self._data)
        self._data = bytearray()

    def finish(self) -> None:
        self.finished = True


def _options(header: bytes, name: str) -> tuple[bytes, dict[bytes, bytes]]:
    """Return a header's value and its options."""
    if len(header) > _MAX_OPTIONS_BYTES or header.count(b";") > _MAX_OPTIONS:
        raise InvalidRequest(
            f"{name} has more than {_MAX_OPTIONS_BYTES:,} bytes or {_MAX_OPTIONS} semicolons: send a shorter one"
        )
    return parse_options_header(header)


def _text(data: bytes | bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the form has a field that is not UTF-8: send it so") from None
