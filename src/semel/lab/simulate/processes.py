"""The simulated processes of a fleet: shipped parts on a virtual loop, with modelled engines and preprocessing.

A worker is the shipped `WorkerListener` and `Worker`. A frontend is the shipped `Membership`, `Fleet`, links,
`Pipeline` with its cache and flights, and `submit_request`. Only HTTP, templates and tokens are left out, and charged
(`Costs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, Final, cast

from semel.cache import LruCache
from semel.core import (
    Contract,
    Digest,
    Feature,
    Item,
    Key,
    Layout,
    Media,
    Placeholder,
    Prompt,
    Target,
    Tenant,
    Tensor,
    Timeline,
)
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.fleet import Fleet
from semel.fleet.membership import Membership
from semel.fleet.retry_policy import FleetHealth
from semel.fleet.worker import RemoteWorker
from semel.frontend.execution import submit_request
from semel.frontend.service import ServedModel
from semel.lab.simulate.costs import Costs
from semel.lab.simulate.engine import EngineLimits, EngineModel
from semel.lab.simulate.network import Network
from semel.lab.simulate.repeats import Preprocessing
from semel.lab.simulate.served_engine import DIGEST_FIELD, ModelledEngine
from semel.lab.simulate.sockets import Addresses, VirtualClientSockets, VirtualServerSockets
from semel.lab.simulate.workload import Ask, digest_of
from semel.lab.simulate.workload import Item as Image
from semel.render import ParsedRequest, Pipeline
from semel.telemetry import Meter
from semel.wire.zmq import FrontendLink, WorkerListener
from semel.wire.zmq.address import transport_keys
from semel.worker.worker import Worker

__all__ = ["FleetSize", "FrontendProcess", "Host", "WorkerProcess"]

_KEY: Final = Key(bytes(range(32)))
_IMAGE_TOKEN: Final = 151_655
_MAX_TEXT_TOKEN: Final = 150_000
_ZEROS: Final = memoryview(bytes(256 << 20))
"""Pixels of all features: nobody writes them, so they take no memory."""

_FRONTEND_KEYS: Final = transport_keys(_KEY, "frontend")
_WORKER_KEYS: Final = transport_keys(_KEY, "worker")


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The number of processes, and the size of each."""

    frontends: int = 4
    workers: int = 3
    pool_processes: int = 4
    """Of each frontend, for preprocessing."""

    cache_bytes: int = 4 << 30
    """Of each frontend's feature cache."""

    engine: EngineLimits = field(default_factory=EngineLimits)

    @property
    def contract(self) -> Contract:
        """Of all engines."""
        return Contract(
            model="simulated",
            fingerprint="simulated",
            target=Target("float32"),
            fields={},
            max_items={"image": 1 << 15},
            max_embeds=self.engine.encoder_embeds,
            max_tokens=1 << 20,
            cache_bytes=self.engine.item_bytes,
        )


@dataclass(frozen=True, slots=True)
class Host:
    """The state that all simulated processes share."""

    size: FleetSize
    costs: Costs
    seed: int
    network: Network | None = None
    """None for real sockets."""

    addresses: Addresses = field(default_factory=Addresses)
    folder: str = "sim://"
    """Before the names of workers in their addresses."""

    def server_sockets(self) -> VirtualServerSockets | None:
        """For a worker."""
        return None if self.network is None else VirtualServerSockets(self.network, self.addresses)

    def client_sockets(self, frontend: str) -> VirtualClientSockets | None:
        """For a link of a frontend."""
        return None if self.network is None else VirtualClientSockets(self.network, self.addresses, frontend)

    def random(self, *names: object) -> Random:
        """Return a random source of its own for each."""
        return Random("/".join(map(str, (self.seed, *names))))


class WorkerProcess:
    """A worker at an address, as often as it is started."""

    def __init__(self, host: Host, address: str) -> None:
        self.address = address
        self.models: list[EngineModel] = []
        """Of all its engines, the last one is the present one."""

        self.submissions = 0
        """That engines before the present one took."""

        self.is_up = self.is_ending = False
        self._host = host

    async def start(self) -> None:
        """Begin with empty caches."""
        host = self._host
        contract = host.size.contract
        self.models.append(EngineModel(host.costs, host.size.engine))
        self.engine = ModelledEngine(contract, self.models[-1])
        self._sockets = sockets = host.server_sockets()
        self.listener = WorkerListener(
            self.address,
            key=_WORKER_KEYS,
            contract=contract,
            sockets=None if sockets is None else lambda: sockets,
            random=host.random(self.address, len(self.models)),
        )
        await self.listener.__aenter__()
        self.worker = Worker(self.engine, self.listener)
        self._task = asyncio.create_task(self.worker.run())
        self.is_up = True

    async def kill(self) -> None:
        """End it without a word."""
        self.is_up = False
        assert self._sockets is not None, "only simulated workers are killed"
        self._sockets.kill()
        await self._end()

    async def drain(self, within_s: float) -> None:
        """Let it answer what it has, and end it."""
        self.worker.leave()
        await self.worker.drain(within_s)
        self.is_up = False
        await self._end()

    async def close(self) -> None:
        """End it at once."""
        await self.drain(0.0)

    async def _end(self) -> None:
        self.engine.kill()
        self.submissions += self.engine.submissions
        self.engine.submissions = 0
        if not self._task.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.listener.__aexit__(None, None, None)


class FrontendProcess:
    """A frontend, as often as it is started."""

    def __init__(self, host: Host, name: str) -> None:
        self.name = name
        self.meters: list[Meter] = []
        self.preprocessings: list[Preprocessing] = []
        self.is_up = False
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self._images: dict[bytes, tuple[Digest, Image]] = {}
        self._requests: set[asyncio.Task[Any]] = set()

    async def start(self, addresses: Iterable[str]) -> None:
        """Link to the workers at these addresses."""
        host = self._host
        self.meters.append(Meter())
        self.cache = LruCache(host.size.cache_bytes, self._loop.time)
        self.fleet = Fleet(health=FleetHealth(meter=self.meters[-1], now=self._loop.time))
        self._pool = asyncio.Semaphore(host.size.pool_processes)
        self._sockets: list[VirtualClientSockets] = []
        self.pipeline = Pipeline(cast("Any", None), None, self._process, "simulated", _KEY, cache=self.cache)
        self._serving = ServedModel(self.fleet, host.size.contract, self.pipeline)
        self._rosters: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.members = Membership(self.fleet, self._connect)
        for address in addresses:
            await self.members.join(address)
        self._task = asyncio.create_task(self.members.run(self._lists()))
        self.is_up = True

    def follow(self, addresses: Iterable[str]) -> None:
        """Link to these workers from now on."""
        self._rosters.put_nowait(tuple(addresses))

    async def kill(self) -> None:
        """End it without a word; so end its requests."""
        self.is_up = False
        for sockets in self._sockets:
            sockets.kill()
        for task in list(self._requests):
            task.cancel()
        await self.close()

    async def close(self) -> None:
        """End its links."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.members.close()

    async def ask(self, ask: Ask, request_id: str, places: Sequence[int], on_token: Callable[[int], None]) -> None:
        """Send a request and read its answer; raises the error that the client gets."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            await self._answer(ask, request_id, places, on_token)
        finally:
            self._requests.discard(task)

    async def _answer(self, ask: Ask, request_id: str, places: Sequence[int], on_token: Callable[[int], None]) -> None:
        costs = self._host.costs
        await self._use(costs.parse_s + costs.digest_s * len(ask.items))
        items, media = [], {}
        for image in ask.items:
            data = f"{ask.tenant}/{image.key}".encode()
            digest = digest_of(ask.tenant, image.key)
            self._images[data] = digest, image
            items.append(Item("image", digest))
            media[digest] = Media("image", data)

        async def assemble(layouts: Sequence[Layout]) -> Prompt:
            await self._use(costs.render_s + costs.send_s)
            return _prompt(ask, items, places, layouts)

        stream, _ = await submit_request(
            self._serving,
            ParsedRequest(tuple(items), media, {}, assemble, ask.tenant),
            request_id=request_id,
            sampling={"max_tokens": ask.answer_tokens},
            tenant=Tenant(ask.tenant),
            opening=ConversationPrefix(ask.conversation.to_bytes(16, "big")),
        )
        try:
            async for output in stream:
                for token in output.token_ids:
                    on_token(token)
        finally:
            await stream.close()

    async def _process(self, media: Media, options: Mapping[str, object], **_: object) -> Feature:  # noqa: ARG002
        digest, image = self._images[media.data]
        began, is_announced = self._loop.time(), self.fleet.holding(digest) is not None
        async with self._pool:
            await asyncio.sleep(self._host.costs.process_s(image))
        made = Preprocessing(digest.hex(), self.name, began, self._loop.time(), is_announced)
        self.preprocessings.append(made)
        return _feature(digest, image)

    async def _use(self, seconds: float) -> None:
        """Use the one core that the process has."""
        now = self._loop.time()
        self._free_at = max(now, self._free_at) + seconds
        await asyncio.sleep(self._free_at - now)

    async def _lists(self) -> AsyncIterator[tuple[str, ...]]:
        while True:
            yield await self._rosters.get()

    @asynccontextmanager
    async def _connect(self, address: str) -> AsyncIterator[RemoteWorker]:
        host = self._host
        if (sockets := host.client_sockets(self.name)) is not None:
            self._sockets.append(sockets)
        random = host.random(self.name, address, len(self.meters))
        link = FrontendLink(address, key=_FRONTEND_KEYS, frontend_id=self.name, sockets=sockets, random=random)
        async with link:
            yield RemoteWorker(link, meter=self.meters[-1], on_forget=self.cache.clear)


@lru_cache(4096)
def _layout(tokens: int) -> Layout:
    return Layout([_IMAGE_TOKEN] * tokens)


def _feature(digest: Digest, image: Image) -> Feature:
    pixels = max(0, image.nbytes - Digest.size)
    tensors = {
        DIGEST_FIELD: Tensor("uint8", (Digest.size,), memoryview(bytes(digest))),
        "pixels": Tensor("uint8", (pixels,), _ZEROS[:pixels]),
    }
    return Feature("image", tensors, _layout(image.tokens))


def _prompt(ask: Ask, items: Sequence[Item], places: Sequence[int], layouts: Sequence[Layout]) -> Prompt:
    token_ids = [ask.conversation % _MAX_TEXT_TOKEN] * ask.prompt_tokens
    for place, layout in zip(places, layouts, strict=True):
        token_ids[place : place + len(layout)] = layout.token_ids
    pairs = zip(places, layouts, strict=True)
    timeline = Timeline.decoder(Placeholder(place, len(layout)) for place, layout in pairs)
    return Prompt(token_ids, timeline, tuple(items))
