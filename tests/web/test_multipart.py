"""Forms: what a hostile one costs the event loop that parses it (threats S18)."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from semel.errors import InvalidRequest
from semel.web import multipart
from semel.web.multipart import FormReader

TYPE = "multipart/form-data; boundary=b"
HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"'
PIECE = 256 * 1024
END = b"\r\n--b--\r\n"

HOSTILE = {
    "false ends": (TYPE, (HEAD + b"\r\n\r\n" + b"\r\n--b-x" * PIECE)[:PIECE]),
    "false boundaries": (TYPE, (HEAD + b"\r\n\r\n" + b"\r\n--b\rx" * PIECE)[:PIECE]),
    "options of parts": (
        TYPE,
        b"\r\n\r\nx\r\n".join(HEAD.replace(b"file", b"f%d" % n) + b";" * 3_900 for n in range(60)),
    ),
    "options of the form": (TYPE + ";" * 60_000, HEAD + b"\r\n\r\nx" + END),
}


def seconds(content_type: str, piece: bytes) -> float:
    """What one piece costs its thread, whether it is refused or not."""
    began_s = time.thread_time()
    with suppress(InvalidRequest):
        FormReader(content_type).feed(piece)
    return time.thread_time() - began_s


@pytest.mark.parametrize("case", HOSTILE)
def test_no_piece_of_a_form_takes_the_event_loop_for_long_S18(case: str) -> None:
    assert min(seconds(*HOSTILE[case]) for _ in range(3)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_mutant_without_these_bounds_a_piece_takes_it_for_long(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "_MAX_OPTIONS_BYTES", 1 << 20)
    monkeypatch.setattr(multipart, "_MAX_OPTIONS", 1 << 20)
    monkeypatch.setattr(FormReader, "feed", lambda self, piece: self._parser.write(piece))
    assert min(seconds(*HOSTILE[case]) for _ in range(3)) > 0.01


def test_what_looks_like_an_end_here_and_there_is_data() -> None:
    data = b"\r\n--b-x" * 8 + b"\r\n--" * 1_000
    reader = FormReader(TYPE)
    for byte in HEAD + b"\r\n\r\n" + data + END:
        reader.feed(bytes([byte]))
    assert bytes(reader.finish().files["file"]) == data


def test_a_form_may_have_as_many_parts_as_allowed_and_no_more() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="f[]"\r\n\r\nv\r\n'
    reader = FormReader(TYPE)
    reader.feed(b"\r\n" + part * 64 + b"--b--\r\n")
    assert reader.finish().fields == {"f[]": ["v"] * 64}
    with pytest.raises(InvalidRequest, match="more than 64 parts"):
        FormReader(TYPE).feed(part * 65 + b"--b--\r\n")
