"""`semel bench processing`: chats with images rendered by semel and by vLLM's renderer, in one run.

Both get the same bodies, as a client sends them: JSON with one JPEG of 1024×1024 as data URL. Both go as far as the
encoded message to the engine: for semel with the feature in shared memory, for vLLM without the copy that its socket
makes later. New images come 16 at a time, and wall-clock time is measured. A known image comes alone, and the processor
time of the serving process is measured. vLLM's renderer has a process of its own, set up as in its API server (one
thread for preprocessing, its cache of 4 GiB). The two alternate, so that a slow second is slow for both, and the first
rounds warm up both. Without vLLM the checks have no baseline. At the end, a preprocessing process is killed in the
middle of 200 requests.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final, Self

import pybase64
import uvloop
from PIL import Image

from semel.cache import SharedCache
from semel.core import Digest, FeatureInfo, Key, Submission, Target
from semel.errors import ServiceError
from semel.frontend.api.openai.requests import ChatCompletionRequest
from semel.lab.bench.report import Check, Report, describe_machine
from semel.processing import Pool
from semel.render import ChatRenderer, ChatTemplate, Pipeline, Tokenizer
from semel.wire.codec import Frames, encode, pack
from semel.wire.limits import Limits
from semel.wire.translation import to_submit

__all__ = ["run"]

_SIDE: Final = 1_024
_GRAIN: Final = 88  # pixels of noise a side, enlarged: a JPEG of about 260 KB
_IMAGES: Final = 64
_AT_ONCE: Final = 16
_PROCESSES: Final = 2
_CACHE_BYTES: Final = 1 << 30
_WARMING_TURNS: Final = 3  # each process has one page fault per page of shared memory, as in a serving process
_REPEATS: Final = 25
_KILLED_DURING: Final = 200
_KILLED_AFTER: Final = 60
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_DEADLINE_S: Final = 900.0
_ANSWER_TIMEOUT_S: Final = 300.0
_LIMITS: Final = Limits()

Render = Callable[[bytes], Awaitable[object]]


def run(*, quick: bool) -> Report:
    """Measure; `quick` ends within a minute, with fewer rounds."""
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as scratch:
        folder = _model(Path(scratch) / "model")
        with _bare_renderer(folder) as bare:
            checks = uvloop.run(_measure(folder, bare, turns=3 if quick else 9))
    return Report("processing", describe_machine(), tuple(checks))


async def _measure(folder: Path, bare: _Bare | None, *, turns: int) -> list[Check]:
    bodies = _bodies(_IMAGES)
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        ours = await _Ours.start(folder, stack)
        await _until(lambda: bool(ours.pool.spare_pids))  # so that no process loads anything during the measurement
        gc.freeze()
        new, known = _Turns(), _Turns()
        for turn in range(_WARMING_TURNS + turns):
            pairs = await _take_turn(ours, bare, bodies)
            if turn >= _WARMING_TURNS:
                new.add(*pairs[0])
                known.add(*pairs[1])
        return [*_new_checks(new), *_known_checks(known), *await _killing(ours, bodies)]


async def _take_turn(ours: _Ours, bare: _Bare | None, bodies: Sequence[bytes]) -> list[tuple[_Span, _Span | None]]:
    new = None if bare is None else await asyncio.to_thread(bare.ask, "new")
    mine = await ours.render_new(bodies)
    known = None if bare is None else await asyncio.to_thread(bare.ask, "known")
    return [(mine, new), (await ours.render_known(bodies[0]), known)]


def _new_checks(turns: _Turns) -> Iterator[Check]:
    name = f"{_IMAGES} new images of {_SIDE}×{_SIDE}, {_AT_ONCE} at a time"
    mine, theirs = turns.medians()
    rate = None if theirs is None else _IMAGES / theirs.clock_s
    yield Check(name, _IMAGES / mine.clock_s, "images/s", rate)
    if theirs is not None:
        yield Check.at_least(f"{name}, times vLLM's images per second", turns.ratio(), 2.5, unit="×")
    spent_ms = None if theirs is None else theirs.cpu_s / _IMAGES * 1e3
    yield Check("CPU time of a new image, all processes", mine.cpu_s / _IMAGES * 1e3, "ms", spent_ms)


def _known_checks(turns: _Turns) -> Iterator[Check]:
    mine, theirs = turns.medians()
    name = "CPU time of a known image, from the body to the engine's message"
    spent_ms = None if theirs is None else theirs.cpu_s / _REPEATS * 1e3
    yield Check.at_most(name, mine.cpu_s / _REPEATS * 1e3, 1, unit="ms", baseline=spent_ms)


async def _killing(ours: _Ours, bodies: Sequence[bytes]) -> list[Check]:
    """Kill a process with SIGKILL while many requests are in flight."""
    pool, failed, done_s = ours.pool, 0, list[float]()

    async def render(body: bytes) -> None:
        nonlocal failed
        try:
            await ours.render(body, {})
        except ServiceError:
            failed += 1
        done_s.append(perf_counter())
        ours.cache.clear()  # so that every image is a new one

    ours.cache.clear()
    begun_s = perf_counter()
    rendering = asyncio.create_task(_at_once(render, [bodies[n % len(bodies)] for n in range(_KILLED_DURING)]))
    await _until(lambda: len(done_s) >= _KILLED_AFTER)
    victim, killed_s = pool.pids[0], perf_counter()
    rate = len(done_s) / (killed_s - begun_s)
    os.kill(victim, signal.SIGKILL)
    await _until(lambda: victim not in pool.pids and len(pool.pids) == _PROCESSES)
    gap_s = perf_counter() - killed_s
    await rendering
    later = [at_s for at_s in done_s if at_s > killed_s + 1]
    name = f"a process killed during {_KILLED_DURING} requests"
    checks = [
        Check.at_most(f"{name}: requests that fail", failed, 1, unit="requests"),
        Check.at_most(f"{name}: until another has its place", gap_s, 1, unit="s"),
    ]
    if later:
        rate_then = len(later) / (later[-1] - killed_s - 1)
        name = f"{name}: images per second from a second later on, times those before"
        checks.append(Check.at_least(name, rate_then / rate, 0.75, unit="×"))
    return checks


async def _until(condition: Callable[[], bool]) -> None:
    """Poll a condition: processes that start or end in the background set no event here."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@dataclass(frozen=True, slots=True)
class _Span:
    """One duration; the CPU time is that of all processes involved."""

    clock_s: float
    cpu_s: float


class _Turns:
    """The durations of both sides, round by round."""

    def __init__(self) -> None:
        self._turns: list[tuple[_Span, _Span | None]] = []

    def add(self, mine: _Span, theirs: _Span | None) -> None:
        self._turns.append((mine, theirs))

    def medians(self) -> tuple[_Span, _Span | None]:
        theirs = [its for _, its in self._turns if its is not None]
        return _median([mine for mine, _ in self._turns]), _median(theirs) if theirs else None

    def ratio(self) -> float:
        """Return how many times as long the other side takes by wall-clock time: the median over rounds."""
        return median(theirs.clock_s / mine.clock_s for mine, theirs in self._turns if theirs is not None)


def _median(spans: Sequence[_Span]) -> _Span:
    return _Span(median(span.clock_s for span in spans), median(span.cpu_s for span in spans))


@dataclass(frozen=True, slots=True)
class _Ours:
    """semel's side: what a frontend does with a body, up to the frames for its worker."""

    pool: Pool
    cache: SharedCache
    pipeline: Pipeline

    @classmethod
    async def start(cls, folder: Path, stack: AsyncExitStack) -> Self:
        cache = SharedCache.create(_CACHE_BYTES)
        stack.callback(cache.close)
        pool = await Pool.start(folder, Target("float32", "engine"), processes=_PROCESSES, memory=cache)
        stack.push_async_callback(pool.close)
        return cls(pool, cache, _pipeline(folder, pool, cache))

    async def render_new(self, bodies: Sequence[bytes]) -> _Span:
        self.cache.clear()
        return await self._spent(_at_once(partial(self.render, infos={}), bodies))

    async def render_known(self, body: bytes) -> _Span:
        """Render an image that the worker has: it is not processed, looked up in the feature cache, or sent."""
        request = ChatCompletionRequest.model_validate_json(body)
        rendered = await self.pipeline.chat(request.chat(), request.tenant())
        infos = {
            digest: FeatureInfo(feature.modality, feature.nbytes, feature.layout)
            for digest, feature in rendered.features.items()
        }
        del rendered

        async def repeat() -> None:
            for _ in range(_REPEATS):
                await self.render(body, infos)

        return await self._spent(repeat())

    async def render(self, body: bytes, infos: dict[Digest, FeatureInfo]) -> Frames:
        request = ChatCompletionRequest.model_validate_json(body)
        draft = await self.pipeline.read_chat(request.chat(), request.tenant())
        rendered = await self.pipeline.render(draft, infos.get)
        submit = to_submit(
            Submission("request", rendered.prompt, rendered.features, request.sampling()), rendered.features
        )
        return encode(1, 1, pack(submit, _LIMITS))

    async def _spent(self, work: Awaitable[None]) -> _Span:
        clock_s, cpu_s = perf_counter(), self._cpu_s()
        await work
        return _Span(perf_counter() - clock_s, self._cpu_s() - cpu_s)

    def _cpu_s(self) -> float:
        return process_time() + sum(map(_cpu_s, self.pool.pids))


def _pipeline(folder: Path, pool: Pool, cache: SharedCache) -> Pipeline:
    described, tokenizer = pool.description, Tokenizer.load(folder)
    renderer = ChatRenderer(ChatTemplate.load(folder), tokenizer, described.placeholders, described.insertion)
    return Pipeline(tokenizer, renderer, pool.process, described.fingerprint, Key(bytes(32)), cache)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of another process, in ticks of the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


class _Bare:
    """vLLM's side, in a process of its own that executes commands."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, order: str) -> _Span:
        """Render all bodies as new ones, or the first one repeatedly."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_TIMEOUT_S)
        if not ready or not (answer := self._process.stdout.readline()):
            raise RuntimeError("the process with vLLM's renderer has ended or hangs; its log says why")
        return _Span(**json.loads(answer))


@contextmanager
def _bare_renderer(folder: Path) -> Iterator[_Bare | None]:
    if find_spec("vllm") is None:
        yield None
        return
    program = "import sys; from semel.lab.bench.processing import _serve_bare; _serve_bare(sys.argv[1])"
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield _Bare(process)
        finally:
            process.kill()


def _serve_bare(folder: str) -> None:
    """The process with vLLM's renderer; its standard output has only answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    render, forget = _bare_render(Path(folder))
    bodies = _bodies(_IMAGES)
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for order in sys.stdin:
            if order.strip() == "new":
                forget()
                work = _at_once(render, bodies)
            else:
                runner.run(_at_once(render, bodies[:1]))
                work = _one_by_one(render, bodies[:1] * _REPEATS)
            clock_s, cpu_s = perf_counter(), process_time()
            runner.run(work)
            spent = {"clock_s": perf_counter() - clock_s, "cpu_s": process_time() - cpu_s}
            answers.write(json.dumps(spent) + "\n")
            answers.flush()


def _bare_render(folder: Path) -> tuple[Render, Callable[[], None]]:
    """Return vLLM's way from a body to the frames for its engine core, and a call that clears its cache."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as BareRequest
    from vllm.renderers import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.serial_utils import MsgpackEncoder

    config = AsyncEngineArgs(model=str(folder), dtype="float32", enforce_eager=True).create_engine_config()
    renderer = renderer_from_config(config)
    inputs, encoder = InputProcessor(config, renderer), MsgpackEncoder()

    async def render(body: bytes) -> Sequence[Any]:
        request = BareRequest.model_validate(json.loads(body))
        tokens, chat = request.build_tok_params(config.model_config), request.build_chat_params(None, "auto")
        _, (prompt,) = await renderer.render_chat_async([request.messages], chat, tokens)
        sampling = request.to_sampling_params(16, {})
        frames: Sequence[Any] = encoder.encode(inputs.process_inputs("request", prompt, sampling, ("generate",)))
        return frames

    return render, renderer.clear_mm_cache


async def _at_once(render: Render, bodies: Sequence[bytes]) -> None:
    """Render all bodies, some at a time. Each result is dropped at once."""
    left = iter(bodies)

    async def client() -> None:
        for body in left:
            await render(body)

    async with asyncio.TaskGroup() as clients:
        for _ in range(_AT_ONCE):
            clients.create_task(client())


async def _one_by_one(render: Render, bodies: Sequence[bytes]) -> None:
    for body in bodies:
        await render(body)


def _model(folder: Path) -> Path:
    """A tiny Qwen2-VL, whose processor works as a large one's. Another process writes it: this one loads no torch."""
    command = [sys.executable, "-m", "semel", "testing", "model", "qwen2-vl", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_DEADLINE_S)  # noqa: S603
    return folder


def _bodies(count: int) -> list[bytes]:
    """Requests with one image each, all different, the same in every process."""
    return [_body(_jpeg(number)) for number in range(count)]


def _jpeg(number: int) -> bytes:
    noise = random.Random(number).randbytes(3 * _GRAIN * _GRAIN)
    image = Image.frombytes("RGB", (_GRAIN, _GRAIN), noise).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _body(jpeg: bytes) -> bytes:
    url = f"data:image/jpeg;base64,{pybase64.b64encode(jpeg).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 16}).encode()
