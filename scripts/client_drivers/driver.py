"""What the drivers share: the requests, and the line that each of them prints. Needs nothing but Python.

A driver is run with the Python of its client: `ask_NAME.py URL MODEL FOLDER`. It makes each request with the unmodified
client, and prints what the client returned as a line of JSON.
"""

import base64
import json
import struct
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

TEXT = "Say hello to the people of Oslo."
QUESTION = "What is in the image?"
TOKENS = 12
LONG = 1000
"""Enough for what a grammar forces to end."""

CITIES = ["Oslo", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


class Server(NamedTuple):
    url: str
    model: str
    folder: str
    """Of the model, for clients that count tokens."""

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def server() -> Server:
    return Server(*sys.argv[1:4])


def png(side: int = 56) -> bytes:
    """A drawn image: a gradient."""
    lines = b"".join(b"\0" + bytes(value for x in range(side) for value in (x * 4, y * 4, 128)) for y in range(side))
    parts = (
        (b"IHDR", struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    )
    data = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + data


def png_base64() -> str:
    return base64.b64encode(png()).decode()


def data_url() -> str:
    return f"data:image/png;base64,{png_base64()}"


def pdf_base64() -> str:
    """Return a document of two pages, whose cross-reference table the reader has to make."""
    pages = b"".join(
        b"%d 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 60 %d]/Contents 5 0 R>>endobj\n" % (number, 40 + number)
        for number in (3, 4)
    )
    head = b"%PDF-1.7\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    head += b"2 0 obj<</Type/Pages/Count 2/Kids[3 0 R 4 0 R]>>endobj\n"
    drawn = b"5 0 obj<</Length 25>>stream\n1 0 0 rg 10 10 30 20 re f\nendstream endobj\n"
    return base64.b64encode(head + pages + drawn + b"trailer<</Root 1 0 R>>\n%%EOF").decode()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def image_parts() -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": data_url()}}, {"type": "text", "text": QUESTION}]


def tell(api: str, request: str, ask: Callable[[], Any]) -> None:
    """Make a request, and print what the client returned or raised."""
    line: dict[str, Any] = {"api": api, "request": request}
    try:
        line["answer"] = plain(ask())
    except Exception as error:  # noqa: BLE001  # whatever a client raises is its answer
        line["error"] = f"{type(error).__name__} {getattr(error, 'status_code', '')}: {error}"[:600]
        traceback.print_exc()
    print(json.dumps(line), flush=True)


def plain(value: Any) -> Any:
    """A client's objects as JSON."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(warnings=False))
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(part) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return {"type": type(value).__name__, **{n: plain(v) for n, v in vars(value).items() if not n.startswith("_")}}
