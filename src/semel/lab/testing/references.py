"""A small server for chats by reference: it returns ids, takes them back, and forgets. For tests of `semel.openai`.

It answers over a real socket what OpenAI's clients read, and keeps what it was sent. Its faults are set from outside.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["ReferenceServer", "Rejection", "expanded", "serve_references"]

_FIELDS = ("audio_url", "image_url", "video_url")


class Rejection(Exception):
    """A request is refused with a status, a code and the place of a part."""

    def __init__(self, status: int, code: str, param: str | None = None) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.param = param


@dataclass
class ReferenceServer:
    """The server's state and behaviour."""

    returns_ids: bool = True
    is_strict: bool = False
    """Refuses fields that it does not know, as OpenAI's server does. Only without ids."""

    faults: list[Rejection] = field(default_factory=list)
    """The next requests are refused with these."""

    text: str = "word"
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """What came, as it came."""

    expanded: list[dict[str, Any]] = field(default_factory=list)
    """What was answered, with media in the place of ids."""

    received_bytes: int = 0
    pieces: int = 1
    """Into how many writes each event of a stream is cut."""

    _media: dict[tuple[str, str], str] = field(default_factory=dict)

    def forget(self) -> None:
        """Lose all media."""
        self._media.clear()

    def answer(self, body: dict[str, Any], owner: str) -> dict[str, Any]:
        """Return what a request is answered with; raises `Rejection`."""
        self.bodies.append(body)
        if self.faults:
            raise self.faults.pop(0)
        if not self.returns_ids and self.is_strict and "return_media_ids" in body:
            raise Rejection(400, "unknown_parameter", "return_media_ids")
        if not self.returns_ids:
            self.expanded.append(body)
            return self._answer(body)
        whole, ids = expanded(body, {media_id: url for (one, media_id), url in self._media.items() if one == owner})
        for media_id, url in ids:
            self._media[owner, media_id] = url
        self.expanded.append(whole)
        answer = self._answer(body)
        return {**answer, "media_ids": [one for one, _ in ids]} if body.get("return_media_ids") else answer

    def events(self, body: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
        """Yield the same answer as a stream: ids come with the usage, and both only if they were requested."""
        head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        for word in self.text.split():
            delta = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            yield json.dumps({**head, "choices": [delta], **({"usage": None} if usage else {})})
        if usage:
            ids = {"media_ids": answer["media_ids"]} if "media_ids" in answer else {}
            yield json.dumps({**head, "choices": [], "usage": answer["usage"], **ids})
        yield "[DONE]"

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body.get("model", "m"),
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }


def expanded(body: Mapping[str, Any], media: Mapping[str, str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The request with media in the place of ids, in one spelling; and the id and the URL of each of its items."""
    ids: list[tuple[str, str]] = []

    def part_of(part: Any, where: str) -> Any:
        if isinstance(part, dict) and "input_audio" in part:
            audio = part["input_audio"]
            rest = {name: value for name, value in part.items() if name not in ("type", "input_audio")}
            url = f"data:audio/{audio['format']};base64,{audio['data']}"
            part = {"type": "audio_url", "audio_url": {"url": url}, **rest}
        name = next((one for one in _FIELDS if isinstance(part, dict) and one in part), None)
        if name is None:
            return part
        value = part[name] if isinstance(part[name], dict) else {"url": part[name]}
        value = dict(value)
        if (media_id := value.pop("file_id", None)) is not None:
            if media_id not in media:
                raise Rejection(404, "unknown_media", where)
            value["url"] = media[media_id]
        ids.append((f"file-{sha256(value['url'].encode()).hexdigest()}", value["url"]))
        return {**part, "type": name, name: value}

    messages = [
        {**message, "content": [part_of(part, f"messages.{at}.content.{on}") for on, part in enumerate(content)]}
        if isinstance(content := message.get("content"), list)
        else message
        for at, message in enumerate(body["messages"])
    ]
    return {**body, "messages": messages}, ids


@contextmanager
def serve_references(server: ReferenceServer | None = None) -> Iterator[ReferenceServer]:
    """Serve at a port of 127.0.0.1 while the context is entered."""
    server = server or ReferenceServer()

    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"reference_server": server}))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    reference_server: ReferenceServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.reference_server.received_bytes += len(content)
        body = json.loads(content)
        try:
            answer = self.reference_server.answer(body, self.headers.get("Authorization", ""))
        except Rejection as error:
            fault = {"message": error.code, "type": "invalid_request_error", "param": error.param}
            self._send(error.status, {"error": {**fault, "code": error.code}})
            return
        if not body.get("stream"):
            self._send(200, answer)
            return
        self._head(200, "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for event in self.reference_server.events(body, answer):
            self._write(f"data: {event}\n\n".encode())

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]})

    def _send(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self._head(status, "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)

    def _write(self, event: bytes) -> None:
        size = max(1, -(-len(event) // self.reference_server.pieces))
        for start in range(0, len(event), size):
            self.wfile.write(event[start : start + size])
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Log nothing."""
