"""An API server of Kubernetes that knows nothing but EndpointSlices: lists in pages, watches, bookmarks, versions.

Real ones need a cluster. This one answers in the same shapes, forgets old versions as a real one does, and fails on
request: it breaks watches, refuses tokens, and sends what no API server should.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

__all__ = ["Pod", "SliceServer", "slice_of"]

_SERVICE: Final = "kubernetes.io/service-name"
_PATH: Final = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
_API: Final = "discovery.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Pod:
    """One endpoint, as Kubernetes' own controller describes it."""

    name: str
    address: str
    is_ready: bool = True
    is_terminating: bool = False

    def endpoint(self) -> dict[str, Any]:
        """Ready is what serves and does not end."""
        return {
            "addresses": [self.address],
            "conditions": {
                "ready": self.is_ready and not self.is_terminating,
                "serving": self.is_ready,
                "terminating": self.is_terminating,
            },
            "nodeName": "node-1",
            "targetRef": {"kind": "Pod", "namespace": "semel", "name": self.name, "uid": f"uid-{self.name}"},
            "zone": "zone-a",
        }


def slice_of(
    name: str, pods: Sequence[Pod], *, namespace: str = "semel", service: str = "workers", port: int = 9000
) -> dict[str, Any]:
    """Return an EndpointSlice; its version is the server's business."""
    is_ipv6 = any(":" in pod.address for pod in pods)
    return {
        "apiVersion": _API,
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {_SERVICE: service}},
        "addressType": "IPv6" if is_ipv6 else "IPv4",
        "endpoints": [pod.endpoint() for pod in pods],
        "ports": [{"name": "wire", "port": port, "protocol": "TCP"}],
    }


@dataclass
class SliceServer:
    """Slices, how they changed, and how the server fails."""

    token: str = "token"  # noqa: S105 nobody's
    page_slices: int = 500
    """At most so many slices in a page, whatever a client asks for."""

    version: int = 100
    lists: int = 0
    watches: int = 0
    bookmarks: bool = True
    """Whether a watch begins with a bookmark, which real ones send once a minute."""

    refusals: list[int] = field(default_factory=list)
    """Statuses with which the next calls are answered."""

    lines: list[bytes] = field(default_factory=list)
    """What the next watch sends as it is, before it ends."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    """All that was sent: lists, and events."""

    _slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    _events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    _oldest: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _cut: int = 0
    """How many times all watches were broken."""

    async def put(self, one: Mapping[str, Any]) -> None:
        """Make a slice, or change it."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self._slices else "ADDED"
        await self._record(kind, self._next_version_of(one))

    async def delete(self, name: str) -> None:
        """Delete a slice."""
        await self._record("DELETED", self._next_version_of(self._slices[name]))

    def compact(self) -> None:
        """Forget how slices changed up to now: a watch from before has to list anew."""
        self._events.clear()
        self._oldest = self.version

    def advance(self) -> None:
        """Let other objects of the cluster change: the version goes on."""
        self.version += 1

    async def cut(self) -> None:
        """Break all watches in the middle."""
        async with self._changed:
            self._cut += 1
            self._changed.notify_all()

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Serve on a free port of this machine; where."""
        app = web.Application()
        app.router.add_get(_PATH, self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{port}"
        finally:
            await self.cut()
            await runner.cleanup()

    def _next_version_of(self, one: Mapping[str, Any]) -> dict[str, Any]:
        self.version += 1
        return {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}

    async def _record(self, kind: str, one: dict[str, Any]) -> None:
        name = one["metadata"]["name"]
        self._slices.pop(name, None)
        if kind != "DELETED":
            self._slices[name] = one
        async with self._changed:
            self._events.append((self.version, kind, one))
            self._changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.refusals:
            return _status(self.refusals.pop(0))
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401)
        if request.query.get("watch") == "1":
            return await self._watch(request)
        return self._list(request)

    def _matching(self, request: web.Request) -> list[dict[str, Any]]:
        return [one for _, one in sorted(self._slices.items()) if _is_of(one, request)]

    def _list(self, request: web.Request) -> web.Response:
        self.lists += 1
        version, _, start = request.query.get("continue", f"{self.version}.0").partition(".")
        if int(version) < self._oldest:
            return _status(410)
        limit = min(self.page_slices, int(request.query.get("limit", self.page_slices)))
        found, begin = self._matching(request), int(start)
        metadata = {"resourceVersion": version}
        if begin + limit < len(found):
            metadata["continue"] = f"{version}.{begin + limit}"
        body = {
            "apiVersion": _API,
            "kind": "EndpointSliceList",
            "metadata": metadata,
            "items": found[begin : begin + limit],
        }
        self.answers.append(body)
        return web.json_response(body)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        cut, position = self._cut, int(request.query["resourceVersion"])
        deadline = asyncio.get_running_loop().time() + int(request.query.get("timeoutSeconds", "60"))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if self.lines:
            await response.write(b"".join(self.lines))
            self.lines.clear()
            return response
        if position < self._oldest:
            await self._send(response, "ERROR", _status_body(410))
            return response
        if self.bookmarks and request.query.get("allowWatchBookmarks") == "true":
            await self._send(response, "BOOKMARK", _bookmark(self.version if not self._after(position) else position))
        while asyncio.get_running_loop().time() < deadline:
            if self._cut != cut:
                if request.transport is not None:
                    request.transport.abort()
                return response
            for at, kind, one in self._after(position):
                position = at
                if _is_of(one, request):
                    await self._send(response, kind, one)
            async with self._changed:
                if self._cut == cut and not self._after(position):
                    await self._wait(deadline)
        return response

    async def _wait(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            return

    def _after(self, position: int) -> list[tuple[int, str, dict[str, Any]]]:
        return [event for event in self._events if event[0] > position]

    async def _send(self, response: web.StreamResponse, kind: str, one: dict[str, Any]) -> None:
        event = {"type": kind, "object": one}
        self.answers.append(event)
        await response.write(json.dumps(event).encode() + b"\n")


def _is_of(one: dict[str, Any], request: web.Request) -> bool:
    metadata, (label, _, value) = one["metadata"], request.query["labelSelector"].partition("=")
    found = metadata["namespace"], metadata["labels"].get(label)
    return found == (request.match_info["namespace"], value)


def _bookmark(version: int) -> dict[str, Any]:
    """As a real one: of a slice nothing but its version, and what no slice may leave out."""
    metadata = {"resourceVersion": str(version)}
    return {"apiVersion": _API, "kind": "EndpointSlice", "metadata": metadata, "addressType": "", "endpoints": None}


def _status_body(code: int) -> dict[str, Any]:
    reasons = {401: "Unauthorized", 403: "Forbidden", 410: "Expired"}
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": f"it is {reasons.get(code, 'broken')}",
        "reason": reasons.get(code, "InternalError"),
        "code": code,
    }


def _status(code: int) -> web.Response:
    return web.json_response(_status_body(code), status=code)
