"""A bucket that speaks as much S3 as the media store needs, and takes two seconds to list anything.

`python -m tools.security.slow_bucket PORT` serves 127.0.0.1 until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from hashlib import md5
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from semel.lab.bench.ports import free_port
from tests.store.s3 import S3_VARIABLES

__all__ = ["slow_bucket"]

LISTING_S: Final = 2.0
_DATE: Final = "Wed, 01 Jan 2025 00:00:00 GMT"


@contextlib.contextmanager
def slow_bucket() -> Iterator[dict[str, str]]:
    """A bucket in a process of its own: the variables of a server that uses it."""
    port = free_port()
    process = subprocess.Popen(
        (sys.executable, "-m", "tools.security.slow_bucket", str(port)), stdin=subprocess.PIPE, close_fds=True
    )
    try:
        yield {**S3_VARIABLES, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait(10)


class Bucket:
    """Objects by path."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                status, more, answer = await self._answer(method, target, fields, body)
                length = more.pop("Content-Length", str(len(answer)))
                lines = [f"HTTP/1.1 {status} x", f"Content-Length: {length}", *(f"{k}: {v}" for k, v in more.items())]
                writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
                writer.write(answer)
                await writer.drain()
        writer.close()

    async def _answer(
        self, method: str, target: str, fields: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        url = urlsplit(target)
        path = unquote(url.path).lstrip("/").partition("/")[2]
        if method == "GET" and not path:
            await asyncio.sleep(LISTING_S)
            return 200, {"Content-Type": "application/xml"}, self._list(parse_qs(url.query).get("prefix", [""])[0])
        if method == "PUT":
            self._objects[path] = body
            return 200, _tags(body), b""
        if method == "POST":  # several are deleted
            keys = re.findall("<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self._objects.pop(unescape(key), None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return 200, {}, f"<DeleteResult>{deleted}</DeleteResult>".encode()
        if (data := self._objects.get(path)) is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        if method == "HEAD":
            return 200, {**_tags(data), "Content-Length": str(len(data))}, b""
        if (wanted := fields.get("range", "").removeprefix("bytes=")) == "":
            return 200, _tags(data), data
        start, _, last = wanted.partition("-")
        end = min(int(last or len(data)), len(data) - 1)
        return 206, {**_tags(data), "Content-Range": f"bytes {start}-{end}/{len(data)}"}, data[int(start) : end + 1]

    def _list(self, prefix: str) -> bytes:
        entries = (
            f"<Contents><Key>{escape(path)}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>x</ETag><Size>{len(data)}</Size></Contents>"
            for path, data in self._objects.items()
            if path.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>".encode()


def _tags(data: bytes) -> dict[str, str]:
    return {"ETag": f'"{md5(data[:64]).hexdigest()}"', "Last-Modified": _DATE}


async def main(port: int) -> None:
    """Serve until standard input is closed."""
    server = await asyncio.start_server(Bucket().serve, "127.0.0.1", port, backlog=4_096)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
