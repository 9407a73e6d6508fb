"""An agent that looks at a screen, turn after turn, and sends each screenshot once.

    semel serve MODEL --media-store DIRECTORY
    python examples/screenshots.py --turns 10

Every turn sends the whole conversation, as OpenAI's API wants it. `semel.openai.client()` replaces the screenshots that
it has sent before by the ids that the server returned; nothing else in the agent knows of it. With `--plain` the agent
has an ordinary client: compare what is sent.
"""

from __future__ import annotations

import argparse
import base64
import random
import struct
import zlib
from typing import Any

import httpx
import openai

import semel.openai


def screenshot(turn: int, width: int = 320, height: int = 180) -> bytes:
    """A screen with some windows, as PNG."""
    chance = random.Random(turn)
    rows = [bytearray(chance.randbytes(3) * width) for _ in range(height)]
    for _ in range(8):
        left, top = chance.randrange(width - 40), chance.randrange(height - 30)
        for row in rows[top : top + 30]:
            row[3 * left : 3 * (left + 40)] = chance.randbytes(120)
    lines = b"".join(b"\0" + bytes(row) for row in rows)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


class Counting(httpx.BaseTransport):
    """Counts the bytes of requests on their way to the server."""

    def __init__(self) -> None:
        self.sent = 0
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        self.sent += int(request.headers.get("content-length", 0))
        return self._inner.handle_request(request)

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


def main() -> None:
    """Look and answer, turn after turn."""
    parser = argparse.ArgumentParser(description="An agent that looks at a screen.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--plain", action="store_true", help="send every screenshot with every turn")
    options = parser.parse_args()

    counting = Counting()
    http: Any = httpx.Client(transport=counting) if options.plain else semel.openai.client(transport=counting)
    agent = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key, http_client=http)
    model = agent.models.list().data[0].id
    messages: list[Any] = []
    for turn in range(1, options.turns + 1):
        url = f"data:image/png;base64,{base64.b64encode(screenshot(turn)).decode()}"
        look = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What do you do next?"}]
        messages.append({"role": "user", "content": look})
        before = counting.sent
        answer = agent.chat.completions.create(model=model, messages=messages, max_tokens=options.max_tokens)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        print(f"turn {turn}: {turn} screenshots in the conversation, {counting.sent - before:,} bytes sent")
    print(f"{counting.sent:,} bytes in all")


if __name__ == "__main__":
    main()
