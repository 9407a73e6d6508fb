"""A plain `vllm serve` as a worker of a fleet: `SEMEL_LISTEN=tcp://HOST:PORT`, with keys as `semel worker` has them.

vLLM loads endpoint plug-ins when it builds its HTTP server. This level adds one to them that has no endpoint: it gets
the engine before the server begins, and serves it to frontends in the same process and on the same event loop. The
engine stays vLLM's: it ends as vLLM ends it, once the worker has drained within vLLM's own `--shutdown-timeout`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from semel.engine.vllm.compat.names import to_release
from semel.engine.vllm.compat.versions import installed_version
from semel.errors import ConfigError
from semel.vllm_plugin.levels import LevelOff, logger, parse_levels

__all__ = ["WorkerPlugin", "install"]

LISTEN: Final = "SEMEL_LISTEN"
KEY_DIR: Final = "SEMEL_KEY_DIR"
KEY_FILE: Final = "SEMEL_FLEET_KEY_FILE"
_SINCE: Final = "0.32"
_WARM_S: Final = 120.0
"""Seconds that the engine's first requests may take."""

_END_S: Final = 5.0
"""Seconds that a worker has to end its sessions after the time for its requests."""


def install() -> str:
    """Have vLLM's server serve its engine to frontends too.

    Raise `LevelOff` without an address, keys, vLLM 0.32, or the level `repair`: a request of the fleet may evict an
    item between the time when vLLM's renderer finds it cached and the send, and a plain server never does that.
    """
    address = os.environ.get(LISTEN, "").strip()
    if not address:
        raise LevelOff(f"{LISTEN} is not set")
    setting = os.environ.get("SEMEL", "").strip()
    if setting not in ("", "0") and "repair" not in parse_levels(setting):
        raise LevelOff("it needs the level repair")
    if to_release(installed_version()) != _SINCE:
        raise LevelOff(f"it needs vLLM {_SINCE}, and {installed_version()} is installed")
    if multiprocessing.parent_process() is None:  # the imports for it take 0.2 s in each of vLLM's processes
        _read_keys()
    from vllm import plugins

    load = plugins.load_endpoint_plugins
    if load.__module__ != __name__:

        def load_endpoint_plugins(supported_tasks: tuple[str, ...] | None = None) -> list[Any]:
            own = [WorkerPlugin(address)] if "generate" in (supported_tasks or ()) else []
            return [*load(supported_tasks), *own]

        plugins.load_endpoint_plugins = load_endpoint_plugins
    return f"frontends are served at {address}"


class WorkerPlugin:
    """An endpoint plug-in of vLLM's without an endpoint: a worker for frontends of semel."""

    name: Final = "semel-worker"
    required_tasks: Final = ("generate",)

    def __init__(self, address: str) -> None:
        self._address = address

    def attach_router(self, app: Any) -> None:
        """Add no route (threats S33)."""

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Begin to serve vLLM's engine, before its own server begins. A failure leaves vLLM as it would be."""
        try:
            _check(args)
            _log_as_vllm()
            state.semel_worker = await self._start(engine_client, args)
            logger.info("semel: the engine is also a worker, at %s", self._address)
        except Exception as error:  # noqa: BLE001 (whatever it is, the server runs without a worker)
            logger.warning("semel: no frontends are served at %s: %s", self._address, error)

    async def _start(self, llm: Any, args: Namespace) -> asyncio.Task[None]:
        from vllm.engine.arg_utils import AsyncEngineArgs

        from semel.engine.vllm.engine import VllmEngine
        from semel.engine.vllm.model.rendering import check_rendering_flags, model_aliases
        from semel.engine.vllm.requests.parsing import ParserFlags
        from semel.shutdown import ShutdownSignal

        arguments = AsyncEngineArgs.from_cli_args(args)
        check_rendering_flags(arguments)
        parsers = ParserFlags(
            args.tool_call_parser, args.enable_auto_tool_choice, args.tool_strict_level, args.tool_parser_plugin
        )
        # Its processor is vLLM's, whose own threads have nothing to do before the server begins.
        engine = await asyncio.to_thread(VllmEngine.embed, llm, parsers=parsers, aliases=model_aliases(arguments))
        stopping, drain_s = ShutdownSignal(), float(llm.vllm_config.shutdown_timeout)
        listening = asyncio.Event()
        serving = asyncio.create_task(self._serve(engine, stopping, drain_s, listening))
        waiting = asyncio.create_task(listening.wait())
        try:
            await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            serving.cancel()
            raise
        finally:
            waiting.cancel()
        if not listening.is_set():
            await serving  # it raises
        _drain_first(llm, stopping, serving, drain_s)
        return serving

    async def _serve(self, engine: Any, stopping: Any, drain_s: float, listening: asyncio.Event) -> None:
        """Warm the engine up and serve it. Until it listens, vLLM is as it was, and a failure is raised."""
        from semel.compose.worker import serve_engine
        from semel.engine.progress import ProgressLimits
        from semel.settings.worker import WorkerSettings

        settings = WorkerSettings(
            model=engine.contract.model,
            listen=self._address,
            drain_delay_s=0,
            drain_s=drain_s,
            progress=ProgressLimits(engine_progress_s=0),  # vLLM decides when its engine has to end
        )

        def share() -> None:
            engine.share()
            listening.set()

        try:
            await _warm(engine)
            await serve_engine(
                settings, _read_keys(), engine, window=engine.window, stopping=stopping, on_listening=share
            )
        except Exception as error:
            if not listening.is_set():
                raise
            logger.warning("semel: frontends are no longer served at %s: %s", self._address, error)
        finally:
            await engine.release()


async def _warm(engine: Any) -> None:
    try:
        async with asyncio.timeout(_WARM_S):
            await engine.warm()
    except TimeoutError as error:
        raise TimeoutError(f"the engine's first requests took more than {_WARM_S:g} s") from error


def _drain_first(llm: Any, stopping: Any, serving: asyncio.Task[None], drain_s: float) -> None:
    """Have the worker drained when vLLM shuts its engine down, which then has the rest of the time.

    vLLM does that in a thread, on SIGTERM, while its event loop runs on.
    """
    loop, home = asyncio.get_running_loop(), threading.get_ident()
    shut_down: Callable[..., None] = llm.shutdown

    async def drain() -> None:
        stopping.ask()
        await asyncio.wait((serving,), timeout=drain_s + _END_S)

    def shutdown(timeout: float | None = None) -> None:
        began = time.monotonic()
        if threading.get_ident() != home and loop.is_running() and not serving.done():
            asyncio.run_coroutine_threadsafe(drain(), loop).result()
        shut_down(timeout=None if timeout is None else max(0.0, timeout - (time.monotonic() - began)))

    llm.shutdown = shutdown


def _check(args: Namespace) -> None:
    """Refuse a server whose engine other processes use as well."""
    if (args.api_server_count or 1) > 1:
        raise ConfigError("several API servers share an engine (--api-server-count): start one worker for each engine")
    if args.data_parallel_size > 1:
        raise ConfigError("the engine is data parallel (--data-parallel-size): start one worker for each replica")
    if args.mm_processor_cache_type == "shm":
        raise ConfigError("the item cache cannot be shared with frontends (--mm-processor-cache-type shm): use lru")


def _log_as_vllm() -> None:
    """Have vLLM's handlers write what the worker logs: its server lets the others write errors only."""
    own, vllms = logging.getLogger("semel"), logging.getLogger("vllm")
    own.handlers = vllms.handlers
    own.setLevel(vllms.level)


def _read_keys() -> Any:
    """Return the worker's keys. Raise `LevelOff` if there are none, or they cannot be used."""
    from semel.key_files import process_keys

    folder, file = (os.environ.get(name, "").strip() for name in (KEY_DIR, KEY_FILE))
    if not folder and not file:
        raise LevelOff(f"{KEY_DIR} is not set: `semel key make DIR` makes DIR/worker")
    try:
        return process_keys(Path(file) if file else None, Path(folder) if folder else None, "worker")
    except (ConfigError, OSError) as error:
        raise LevelOff(str(error)) from error
