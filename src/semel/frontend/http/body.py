"""Reads request bodies within limits, charges them to the account, parses them, and detects disconnects."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from semel.errors import InvalidRequest, MediaTooLarge, RequestTooSlow, UnsupportedEncoding, excerpt
from semel.frontend.api.shared.faults import fault_of
from semel.frontend.api.shared.unknown_fields import UnknownFields
from semel.frontend.budget import Account
from semel.frontend.http.long_strings import Cut, cut_long_strings
from semel.frontend.http.sse import EventStream
from semel.frontend.limits import BodyLimits
from semel.render.media.part_source import put_media
from semel.render.offload import run_if_heavy
from semel.web.disconnect import DisconnectWatch
from semel.web.multipart import Form, FormReader

__all__ = [
    "CLIENT_CLOSED",
    "BodyLimits",
    "charge_values",
    "parse",
    "parse_body",
    "read",
    "read_bytes",
    "read_upload",
    "take_values",
    "unless_disconnected",
]

CLIENT_CLOSED: Final = 499
"""The status of a request whose client disconnected, as in nginx. It appears in logs and metrics only."""

_VALUE_BYTES: Final = 96
"""Memory of one JSON value as a Python object. A small dict takes 184 bytes, but its JSON has two of `_MARKS`."""

_MARKS: Final = (b",", b"[", b"{")
_FEW: Final = 64

_MAX_ERRORS: Final = 100

_SMALL_BYTES: Final = 256 * 1024
_SMALL_VALUES: Final = 4_096
"""A JSON text of this size with so many values is parsed on the event loop, in 4 ms at most; others in a thread."""

_RESERVED_BYTES: Final = 64 * 1024
"""A body of this size is charged once, when it is announced; a longer one as it comes."""

_PIECE: Final = 1 << 20
"""The most bytes of a body that are worked on at once on the event loop, or with the interpreter's lock held."""

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


async def read(request: Request, limits: BodyLimits, account: Account) -> bytearray:
    """Read a JSON body. Charges the memory of its parsed values to the account too."""
    body = bytearray()
    await _receive(request, limits, account, body.extend)
    await charge_values(body, limits, account)
    return body


async def charge_values(body: bytes | bytearray, limits: BodyLimits, account: Account) -> None:
    """Charge the memory that the values of a JSON text of any size will take, or refuse the text."""
    if len(body) <= _PIECE:
        take_values(body, limits, account)
    else:
        account.take(_VALUE_BYTES * await asyncio.to_thread(_count_values, body, limits))


def take_values(body: bytes | bytearray, limits: BodyLimits, account: Account) -> None:
    """Charge the memory that the values of a JSON text will take, or refuse the text."""
    account.take(_VALUE_BYTES * _count_values(body, limits))


async def read_bytes(request: Request, limits: BodyLimits, account: Account) -> bytearray:
    """Read the body; stop as soon as it exceeds a limit. A Content-Length can refuse it before that."""
    body = bytearray()
    # Not into a list of pieces: tiny ones would take twenty times as much memory.
    await _receive(request, limits, account, body.extend)
    return body


async def read_upload(request: Request, limits: BodyLimits, account: Account, *, max_file_bytes: int) -> Form:
    """Read a form with files as it comes; stop as soon as it, or a file, exceeds a limit."""
    reader = FormReader(request.headers.get("content-type", ""), max_file_bytes=max_file_bytes)
    await _receive(request, limits, account, reader.feed)
    return reader.finish()


async def _receive(request: Request, limits: BodyLimits, account: Account, add: Callable[[bytes], None]) -> None:
    _check_encoding(request)
    announced = request.headers.get("content-length", "")
    reserved = int(announced) if announced.isdecimal() else 0
    _check_size(reserved, limits)
    if reserved <= _RESERVED_BYTES:
        account.take(reserved)
    else:
        account.check(reserved)  # and charge what comes: who sends nothing must not hold much
        reserved = 0
    size, receive = 0, request.receive
    try:
        async with asyncio.timeout(limits.max_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                if chunk := message.get("body", b""):
                    size += len(chunk)
                    if size > reserved:
                        _check_size(size, limits)
                        account.take(size - reserved)
                        reserved = size
                    add(chunk)
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise RequestTooSlow(
            f"the request took longer than {limits.max_s:g} s to come; raise it with --max-body-s"
        ) from None


def _check_encoding(request: Request) -> None:
    """Refuse a compressed body before a byte of it is read (threats S28)."""
    written = ", ".join(request.headers.getlist("content-encoding")).strip()
    if written.lower() not in ("", UnsupportedEncoding.accepted):
        raise UnsupportedEncoding(
            f"Content-Encoding: {excerpt(written)} is not taken: send the body as it is, or name files to save bytes"
        )


def parse(body: bytes | bytearray, kind: TypeAdapter[_T], unknown: UnknownFields | None = None) -> _T:
    """Parse the body as a request of this kind. The error names the field. Without `unknown` it refuses such fields."""
    try:
        return kind.validate_json(body, context=unknown)
    except ValidationError as error:
        if (count := error.error_count()) > _MAX_ERRORS:  # formatting half a million errors takes 2 s
            raise InvalidRequest(f"the body has {count:,} faults; this is the API for OpenAI's requests") from None
        raise fault_of(error) from None


async def parse_body(
    body: bytes | bytearray, kind: TypeAdapter[_T], limits: BodyLimits, unknown: UnknownFields | None = None
) -> _T:
    """Parse a body of any size as `parse` does, and let the event loop go on.

    The long strings of its media are cut out. If a token is not found again in a field that takes media, or the rest is
    not valid, then the body is parsed with its strings: its result, and its error, are the same as without the cut. A
    body that is too long to be parsed so gets the error of the rest instead.
    """
    if _is_small(body):
        _check_text(len(body), limits)
        return parse(body, kind, unknown)
    if (parsed := await _parse_without_long_strings(body, kind, limits, unknown)) is not None:
        return parsed
    _check_text(len(body), limits)
    return await asyncio.to_thread(_parse_only, [body], kind, unknown)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response of `work`; cancel it as soon as the client disconnects."""
    response = None
    with DisconnectWatch(request.scope, request.receive) as watch:
        try:
            response = await work
        except Exception:
            if not watch.has_left:
                raise
    if response is not None and not watch.has_left:
        return response  # no await before the response is sent: a cancellation here would drop it
    logger.info("a client went away before its answer")
    if isinstance(response, EventStream):
        await response.close()
    return Response(status_code=CLIENT_CLOSED)


async def _parse_without_long_strings(
    body: bytes | bytearray, kind: TypeAdapter[_T], limits: BodyLimits, unknown: UnknownFields | None = None
) -> _T | None:
    cut = await run_if_heavy(partial(cut_long_strings, body, secrets.token_hex(16)), light=len(body) <= _PIECE)
    if not cut.strings:
        return None
    _check_text(len(cut.rest), limits)
    parsing = partial(_parse_cut, cut, kind, unknown, raises=len(body) > limits.max_text_bytes)
    return await run_if_heavy(parsing, light=_is_small(cut.rest))


def _parse_only(bodies: list[bytes | bytearray], kind: TypeAdapter[_T], unknown: UnknownFields | None) -> _T:
    """Parse the only body of a list and take it out: a thread keeps its arguments for a moment after its result."""
    return parse(bodies.pop(), kind, unknown)


def _parse_cut(cut: Cut, kind: TypeAdapter[_T], unknown: UnknownFields | None, *, raises: bool) -> _T | None:
    """The request, if the cut was right; an error of what is left is its error if it `raises`."""
    try:
        parsed = parse(cut.rest, kind, unknown)
    except InvalidRequest:
        if raises:
            raise
        return None
    return parsed if put_media(getattr(parsed, "messages", ()), cut.strings) == len(cut.strings) else None


def _check_size(size: int, limits: BodyLimits) -> None:
    if size > limits.max_bytes:
        raise MediaTooLarge(f"the request is over {limits.max_bytes:,} bytes; raise it with --max-body-bytes")


def _check_text(size: int, limits: BodyLimits) -> None:
    if size > (limit := limits.max_text_bytes):
        raise MediaTooLarge(
            f"the request has {size:,} bytes of JSON besides the base64 of its media; the limit is {limit:,}: send "
            "less text, or raise it with --max-body-text-bytes"
        )


def _count_values(body: bytes | bytearray, limits: BodyLimits) -> int:
    """Upper bound on the number of values: each follows a comma or an opening bracket. Strings may have these too."""
    values = _marks(body)
    if values > limits.max_values:
        raise MediaTooLarge(
            f"the request has {values:,} commas and opening brackets; the limit is {limits.max_values:,}: send fewer "
            "values, or raise it with --max-body-values"
        )
    return values


def _is_small(body: bytes | bytearray) -> bool:
    return len(body) <= _SMALL_BYTES and (len(body) <= _SMALL_VALUES or _marks(body) <= _SMALL_VALUES)


def _marks(body: bytes | bytearray) -> int:
    if len(body) <= _SMALL_VALUES:
        return sum(map(body.count, _MARKS))
    return sum(_count(body, mark, start, start + _PIECE) for start in range(0, len(body), _PIECE) for mark in _MARKS)


def _count(body: bytes | bytearray, mark: bytes, start: int, end: int) -> int:
    """Count a character. Up to 64 are found one by one: 5 µs in 400 kB of base64, where counting takes 150 µs."""
    place = start - 1
    for found in range(_FEW):
        if (place := body.find(mark, place + 1, end)) < 0:
            return found
    return body.count(mark, start, end)
