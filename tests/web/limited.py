"""A server in a process of its own with few open files: as it is shipped, or without a limit on its connections.

`python -m tests.web.limited PORT FILES shipped|naive [CERTIFICATE KEY]`
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.telemetry import Meter
from semel.web import server as web_server
from semel.web.admission import Admission
from semel.web.limits import ConnectionLimits
from semel.web.server import HttpServer, operator_routes
from semel.web.tls import TlsSettings


async def wait(_: Request) -> Response:
    await asyncio.sleep(600)
    return Response()


async def hello(_: Request) -> Response:
    return Response("hello")


def main(port: str, files: str, kind: str, *pems: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
    meter = Meter()
    app = Starlette(routes=[*operator_routes(meter, str), Route("/wait", wait), Route("/hello", hello)])
    if kind == "naive":
        module: Any = web_server
        module.admission_of = lambda _: Admission(sys.maxsize, reserve=0)
    tls = TlsSettings(Path(pems[0]), Path(pems[1])).context() if pems else None

    async def serve() -> None:
        server = HttpServer(app, "127.0.0.1", int(port), ConnectionLimits(first_s=60), tls=tls)
        meter.watch(server.samples)
        await server.serve()

    uvloop.run(serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
