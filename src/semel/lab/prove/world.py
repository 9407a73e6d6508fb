"""The world of a run: a fleet with its keys, its links, its stores, and what its tenants have uploaded."""

from __future__ import annotations

import asyncio
import http.client
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp

from semel.errors import ServiceError
from semel.lab.prove.bare import begin_bare
from semel.lab.prove.images import ImageServer
from semel.lab.prove.plan import TENANTS
from semel.lab.prove.processes import (
    ENGINE_FLAGS,
    ENGINE_START_S,
    FEATURE_BYTES,
    ITEM_CACHE_GB,
    SEMEL,
    Fleet,
    Node,
)
from semel.lab.prove.relay import Relay, relaying
from semel.lab.prove.store import RedisStore, running_redis
from semel.lab.prove.without import command_without
from semel.settings.secrets import create_key

__all__ = ["Shape", "World", "post", "running_world", "upload"]

_RATE: Final = 400.0
_FEATURE_CACHE_GB: Final = 60 * FEATURE_BYTES / 2**30
_MEDIA_CACHE_GB: Final = "0.00001"
_TIER_GB: Final = "0.5"
_MODELLESS_START_S: Final = 90.0
_POLL_S: Final = 0.25
_API_SERVERS: Final = 2
_FILES: Final = 8
"""Images that each tenant uploads."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The processes of a fleet, and how they reach each other."""

    model: Path
    frontends: int = 3
    workers: int = 3
    transport: Literal["tcp", "ipc"] = "tcp"
    has_engines: bool = True
    engine_flags: tuple[str, ...] = ENGINE_FLAGS
    is_tiny: bool = True
    """Whether caches are so small that items are evicted."""

    without: str = ""
    """The protection that frontends lack."""

    is_bare: bool = False
    """Whether it is one server of vLLM's own, with two API servers."""


@dataclass(slots=True)
class World:
    """A fleet that runs, and all that faults can be made of."""

    shape: Shape
    fleet: Fleet
    keys: Mapping[str, str]
    """API keys by tenant."""

    home: Path
    store: RedisStore | None = None
    relays: dict[str, Relay] = field(default_factory=dict)
    """By the addresses at which workers listen."""

    @property
    def probe(self) -> str:
        """The path that says whether a frontend gets requests."""
        return "/health" if self.shape.is_bare else "/ready"

    @property
    def addresses(self) -> list[str]:
        """Where frontends reach the workers."""
        listening = dict.fromkeys(worker.address for worker in self.fleet.workers)
        return [self.relays[one].address if one in self.relays else one for one in listening]

    def begin_worker(self, address: str | None = None) -> Node:
        """Start a worker, at the address of one that has ended."""
        if not self.shape.has_engines:
            flags = ("--answers", "input", "--item-cache-gb", f"{ITEM_CACHE_GB:.9f}")
            return self.fleet.begin_modelless_worker(*flags, rate=_RATE, address=address)
        if self.shape.is_tiny:
            return self.fleet.begin_worker(address=address)
        return self.fleet.begin_worker(address=address, cache_gb=4.0)

    def begin_frontend(self) -> Node:
        """Start a frontend, or the server of bare vLLM."""
        if self.shape.is_bare:
            number = len(self.fleet.frontends)
            node = begin_bare(
                self.shape.model, self.home, self.shape.engine_flags, api_servers=_API_SERVERS, number=number
            )
            self.fleet.frontends.append(node)
            return node
        command = command_without(self.shape.without) if self.shape.without else SEMEL
        cache_gb = _FEATURE_CACHE_GB if self.shape.is_tiny else 1.0
        return self.fleet.begin_frontend(self.addresses, cache_gb=cache_gb, semel=command)

    def is_whole(self) -> bool:
        """Return whether every frontend that runs is connected to all workers; one that is stopped is left out."""
        try:
            return all(node.is_connected_to(self.shape.workers) for node in self.fleet.running_frontends)
        except (OSError, http.client.HTTPException):
            return False

    async def until_whole(self) -> None:
        """Wait until every frontend that runs is ready and connected to all workers."""
        async with asyncio.timeout(ENGINE_START_S if self.shape.has_engines else _MODELLESS_START_S):
            for node in self.fleet.running_frontends:
                while node.is_running and not await asyncio.to_thread(node.is_up, self.probe, timeout_s=2.0):  # noqa: ASYNC110 another process
                    await asyncio.sleep(_POLL_S)
            while not await asyncio.to_thread(self.is_whole):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def running_world(shape: Shape, images: ImageServer) -> AsyncIterator[World]:
    """A fleet, up and connected. All of it is ended at the end, whatever happens."""
    home = Path(tempfile.mkdtemp(prefix="semel-prove-"))
    try:
        async with AsyncExitStack() as stack:
            world = await asyncio.to_thread(_prepare, shape, home, images)
            if shape.is_bare:
                stack.callback(_end, world.fleet)
                world.begin_frontend()
                await world.until_whole()
                yield world
                return
            if shape.has_engines:
                world.store = stack.enter_context(running_redis(home))
                if world.store is not None:
                    world.fleet.worker_flags = ("--embedding-tier-gb", _TIER_GB, "--embedding-store", world.store.url)
            stack.callback(_end, world.fleet)
            for _ in range(shape.workers):
                worker = world.begin_worker()
                if shape.transport == "tcp":
                    world.relays[worker.address] = await stack.enter_async_context(relaying(worker.address))
            await asyncio.to_thread(world.fleet.until_up)
            for _ in range(shape.frontends):
                world.begin_frontend()
            await asyncio.to_thread(world.fleet.until_up)
            await world.until_whole()
            yield world
    finally:
        shutil.rmtree(home)


def _prepare(shape: Shape, home: Path, images: ImageServer) -> World:
    """Write the keys of a fleet, and say how its processes are started."""
    subprocess.run([*SEMEL, "key", "make", str(home / "keys")], check=True, capture_output=True)  # noqa: S603
    admin_key = secrets.token_hex(16)
    keys = {tenant: secrets.token_hex(16) for tenant in TENANTS}
    _write(home / "admin-key", admin_key)
    _write(home / "api-keys", "".join(f"{tenant} {key}\n" for tenant, key in keys.items()))
    port = images.url.rpartition(":")[2]
    flags = (
        *("--api-keys-file", str(home / "api-keys"), "--media-store", str(home / "media"), "--store-responses"),
        *("--allowed-media-domains", f"127.0.0.1:{port}", "--allow-media-http"),
        *("--allowed-media-networks", "127.0.0.0/8", "--drain-delay-s", "3"),
        *(("--media-cache-gb", _MEDIA_CACHE_GB) if shape.is_tiny else ()),
    )
    fleet = Fleet(
        shape.model,
        home,
        create_key(home / "key"),
        admin_key,
        transport=shape.transport,
        frontend_flags=flags,
        engine_flags=shape.engine_flags,
        key_dir=home / "keys",
    )
    return World(shape, fleet, keys, home)


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _end(fleet: Fleet) -> None:
    """End what runs; a process that does not end within its time is killed, and only its log says so."""
    running = [(node, node.family()) for node in fleet.running]
    for node, _ in running:
        node.process.terminate()
    for node, family in running:
        try:
            node.until_ended(family)
        except AssertionError:
            continue


async def upload(url: str, keys: Mapping[str, str], images: Sequence[bytes]) -> dict[tuple[str, int], str]:
    """Upload the first images for every tenant; the ids of their files."""
    found = {}
    async with aiohttp.ClientSession() as session:
        for tenant in TENANTS:
            for number, image in enumerate(images[:_FILES]):
                form = aiohttp.FormData({"purpose": "vision"})
                form.add_field("file", image, filename="image.png", content_type="image/png")
                headers = {"Authorization": f"Bearer {keys[tenant]}"}
                async with session.post(f"{url}/v1/files", data=form, headers=headers) as response:
                    if response.status != 200:
                        raise ServiceError(f"an upload was refused: {response.status} {await response.text()}")
                    found[tenant, number] = (await response.json())["id"]
    return found


async def post(
    session: aiohttp.ClientSession, url: str, path: str, body: Mapping[str, Any], key: str = ""
) -> Mapping[str, Any]:
    """Send a body that has to be answered; raises `ServiceError` if it is not."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with session.post(url + path, json=dict(body), headers=headers) as response:
        if response.status != 200:
            raise ServiceError(f"{path}: {response.status} {await response.text()}; sent {str(body)[:300]}")
        answer: Mapping[str, Any] = await response.json()
        return answer
