"""The process of a frontend: HTTP, the links to its workers, its cache and its pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semel.cache import Cache, LayoutCache, LruCache, NoCache, SharedCache
from semel.compose.draining import drain, leave
from semel.compose.interpreter import tune_interpreter
from semel.compose.metrics_port import log_missing_metrics_port, metrics_server
from semel.compose.pipeline import check_trust, pipeline_of, tokenizer_calls, tokenizer_of
from semel.compose.reloading import follow_keys, reloaded_files
from semel.core import Contract, Digest, Modality, Rendering
from semel.frontend.budget import Budget
from semel.key_files import ProcessKeys, process_keys
from semel.media.fetch.fetch import Fetcher, FetchOptions
from semel.processing import Pool, find_folder
from semel.processing.folder import find_tokenizer
from semel.processing.pool.fork_server import ForkServer
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.process import PoolProcess
from semel.render import Pipeline, warm_up
from semel.render.documents import Documents
from semel.render.file_sources import FileSources
from semel.settings.environment import kubernetes_api, trace_collector
from semel.settings.frontend import CacheKind, DiscoverySettings, FrontendSettings
from semel.settings.secrets import read_api_keys
from semel.shutdown import ShutdownSignal
from semel.sizing import usable_cores
from semel.store.bindings import BucketBindings, open_bindings
from semel.store.records import SealedRecords, open_records
from semel.store.responses import open_responses
from semel.store.store import MediaStore, open_store
from semel.telemetry import metrics
from semel.telemetry.lag import LoopLag
from semel.telemetry.logs import log_samples
from semel.telemetry.lookups import CacheLookups
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.request_context import traced
from semel.telemetry.tracing import start_tracing
from semel.wire.zmq import FrontendLink, LoopBudget, link_context

if TYPE_CHECKING:
    import zmq

    from semel.fleet.compatibility import Difference
    from semel.fleet.discovery import AddressSource, WorkerDirectory
    from semel.fleet.fleet import Fleet
    from semel.fleet.membership import Membership
    from semel.fleet.worker import RemoteWorker
    from semel.frontend.service import FrontendState

__all__ = ["create_cache", "keep_serving", "run_frontend"]

_MAX_FILES: Final = 65_536

logger = logging.getLogger(__name__)


def create_cache(kind: CacheKind, capacity_bytes: int) -> Cache:
    """Create a frontend's feature cache; without any bytes there is none, and everything works without reuse."""
    if capacity_bytes <= 0:
        return NoCache()
    return SharedCache.create(capacity_bytes) if kind == "shared" else LruCache(capacity_bytes)


async def run_frontend(settings: FrontendSettings) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM. Settings that make no sense are refused with their flags' names."""
    from semel.frontend.app import create_app
    from semel.frontend.middleware.authentication import PROBES
    from semel.frontend.middleware.concurrency import RequestLimiter
    from semel.frontend.service import FrontendState
    from semel.web.host_check import RootPath, allowed_hosts_at
    from semel.web.server import HttpServer

    serving = settings.serving
    keys = process_keys(settings.key_file, settings.key_dir, "frontend")
    stored_files, _, responses = serving.media_stores()
    sources, fetching = _address_sources(settings.discovery), FetchOptions.of(serving.fetch)
    api_keys, tls = read_api_keys(serving.keys), serving.tls.context()
    collector = trace_collector(serving.logs.otlp_traces_endpoint)
    _raise_file_limit()
    limiter = RequestLimiter(serving.concurrency)
    service = FrontendState(
        body=serving.body,
        budget=Budget(serving.budget),
        refusals=serving.refusals,
        unknown_fields_mode=serving.unknown_fields,
        limiter=limiter,
        priority_tenants=frozenset(serving.keys.priority_tenants),
        adapter_tenants=serving.keys.tenants_by_adapter(),
        metrics_per_tenant=serving.metrics_per_tenant,
        max_file_bytes=serving.fetch.limits.max_bytes,
        cell=serving.cell.name,
        media_store=(store := open_store(stored_files, keys.hashing)),
        response_records=open_records(responses, keys.hashing),
    )
    tracing = start_tracing(collector, "semel-frontend", serving.cell.name)
    cache = create_cache(serving.cache.kind, serving.cache.capacity_bytes)
    bindings = open_bindings(serving.media_store, keys.hashing)
    parts = _Parts(settings, keys, cache, FileSources.of(store, bindings), sources, fetching)
    log_requests = not serving.disable_access_log
    hosts = allowed_hosts_at(serving.server.host, serving.peers.allowed_hosts, has_keys=bool(api_keys))
    app = create_app(
        service,
        parts.meter,
        api_keys,
        tracing=tracing,
        log_requests=log_requests,
        cors=serving.cors,
        allowed_hosts=hosts,
    )
    count = partial(parts.meter.count, metrics.REFUSALS)
    limits = replace(serving.connections, headers_s=serving.body.max_s, stall_s=serving.body.max_s)
    root_path = (serving.server.root_path or "").strip("/")
    server = HttpServer(
        RootPath(app, root_path) if root_path else app,
        serving.server.host,
        serving.server.port,
        limits,
        count,
        probes=PROBES,
        proxies=serving.peers.proxies,
        tls=tls,
    )
    parts.meter.watch(server.samples)
    parts.meter.watch(tracing.samples)
    parts.meter.watch(log_samples)
    if service.cell is not None:
        parts.meter.set(metrics.CELL_INFO, 1, service.cell)
    parts.meter.watch(parts.lookups.samples)
    parts.meter.watch(partial(_cache_samples, parts.cache))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(tracing.close)
        stack.callback(parts.cache.close)
        stack.callback(LoopLag(parts.meter).close)
        if store is not None:
            parts.meter.watch(store.samples)
        parts.meter.watch(parts.files.samples)
        _keep(stack, store, bindings, service.response_records)
        log_missing_metrics_port(serving, api_keys)
        if serving.metrics_port is not None:
            await stack.enter_async_context(metrics_server(serving, parts.meter, lambda: service.reason).running())
        for files in reloaded_files(serving, api_keys, server, parts.meter):
            stack.callback(asyncio.create_task(files.run()).cancel)
        fleet, keep_linked = await parts.link(stack)
        running = asyncio.create_task(server.serve())
        linking = asyncio.create_task(keep_linked())
        following = asyncio.create_task(parts.follow(fleet, service))
        telling = asyncio.create_task(parts.lookups.log_lines())
        stopping = ShutdownSignal.listening()
        if await stopping.wait(running, linking, following):
            await leave(service, server, stopping, settings.drain_delay_s)
            await drain(service, server, stopping, serving.server.drain_s)
        else:
            service.drain("the frontend has failed")
        server.stop(at_once=bool(service.limiter.requests))
        following.cancel()
        telling.cancel()
        ended = await asyncio.gather(running, following, return_exceptions=True)
        linking.cancel()
        for result in (*ended, *await asyncio.gather(linking, return_exceptions=True)):
            if isinstance(result, Exception):
                raise result


def _keep(stack: contextlib.AsyncExitStack, *stores: MediaStore | BucketBindings | SealedRecords | None) -> None:
    """Let stores keep to their bounds, until the stack is left."""
    for store in stores:
        if store is not None:
            stack.callback(asyncio.create_task(store.run()).cancel)


def _raise_file_limit() -> None:
    """Raise the limit of open files: every connection takes one, and the soft limit is often only 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_MAX_FILES, hard) if hard != resource.RLIM_INFINITY else _MAX_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The parts that the links, the pool and the pipeline of one frontend share."""

    settings: FrontendSettings
    keys: ProcessKeys
    cache: Cache
    files: FileSources = field(default_factory=FileSources)
    sources: Sequence[AddressSource] = ()
    """Name workers besides those of the settings, and may name others later."""

    fetching: FetchOptions = field(default_factory=FetchOptions)
    layouts: LayoutCache[Digest] = field(default_factory=LayoutCache)
    lookups: CacheLookups = field(default_factory=CacheLookups)
    meter: Meter = field(default_factory=Meter)

    @property
    def processes(self) -> int:
        """The number of processes of the pool."""
        processes = self.settings.serving.preprocessing.processes
        return usable_cores() if processes is None else processes

    @property
    def memory(self) -> SharedCache | None:
        """The cache, if other processes can share it."""
        return self.cache if isinstance(self.cache, SharedCache) else None

    async def link(self, stack: contextlib.AsyncExitStack) -> tuple[Fleet, Callable[[], Coroutine[None, None, None]]]:
        """Connect to every worker, until the stack is left; and a call that keeps to the roster from then on."""
        from semel.fleet.discovery import WorkerDirectory
        from semel.fleet.fleet import Fleet, fleet_samples
        from semel.fleet.membership import Membership
        from semel.fleet.retry_policy import FleetHealth

        fleet = Fleet(
            health=FleetHealth(self.settings.ejection, meter=self.meter), cell=self.settings.serving.cell.name
        )
        roster = WorkerDirectory(self.settings.discovery.workers, self.sources)
        context = await stack.enter_async_context(link_context())
        connect, transport = partial(self._connect, context, LoopBudget()), self.keys.transport
        members = Membership(fleet, connect, renew=partial(connect, newest_only=True), keys=transport.keys)
        stack.push_async_callback(members.close)
        stack.callback(asyncio.create_task(follow_keys(transport, members.replace_keys, self.meter)).cancel)
        for address in await roster.open():
            await members.join(address)
        per_worker = not self.settings.serving.disable_metrics_per_worker
        self.meter.watch(partial(fleet_samples, fleet, per_worker=per_worker))
        for metric in (metrics.FEATURES_REPAIRED, metrics.WORKER_EJECTIONS):  # a rate needs a zero to begin with
            self.meter.count(metric, amount=0)
        return fleet, partial(_keep_linked, members, roster)

    @contextlib.asynccontextmanager
    async def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], budget: LoopBudget, address: str, *, newest_only: bool = False
    ) -> AsyncIterator[RemoteWorker]:
        from semel.fleet.worker import RemoteWorker

        name, keys = f"{socket.gethostname()}-{os.getpid()}", self.keys.transport.keys
        async with FrontendLink(
            address, key=keys, frontend_id=name, newest_only=newest_only, context=context, budget=budget
        ) as link:
            yield RemoteWorker(link, memory=self.memory, lookups=self.lookups, meter=self.meter, on_forget=self._forget)

    async def follow(self, fleet: Fleet, service: FrontendState) -> None:
        """Serve while there is a worker whose contract we can keep, and say why not while there is none."""
        found = find_folder(self.settings.model)  # what is no model is refused at once
        async with contextlib.AsyncExitStack() as stack:
            fork_server = ForkServer(found)
            stack.push_async_callback(fork_server.close)
            preparing = self._prepare(stack, fork_server)
            contract = await _first_contract(fleet, service)
            rendering = contract.target.rendering
            check_trust(rendering, trust_remote_code=self.settings.serving.preprocessing.trust_remote_code)
            folder = await asyncio.to_thread(find_folder, self.settings.model, rendering)
            await asyncio.to_thread(find_tokenizer, folder, rendering)  # pool processes have no token of the hub
            service.suspend("the model's processor is being loaded")
            pool = await self._start_pool(stack, folder, contract, fork_server, await preparing)
            service.watch_pool(lambda: pool.refusal)
            pipeline = self._pipeline(folder, rendering, pool, fleet, self._fetcher(stack), contract.max_tokens)
            service.suspend("the model's processor is being warmed up")
            await warm_up(pipeline, contract.max_items, processes=len(pool.pids))
            pool.forget_warm_up()
            if self.memory is not None:
                self.memory.give_back_memory()
            fleet.admit(partial(_mismatch, pool))
            await keep_serving(fleet, service, pipeline)

    def _prepare(self, stack: contextlib.AsyncExitStack, fork_server: ForkServer) -> asyncio.Task[list[PoolProcess]]:
        """Start processes while the engine loads: what to load, a worker's contract tells."""
        stages = self.memory is not None
        max_memory_bytes = self.settings.serving.preprocessing.limits.max_memory_bytes
        prepared: list[PoolProcess] = []
        stack.push_async_callback(_end_all, prepared)

        async def prepare() -> list[PoolProcess]:
            for _ in range(self.processes):  # what was started is ended, also if the next cannot start
                spawning = PoolProcess.spawn(
                    max_memory_bytes, fork_server=fork_server, stages=stages, in_background=True, probes=True
                )
                prepared.append(await spawning)
            return prepared

        preparing = asyncio.create_task(prepare())
        stack.push_async_callback(_cancel, preparing)
        return preparing

    async def _start_pool(
        self,
        stack: contextlib.AsyncExitStack,
        folder: Path,
        contract: Contract,
        fork_server: ForkServer,
        prepared: list[PoolProcess],
    ) -> Pool:
        preprocessing = self.settings.serving.preprocessing
        ready, prepared[:] = tuple(prepared), ()  # they are the pool's from now on, also if it cannot start
        pool = await Pool.start(
            folder,
            contract.target,
            processes=self.processes,
            limits=self.settings.serving.decode,
            timeout_s=preprocessing.limits.timeout_s,
            max_memory_bytes=preprocessing.limits.max_memory_bytes,
            memory=self.memory,
            offers=OfferLimits(max_tokens=contract.max_tokens),
            processor=preprocessing.processor,
            prepared=ready,
            fork_server=fork_server,
            probes=True,
            requires_sandbox=preprocessing.require_sandbox,
        )
        stack.push_async_callback(pool.close)
        self.meter.watch(partial(_pool_samples, pool))
        tune_interpreter()
        return pool

    def _fetcher(self, stack: contextlib.AsyncExitStack) -> Fetcher:
        policy, (_, stored, _) = self.fetching.policy, self.settings.serving.media_stores()
        scope = repr((policy.allowed_domains, policy.allow_http, policy.allowed_networks)).encode()
        responses = open_responses(stored, self.keys.hashing, scope, self.fetching.limits.max_bytes)
        if responses is not None:
            stack.callback(asyncio.create_task(responses.run()).cancel)
        fetcher = Fetcher(self.fetching, responses=responses)
        stack.push_async_callback(fetcher.close)
        self.meter.watch(fetcher.samples)
        return fetcher

    def _pipeline(
        self, folder: Path, rendering: Rendering, pool: Pool, fleet: Fleet, fetcher: Fetcher, max_tokens: int
    ) -> Pipeline:
        serving, timings = self.settings.serving, partial(self.meter.observe, metrics.STAGE_SECONDS)
        described, template, content_format = (
            pool.description,
            serving.server.chat_template,
            serving.server.content_format,
        )
        tokenizer = tokenizer_of(folder, rendering, described, *tokenizer_calls(pool))
        pipeline = replace(
            pipeline_of(
                folder, rendering, pool.process, described, self.keys.hashing, template, tokenizer, content_format
            ),
            cache=self.cache,
            lookups=partial(self._count, fleet),
            layouts=self.layouts,
            max_tokens=max_tokens,
            process_apart=partial(pool.process, apart=True),
            lay_out=pool.lay_out,
            apply=pool.assemble,
            cut=pool.cut,
            fetch=fetcher.fetch,
            files=self.files,
            documents=Documents(pool.count_pages, serving.documents),
            timings=timings if serving.logs.otlp_traces_endpoint is None else traced(timings),
        )
        self.meter.watch(partial(_flight_samples, pipeline))
        return pipeline

    def _forget(self) -> None:
        self.cache.clear()
        self.layouts.clear()

    def _count(self, fleet: Fleet, modality: Modality, count: int, hit: bool) -> None:
        """Count a lookup in the processor's tier; nothing moves while nothing is cached anywhere (D8)."""
        contract = fleet.contract
        if contract is not None and (self.cache.capacity or contract.cache_bytes):
            self.lookups.count(contract.model, modality, "processor", count, hit)


def _address_sources(settings: DiscoverySettings) -> tuple[AddressSource, ...]:
    """Return the sources of worker addresses that the flags name: a file, names in DNS, services of Kubernetes."""
    from semel.fleet.discovery import sources_of
    from semel.fleet.endpoint_slices import ServicePort
    from semel.fleet.slice_watch import SliceSource

    services = tuple(map(ServicePort.parse, settings.workers_slices))
    api = kubernetes_api() if services else None
    slices = (SliceSource(service, api) for service in services if api is not None)
    return (*sources_of(settings.workers_file, settings.workers_dns, settings.workers_dns_s), *slices)


async def _keep_linked(members: Membership, directory: WorkerDirectory) -> None:
    """Follow the lists of workers while the sources keep them up to date."""
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(directory.watch())
        await members.run(directory.lists())
        watching.cancel()


async def _first_contract(fleet: Fleet, service: FrontendState) -> Contract:
    """Wait for the first worker."""
    while True:
        await fleet.changed()
        if (contract := fleet.contract) is not None:
            return contract
        service.suspend(fleet.reason)


async def keep_serving(fleet: Fleet, service: FrontendState, pipeline: Pipeline) -> None:
    """Serve whenever there is a worker, and log how many there are when that changes."""
    from semel.frontend.service import ServedModel

    counts = 0, 0
    while True:
        await fleet.changed()
        before, counts = counts, (len(fleet.serving), len(fleet.workers))
        if (contract := fleet.contract) is None:
            service.suspend(fleet.reason)
            continue
        service.begin(ServedModel(fleet, contract, pipeline))
        if counts != before:
            logger.info("serving %s with %d of %d workers", contract.model, *counts)


async def _cancel(task: asyncio.Task[list[PoolProcess]]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _end_all(processes: list[PoolProcess]) -> None:
    for process in processes:
        await process.end(within_s=0)
        await process.release()


def _cache_samples(cache: Cache) -> Iterator[Sample]:
    tier = ("processor",)
    yield metrics.MM_CACHE_ITEMS, len(cache), tier
    yield metrics.MM_CACHE_BYTES, cache.nbytes, tier
    yield metrics.MM_CACHE_CAPACITY, cache.capacity, tier
    yield metrics.MM_CACHE_EVICTIONS, cache.evictions, tier
    if isinstance(cache, SharedCache):
        yield metrics.LEASES, cache.leases, ()


def _flight_samples(pipeline: Pipeline) -> Iterator[Sample]:
    yield metrics.FLIGHTS_JOINED, pipeline.flight.joined, ()


def _pool_samples(pool: Pool) -> Iterator[Sample]:
    yield metrics.POOL_WAITING, sum(pool.waiting.values()), ()
    yield metrics.POOL_BUSY, pool.busy, ()
    yield metrics.POOL_PROCESSES, len(pool.pids), ()
    for layer, count in pool.sandboxed.items():
        yield metrics.POOL_SANDBOXED, count, (layer,)
    yield metrics.POOL_DECODED, pool.decoded, ()
    yield metrics.POOL_PROCESSED, pool.processed, ()
    yield metrics.POOL_ASSEMBLED, pool.assembled, ()
    yield metrics.POOL_FAILED, pool.failed, ()
    yield metrics.POOL_REPLACED, pool.replaced, ()


def _mismatch(pool: Pool, contract: Contract) -> Difference | None:
    from semel.fleet.compatibility import processing_difference

    ours = pool.description
    if contract.fingerprint == ours.fingerprint:
        return None
    return processing_difference((ours.fingerprint, ours.probes), (contract.fingerprint, contract.probes))
