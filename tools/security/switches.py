"""Switches for the defences of a running `semel serve`, so that an attack can be seen to work without one of them.

A server that is started with `environment` maps a file into all of its processes. `install` replaces functions of
modules as they are imported; each new one asks its switch at every call, and calls the old one while the defence is on.
A switch works in sandboxed processes too: the file is mapped before they enter it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.abc
import importlib.machinery
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

__all__ = ["DEFENCES", "Switches", "environment", "install"]

_VARIABLE: Final = "PYTHONSEMELSWITCHES"
"""Of the environment. Preprocessing processes get no variables but those of known beginnings."""

_ROOT: Final = Path(__file__).parents[2]

DEFENCES: Final = {
    "following": "no trial and no limit in the engine core",
    "downloads": "whole files, never called back, at any pace",
    "reserve": "any process for anybody, item by item",
    "header": "tokens are counted after the processor",
    "verdicts": "a killed trial is the schema's fault",
    "logs": "lines are written by the event loop",
    "operations": "any number of store operations, every file is looked for",
    "tokens left": "no check of what may leave no token, which is the engine's fault",
    "encodings": "compressed bodies are collected uncharged",
    "aborts": "no delay after aborts",
    "engine verdict": "no trial, and an engine's refusal is a failure",
}
"""By name: what a server does without it."""

_NUMBERS: Final = {name: number for number, name in enumerate(DEFENCES)}


class Switches:
    """The file of one server: a byte for each defence, 1 if it is off."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(len(DEFENCES)))
        self._file = file

    @contextlib.contextmanager
    def off(self, defence: str) -> Iterator[None]:
        """Switch a defence off meanwhile."""
        self._write(_NUMBERS[defence], 1)
        try:
            yield
        finally:
            self._write(_NUMBERS[defence], 0)

    def _write(self, place: int, value: int) -> None:
        with self._file.open("r+b") as file:
            file.seek(place)
            file.write(bytes([value]))


def environment(file: Path) -> Mapping[str, str]:
    """Return the variables of a server that is to have switches."""
    return {_VARIABLE: str(file), "PYTHONPATH": f"{Path(__file__).parent / 'undefended'}:{_ROOT}"}


def install() -> None:
    """Replace functions in modules that this process imports from now on."""
    if (name := os.environ.get(_VARIABLE)) is None:
        return
    with Path(name).open("rb") as file:
        switches = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sys.meta_path.insert(0, _Finder(switches))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, switches: mmap.mmap) -> None:
        self._switches = switches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in REPLACED or (spec := importlib.machinery.PathFinder.find_spec(name, path, target)) is None:
            return None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for replace in REPLACED[name]:
                replace(module, self._is_off)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _is_off(self, defence: str) -> bool:
        return bool(self._switches[_NUMBERS[defence]])


IsOff = Callable[[str], bool]


def _choose(owner: Any, name: str, defence: str, without: Callable[..., Any], is_off: IsOff) -> None:
    """Replace a function by one that calls it, or the other one while the defence is off."""
    defended = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: (without if is_off(defence) else defended)(*args, **named))


class _Committed:
    """An account that cannot be called back, and keeps everything until the last byte is sent."""

    def __init__(self, account: Any) -> None:
        self._account = account

    def __getattr__(self, name: str) -> Any:
        return getattr(self._account, name)

    def revocable(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def keep(self, nbytes: int) -> None:
        pass


def _downloads(module: Any, is_off: IsOff) -> None:
    send = module.Download.__call__

    async def committed(self: Any, *args: Any) -> None:
        if is_off("downloads"):
            self._account = _Committed(self._account)
        await send(self, *args)

    module.Download.__call__ = committed
    _choose(module.Download, "_extend", "downloads", lambda self, *_: self._deadline.reschedule(None), is_off)


def _stream(module: Any, is_off: IsOff) -> None:
    piece = module._PIECE_BYTES
    stream = module.MediaStore.stream

    async def whole(self: Any, *args: Any) -> Any:
        module._PIECE_BYTES = 1 << 40 if is_off("downloads") else piece
        return await stream(self, *args)

    module.MediaStore.stream = whole


def _reserve(module: Any, is_off: IsOff) -> None:
    def first_come(self: Any, _: int) -> Any:
        waiting = (tenant for tenant in self._tenants.values() if tenant.items)
        return min(waiting, key=lambda tenant: abs(tenant._rank), default=None)

    _choose(module.FairQueue, "next_for", "reserve", first_come, is_off)


def _header(module: Any, is_off: IsOff) -> None:
    _choose(module, "check_header", "header", lambda *_: None, is_off)


def _outcomes(module: Any, is_off: IsOff) -> None:
    is_verdict = module.Outcome.is_verdict.fget
    module.Outcome.is_verdict = property(lambda self: is_off("verdicts") or is_verdict(self))


def _grammars(module: Any, is_off: IsOff) -> None:
    tried, compiled = module.Grammars._try, module.Grammars._compiled

    async def untried(self: Any, *args: Any) -> Any:
        if not (is_off("following") or is_off("engine verdict")):
            return await tried(self, *args)
        was, self._is_tried = self._is_tried, False
        try:
            return await tried(self, *args)
        finally:
            self._is_tried = was

    async def unremembered(self: Any, judged: Any, salt: str | None) -> Any:
        if not is_off("engine verdict"):
            return await compiled(self, judged, salt)
        await self._compile(judged.outputs, salt)
        return judged

    module.Grammars._try, module.Grammars._compiled = untried, unremembered


def _following(module: Any, is_off: IsOff) -> None:
    _choose(module.Following, "bitmask", "following", lambda _self, _output, compute: compute(), is_off)
    _choose(module.Following, "plan", "following", lambda *_: None, is_off)
    _choose(module.Following, "holds_back", "following", lambda *_: False, is_off)


def _logs(module: Any, is_off: IsOff) -> None:
    _choose(module.LineWriter, "put", "logs", lambda self, line, **_: os.write(self._descriptor, line) and None, is_off)


def _operations(module: Any, is_off: IsOff) -> None:
    admit = module.BucketObjects._admit

    async def at_once(self: Any, *args: Any) -> Any:
        return (lambda: None) if is_off("operations") else await admit(self, *args)

    module.BucketObjects._admit = at_once


def _files(module: Any, is_off: IsOff) -> None:
    locate = module.FileSources.locate

    async def every(self: Any, messages: Any, tenant: Any) -> Any:
        if not is_off("operations"):
            return await locate(self, messages, tenant)
        ids = [(text, module.parse_id(text)) for text in module.named_files(messages)]
        found = {}

        async def look(entry: tuple[str, Any]) -> None:
            if entry[1] is not None and (file := await self.store.locate(tenant.name, entry[1])) is not None:
                found[entry[0]] = entry[1], file.modality

        await module.concurrently(ids, look, at_once=8)
        return found

    module.FileSources.locate = every


def _tokens_left(module: Any, is_off: IsOff) -> None:
    _choose(module, "check_tokens_left", "tokens left", lambda *_: None, is_off)


def _own_faults(module: Any, is_off: IsOff) -> None:
    failure = module.VllmStream._failure

    def of_the_engine(self: Any, reason: object) -> Any:
        self.form = None if is_off("tokens left") else self.form
        return failure(self, reason)

    module.VllmStream._failure = of_the_engine


def _encodings(module: Any, is_off: IsOff) -> None:
    receive = module._receive

    async def collect(request: Any, limits: Any, account: Any, add: Callable[[bytes], None]) -> None:
        if not is_off("encodings") or "content-encoding" not in request.headers:
            await receive(request, limits, account, add)
            return
        async with asyncio.timeout(limits.max_s):
            async for chunk in request.stream():
                add(chunk)

    module._receive = collect


def _aborts(module: Any, is_off: IsOff) -> None:
    _choose(module.AbortThrottle, "wait_s", "aborts", lambda *_: 0.0, is_off)


REPLACED: Final[dict[str, tuple[Callable[[Any, IsOff], None], ...]]] = {
    "semel.core.token_limits": (_tokens_left,),
    "semel.engine.vllm.grammars.child": (_outcomes,),
    "semel.engine.vllm.grammars.following": (_following,),
    "semel.engine.vllm.grammars.trial": (_grammars,),
    "semel.engine.vllm.requests.stream": (_own_faults,),
    "semel.fairness.queue": (_reserve,),
    "semel.frontend.http.body": (_encodings,),
    "semel.frontend.http.download": (_downloads,),
    "semel.frontend.middleware.refusal_rate": (_aborts,),
    "semel.processing.pool.child": (_header,),
    "semel.render.file_sources": (_files,),
    "semel.store.objects": (_operations,),
    "semel.store.store": (_stream,),
    "semel.telemetry.log_writer": (_logs,),
}
"""By module. It imports none of them: a process has only those that it imports itself."""
