"""One request and its answers: what to send, what to send again, what the caller sees. No I/O.

A request is sent by reference first, if the ids of some of its media are known; then with all bytes, if the server does
not know them any more; then as the caller wrote it. A request is never sent more than three times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from semel.openai.dialect import Body, Dialect
from semel.openai.memory import Memory

__all__ = ["REPAIRED", "EventReader", "Exchange"]

REPAIRED: Final = frozenset({400, 404, 409, 422, 503})
"""The statuses of answers that may be about what was changed in a request."""

_UNKNOWN: Final = "unknown_media"
_NO_STORE: Final = frozenset({"ambiguous_media", "media_store_unavailable", "no_media_store"})
_REFUSED: Final = frozenset({400, 422})
_MAX_EVENT_BYTES: Final = 16 << 20
_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DONE: Final = b"[DONE]"

Form = Literal["reference", "bytes", "unchanged"]


class Exchange:
    """A request with media, to a server that returns ids or has not answered yet."""

    def __init__(self, dialect: Dialect, memory: Memory, server: bytes, content: bytes, body: Body) -> None:
        self.dialect = dialect
        self._memory = memory
        self._server = server
        self._content = content
        self._body = body
        self._digests = dialect.digests(body)
        self._ids = memory.known(server, self._digests)
        self._form: Form = "reference" if self._ids else "bytes"
        self._was_refused = False

    @classmethod
    def of(cls, dialect: Dialect, memory: Memory, server: bytes, content: bytes) -> Self | None:
        """Return the exchange of a request; None if it is to be left alone."""
        if memory.returns_ids(server) is False:
            return None
        if (body := _object(content)) is None:
            return None
        made = cls(dialect, memory, server, content, body)
        return made if any(made._digests) else None

    @property
    def is_changed(self) -> bool:
        """Return whether the request is sent other than the caller wrote it."""
        return self._form != "unchanged"

    def content(self) -> bytes:
        """Return what to send now."""
        if not self.is_changed:
            return self._content
        ids = self._ids if self._form == "reference" else {}
        return _encode(self.dialect.request(self._body, [ids.get(digest or b"") for digest in self._digests]))

    def repair(self, status: int, answer: bytes) -> bool:
        """After an answer with an error: whether to send the request again, with what `content` then returns."""
        code = _code(answer)
        if self._form == "reference" and code == _UNKNOWN:
            self._memory.forget(self._server, self._ids)
            self._form = "bytes"
            return True
        # A server that does not know the fields says so with 400, or 422; one that knows them has other reasons.
        is_doubtful = self._form == "reference" or self._memory.returns_ids(self._server) is None
        if self.is_changed and ((status in _REFUSED and is_doubtful) or code in _NO_STORE):
            self._was_refused = status in _REFUSED
            self._form = "unchanged"
            return True
        return False

    def accept(self) -> None:
        """Note that the request was answered as the caller wrote it: a refusal before that was our doing."""
        if self._was_refused:
            self._memory.forget(self._server, self._ids)
            self._memory.leave(self._server)

    def learn(self, answer: Body) -> bool:
        """Remember the ids in an answer or an event; whether it has any."""
        if (ids := self.dialect.ids(answer)) is None:
            return False
        self._memory.learn(self._server, self._digests, ids)
        return True

    def leave(self) -> None:
        """Note that the answer is complete, and had no ids."""
        self._memory.leave(self._server)

    def visible(self, answer: Body) -> Body | None:
        """Return what the caller sees of an answer or an event."""
        return self.dialect.answer(self._body, answer)

    def read(self, content: bytes) -> bytes:
        """Read a complete answer; what the caller sees of it."""
        if (answer := _object(content)) is None:
            return content
        if not self.learn(answer):
            self.leave()
        cleaned = self.visible(answer)
        return content if cleaned is None or cleaned == answer else _encode(cleaned)


class EventReader:
    """A reader of passing events. Only an incomplete event is kept back: a client waits for its end too."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._rest = b""
        self._has_ids = False
        self._is_passing = False

    def feed(self, chunk: bytes) -> bytes:
        """Read a chunk of the stream; what the caller sees of it."""
        if self._is_passing:
            return chunk
        data, start, seen = self._rest + chunk, 0, bytearray()
        # An end may have begun in the last chunk.
        for end in _EVENT_END.finditer(data, max(0, len(self._rest) - 3)):
            seen += self._event(data[start : end.end()])
            start = end.end()
        self._rest = data[start:]
        if len(self._rest) > _MAX_EVENT_BYTES:
            self._is_passing = True
            return bytes(seen) + self.end()
        return bytes(seen)

    def end(self) -> bytes:
        """End the stream; return what is left of it."""
        rest, self._rest = self._rest, b""
        return rest

    def _event(self, event: bytes) -> bytes:
        field = re.search(rb"(?:\A|[\r\n])data: ?([^\r\n]*)", event)
        if field is None:
            return event
        if field[1] == _DONE:
            if not self._has_ids:
                self._exchange.leave()
            return event
        if b'"media_ids"' not in event and b'"usage"' not in event:
            return event
        if (data := _object(field[1])) is None:
            return event
        self._has_ids |= self._exchange.learn(data)
        if not self._has_ids and self._exchange.dialect.is_end(data):
            self._exchange.leave()
        cleaned = self._exchange.visible(data)
        if cleaned is None:
            return b""
        if cleaned == data:
            return event
        return event[: field.start(1)] + _encode(cleaned) + event[field.end(1) :]


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _encode(value: Body) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can only have escaped
        return json.dumps(value, separators=(",", ":")).encode()


def _code(answer: bytes) -> str:
    """Return the code of an error in OpenAI's shape."""
    error = (_object(answer) or {}).get("error")
    return str(error.get("code")) if isinstance(error, Mapping) else ""
