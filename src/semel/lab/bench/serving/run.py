"""A complete run: both servers are started, or are running elsewhere, and the scenarios run in order."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from semel.errors import ConfigError
from semel.lab.bench.ports import free_port
from semel.lab.bench.report import describe_machine
from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Effort, Side, Tell
from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.figures import Row, with_door
from semel.lab.bench.serving.floor import Floor, engine_in_process
from semel.lab.bench.serving.images import Images
from semel.lab.bench.serving.report import ServeReport
from semel.lab.bench.serving.scenarios.again import again, again_next_to_engine
from semel.lab.bench.serving.scenarios.agent import agent, agent_next_to_engine
from semel.lab.bench.serving.scenarios.answers import answers
from semel.lab.bench.serving.scenarios.document_pages import pages
from semel.lab.bench.serving.scenarios.evicted import COMMON_FLAGS, SEMEL_FLAGS, evicted
from semel.lab.bench.serving.scenarios.frontends import frontends
from semel.lab.bench.serving.scenarios.latency import conversation, new, repeats, text
from semel.lab.bench.serving.scenarios.memory import memory
from semel.lab.bench.serving.scenarios.mixed_load import mixed
from semel.lab.bench.serving.scenarios.rendering import generate, render
from semel.lab.bench.serving.scenarios.restart import restart, restart_flags, running_store
from semel.lab.bench.serving.scenarios.rollouts import rollouts
from semel.lab.bench.serving.scenarios.saturation import saturation
from semel.lab.bench.serving.scenarios.sources import sources
from semel.lab.bench.serving.scenarios.video import video
from semel.lab.bench.serving.servers import Launch, Server, door_server, semel_server, vllm_server
from semel.vllm_plugin.levels import parse_levels

__all__ = [
    "SCENARIOS",
    "Options",
    "Running",
    "Scenario",
    "Transport",
    "make_launch",
    "measure",
    "run",
    "running",
    "running_semel",
]

Transport = Literal["ipc", "tcp"]
Scenario = Callable[[Bench], Awaitable[list[Row]]]

SCENARIOS: Final[dict[str, Scenario]] = {
    "text": text,
    "answers": answers,
    "new": new,
    "again": again,
    "conversation": conversation,
    "agent": agent,
    "repeats": repeats,
    "rollouts": rollouts,
    "pages": pages,
    "video": video,
    "evicted": evicted,
    "generate": generate,
    "render": render,
    "mixed": mixed,
    "saturation": saturation,
    "memory": memory,
    "frontends": frontends,
    "restart": restart,
}
"""In the order in which they run."""

_BY_NAME: Final = ("evicted", "restart")
"""Those that run only if they are named: semel's side has an embedding tier then, for all scenarios of the run."""

_WITH_SOURCE: Final[dict[str, Scenario]] = {"sources": sources}
"""What runs with `--semel-source`, and nothing else."""

_NEXT_TO_ENGINE: Final[Mapping[str, Callable[[Bench, Client, Floor], Awaitable[list[Row]]]]] = {
    "again": again_next_to_engine,
    "agent": agent_next_to_engine,
}
"""What a scenario also measures next to vLLM's engine in process, when vLLM's server has ended."""

_AFTER_VLLM: Final = ("frontends",)
"""Scenarios that start vLLM's server in another way, when the first has ended: at most two engines run at a time."""

_WITH_DOOR: Final = ("text", "new", "again", "agent", "rollouts", "render", "mixed")
"""What `--door` also measures with vLLM's server with semel inside, in turns with bare vLLM."""

_MAX_PIXELS: Final = 28 * 28 * 2_700  # so that an image of 1920×1080 is not scaled down: 2,691 tokens
_TINY_FLAGS: Final = (
    *("--enforce-eager", "--dtype", "float32", "--seed", "0"),
    *("--max-model-len", "16384", "--max-num-batched-tokens", "8192"),
)
_TINY_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
_TINY_SCREENS: Final = {"max_pixels": 28 * 28 * 256}  # 252 tokens: the context has room for 50 screens
_BUILD_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `semel bench serve`."""

    model: str | None = None
    """The model of both sides; without one, a tiny model is made."""

    flags: tuple[str, ...] = ()
    """The engine's flags for both sides."""

    baseline: str | None = None
    """The URL of a running vLLM server."""

    semel: str | None = None
    """The URL of a running semel server."""

    api_key: str | None = None
    """The API key for both."""

    only: tuple[str, ...] = ()
    quick: bool = False
    transport: Transport = "ipc"
    """Between semel's frontend and its worker."""

    source: Path | None = None
    """Another checkout of semel, with its `.venv`: it is measured in the place of bare vLLM."""

    door: str = ""
    """The levels of semel inside a third server, which is vLLM's own; empty without one."""

    def __post_init__(self) -> None:
        """Refuse a checkout that is not installed and levels that there are not, before a model is made for them."""
        if self.door:
            _check_levels(self.door)
        if self.door and (self.baseline is not None or self.source is not None):
            raise ConfigError("--door starts three servers: leave out --baseline, --semel and --semel-source")
        if self.source is not None and not self.source_python.exists():
            raise ConfigError(
                f"--semel-source {self.source}: there is no {self.source_python}; run scripts/install there"
            )

    def scenarios(self) -> list[str]:
        """Return the scenarios that run, in their order."""
        if self.source is not None:
            return list(_WITH_SOURCE)
        unknown = [name for name in self.only if name not in SCENARIOS]
        if unknown:
            raise ConfigError(f"--only {unknown[0]}: there is no such scenario; choose from {', '.join(SCENARIOS)}")
        return [name for name in SCENARIOS if name in (self.only or SCENARIOS.keys() - set(_BY_NAME))]

    @property
    def source_python(self) -> Path:
        """The interpreter of the other checkout."""
        assert self.source is not None
        return self.source / ".venv" / "bin" / "python"

    def are_elsewhere(self) -> bool:
        """Return whether both servers are running elsewhere; naming only one of them is an error."""
        if (self.baseline is None) != (self.semel is None):
            raise ConfigError("--baseline and --semel go together: both servers run already, or both are started here")
        if self.semel is not None and self.transport != "ipc":
            raise ConfigError(f"--transport {self.transport} is for a semel that is started here; leave out --semel")
        return self.baseline is not None


def _check_levels(setting: str) -> None:
    try:
        is_shut = not parse_levels(setting)
    except ValueError as error:
        raise ConfigError(f"--door: {error}") from None
    if is_shut:
        raise ConfigError(f"--door: SEMEL={setting} names no level; set 1, or leave it out")


@dataclass(frozen=True, slots=True)
class Running:
    """Both servers, ready, and what a scenario needs of them."""

    bench: Bench
    end_vllm: Callable[[], Awaitable[None]]
    """Ends vLLM's server, if it was started here."""

    door: Bench | None = None
    """The same with vLLM's server with semel inside, in semel's place."""


@asynccontextmanager
async def running(options: Options, names: Sequence[str], tell: Tell) -> AsyncIterator[Running]:
    """Both servers as long as the block runs: started here for these scenarios, or running elsewhere."""
    with tempfile.TemporaryDirectory(prefix="semel-bench-", ignore_cleanup_errors=True) as scratch:
        async with AsyncExitStack() as outer, AsyncExitStack() as inner:
            launch = None if options.are_elsewhere() else await make_launch(options, Path(scratch), outer, tell)
            tell("starting the servers", 0, 1)
            servers = await _servers(options, launch, outer, inner, names)
            sides = await _clients(options, servers, inner)
            bench = Bench(sides, launch, Images(secrets.randbits(32)), Effort.of(quick=options.quick), tell)
            door = None
            if options.door and launch is not None:
                tell("starting vLLM's server with the door", 0, 1)
                server = await inner.enter_async_context(door_server(launch, options.door))
                client = await inner.enter_async_context(Client(server.url, api_key=options.api_key))
                side = Side(server, client, levels=options.door)
                door = replace(bench, sides=Pair(side, sides.vllm))
            yield Running(bench, inner.aclose, door)


@asynccontextmanager
async def running_semel(options: Options, own_flags: Sequence[str], tell: Tell) -> AsyncIterator[Server]:
    """semel's server alone, started here with these flags of its own."""
    with tempfile.TemporaryDirectory(prefix="semel-bench-", ignore_cleanup_errors=True) as scratch:
        async with AsyncExitStack() as stack:
            launch = await make_launch(options, Path(scratch), stack, tell)
            tell("starting the server", 0, 1)
            launch = replace(launch, semel_flags=(*launch.semel_flags, *own_flags))
            yield await stack.enter_async_context(semel_server(launch))


async def run(options: Options, tell: Tell) -> ServeReport:
    """Measure; `tell` shows the progress."""
    names = options.scenarios()
    async with running(options, names, tell) as servers:
        rows = await measure(servers, names)
    bench = servers.bench
    return ServeReport(describe_machine(), _describe(options, bench.launch, bench.images.seed, names), tuple(rows))


async def measure(servers: Running, names: Sequence[str], *, has_engine: bool = True) -> list[Row]:
    """Return the rows of these scenarios. Those that need another engine come last, when vLLM's server has ended.

    Without `has_engine`, none is measured next to the engine in process.
    """
    rows: list[Row] = []
    for name in names:
        if name in _AFTER_VLLM:
            continue
        scenario = (SCENARIOS | _WITH_SOURCE)[name]
        found = await scenario(servers.bench)
        if servers.door is not None and name in _WITH_DOOR:
            found = with_door(found, await scenario(servers.door))
        rows += found
    launch = servers.bench.launch
    next_to_engine = [_NEXT_TO_ENGINE[name] for name in names if has_engine and name in _NEXT_TO_ENGINE]
    later = [SCENARIOS[name] for name in names if name in _AFTER_VLLM]
    if launch is not None and (next_to_engine or later):
        await servers.end_vllm()
    if launch is not None and next_to_engine:
        servers.bench.tell("starting vLLM's engine in process", 0, 1)
        async with engine_in_process(launch) as floor, Client(servers.bench.sides.semel.server.url) as client:
            for compare in next_to_engine:
                rows += await compare(servers.bench, client, floor)
    for scenario in later:
        rows += await scenario(servers.bench)
    return rows


async def _servers(
    options: Options, launch: Launch | None, outer: AsyncExitStack, inner: AsyncExitStack, names: Sequence[str]
) -> Pair[Server]:
    """Both servers, ready. vLLM's ends with the inner stack, semel's with the outer one."""
    if launch is None:
        assert options.semel is not None
        assert options.baseline is not None
        return Pair(Server((options.semel,)), Server((options.baseline,)))
    try:
        async with asyncio.TaskGroup() as starting:
            mine = starting.create_task(outer.enter_async_context(semel_server(launch)))
            if names == ["frontends"]:
                return Pair(await mine, await mine)  # this scenario starts vLLM in another way
            theirs = starting.create_task(inner.enter_async_context(_other(options, launch)))
    except* ConfigError as errors:
        raise errors.exceptions[0] from None
    return Pair(mine.result(), theirs.result())


def _other(options: Options, launch: Launch) -> AbstractAsyncContextManager[Server]:
    """Return what semel is compared with: bare vLLM, or another checkout."""
    if options.source is None:
        return vllm_server(launch)
    scratch = launch.scratch / "other"
    scratch.mkdir()
    return semel_server(replace(launch, python=str(options.source_python), scratch=scratch))


async def _clients(options: Options, servers: Pair[Server], stack: AsyncExitStack) -> Pair[Side]:
    mine, theirs = (Client(server.url, api_key=options.api_key) for server in (servers.semel, servers.vllm))
    for client in (mine, theirs):
        await stack.enter_async_context(client)
    return Pair(Side(servers.semel, mine), Side(servers.vllm, theirs))


async def make_launch(options: Options, scratch: Path, stack: AsyncExitStack, tell: Tell) -> Launch:
    """Return how both sides are started; without a model that is named, a tiny one is made."""
    flags = COMMON_FLAGS if set(_BY_NAME) & set(options.only) else ()
    own: tuple[str, ...] = SEMEL_FLAGS if "evicted" in options.only else ()
    if "restart" in options.only:
        own = restart_flags(await stack.enter_async_context(running_store()))
    tcp_port = free_port() if options.transport == "tcp" else 0
    if options.model is not None:
        return Launch(options.model, (*flags, *options.flags), scratch, semel_flags=own, tcp_port=tcp_port)
    tell("making a tiny model", 0, 1)
    folder = scratch / "model"
    command = (sys.executable, "-m", "semel", "testing", "model", "qwen2-vl", str(folder))
    making = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    if await asyncio.wait_for(making.wait(), _BUILD_S):
        raise ConfigError("cannot make a tiny model; the message is above. Name a model that there is")
    _enlarge(folder)
    tiny_flags = (*_TINY_FLAGS, *flags, *options.flags)
    return Launch(
        str(folder), tiny_flags, scratch, _TINY_ENVIRONMENT, _TINY_SCREENS, semel_flags=own, tcp_port=tcp_port
    )


def _enlarge(model: Path) -> None:
    """Let the processor of a tiny model take images as large as those of a real one."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        config = json.loads((model / name).read_text())
        config.get("image_processor", config)["size"]["longest_edge"] = _MAX_PIXELS
        (model / name).write_text(json.dumps(config))


def _describe(options: Options, launch: Launch | None, seed: int, names: Sequence[str]) -> dict[str, object]:
    """Return the facts that a reader needs to repeat the run."""
    described: dict[str, object] = {"quick": options.quick, "scenarios": list(names), "seed": seed}
    if launch is None:
        return described | {"semel_url": options.semel, "vllm_url": options.baseline}
    model = options.model or "tiny Qwen2-VL (semel testing model qwen2-vl), longest_edge 28*28*2700"
    if options.source is not None:
        described["source"] = str(options.source)
    return described | {
        "model": model,
        "door": options.door,
        "transport": options.transport,
        "flags": list(launch.flags),
        "semel_flags": list(launch.semel_flags),
        "environment": dict(launch.environment),
    }
