"""vLLM's engine core without a model: its own pauses, sleep and calls, over requests that take a fixed number of steps.

What is vLLM's own: `AsyncLLM`'s methods, its client's, and what `EngineCoreProc` does with the calls. What is a model:
the scheduler's queue, the weights, and the time that everything takes, which is virtual.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output

__all__ = ["STEP_S", "Core", "Llm"]

STEP_S: Final = 0.01
SEQUENCES: Final = 16


@dataclass
class Asked:
    """A request, and how it ends."""

    steps: int
    ended: asyncio.Future[str]
    has_begun: bool = False


class Executor:
    """The weights, and what is made with them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.asleep: set[str] = set()
        self.weights = self.cached = 0
        """The number of the weights, and of those whose encoder outputs are kept."""
        self.is_transferring = self.is_broken = False
        self.failing = 0.1
        """The share of weights that are no good."""

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def sleep(self, _: int) -> None:
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None) -> None:
        self.asleep -= {"weights", "kv_cache"} if tags is None else set(tags)

    def reset_encoder_cache(self) -> None:
        self.cached = self.weights

    def collective_rpc(self, method: str, *_: Any) -> list[None]:
        if method == "synchronize_device":
            return [None]
        fails = self._rng.random() < self.failing
        if method == "start_weight_update":
            fails = fails or self.is_transferring
            if not fails:
                self.is_transferring = self.is_broken = True
        else:
            fails = fails or (method != "reload_weights" and not self.is_transferring)
            self.weights += 1
            self.is_broken = fails or method == "update_weights"
            self.is_transferring = method == "update_weights" and not fails
        if fails:
            raise RuntimeError("the weights are no good")
        return [None]


class Scheduler:
    """The queue: requests that run, and that wait."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Asked] = {}

    def running(self) -> list[str]:
        """The requests that have the next step."""
        if self.pause_state == PauseState.PAUSED_ALL:
            return []
        begun = [name for name, asked in self.requests.items() if asked.has_begun]
        if self.pause_state == PauseState.UNPAUSED:
            begun += [name for name, asked in self.requests.items() if not asked.has_begun]
        return begun[:SEQUENCES]

    def has_requests(self) -> bool:
        return bool(self.running())

    has_unfinished_requests = has_requests

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def finish_requests(self, *_: Any) -> list[Asked]:
        ended, self.requests = [*self.requests.values()], {}
        return ended

    def reset_encoder_cache(self) -> None:
        pass

    def reset_prefix_cache(self, *_: Any) -> bool:
        return not any(asked.has_begun for asked in self.requests.values())


class Core(EngineCoreProc):  # type: ignore[misc]
    """The engine core of one worker."""

    engines_running = False
    batch_queue = None

    def __init__(self, rng: random.Random) -> None:
        self.scheduler, self.model_executor = Scheduler(), Executor(rng)
        self._idle_state_callbacks: list[Callable[..., None]] = []
        self._rng = rng
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.is_promised = False
        """True if a pause was answered that nobody has ended."""
        self.steps = 0
        self.on_step: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Take calls and make steps."""
        while True:
            while not self.has_work():
                self._notify_idle_state_callbacks()
                await self._handle(await self._inbox.get())
            while not self._inbox.empty():
                await self._handle(self._inbox.get_nowait())
            if self.has_work():
                await asyncio.sleep(STEP_S)
                self._step()

    def tell(self, *message: Any) -> None:
        """Put something into the queue of the core."""
        self._inbox.put_nowait(message)

    async def _handle(self, message: Any) -> None:
        requests = self.scheduler.requests
        match message:
            case ("add", str(name), Asked() as asked):
                requests[name] = asked
            case ("abort", names):
                self._send_abort_outputs([requests.pop(name) for name in names if name in requests])
            case ("call", call_id, method, args, answer):
                if method == "collective_rpc":
                    await asyncio.sleep(self._rng.choice([0.0, 0.05, 0.5]))  # nothing else happens meanwhile
                call = partial(getattr(self, method), *args)
                self._invoke_utility_method(method, call, UtilityOutput(call_id), answer)

    def _step(self) -> None:
        executor, requests = self.model_executor, self.scheduler.requests
        assert not executor.is_broken, "a step without weights"
        assert not executor.asleep, "a step asleep"
        assert executor.cached == executor.weights, "encoder outputs of old weights"
        assert not self.is_promised, "a step in a pause"
        self.steps += 1
        for name in self.scheduler.running():
            asked = requests[name]
            asked.has_begun = True
            asked.steps -= 1
            if not asked.steps:
                del requests[name]
                asked.ended.set_result("length")
        self.on_step()

    def _send_abort_outputs(self, aborted_reqs: list[Any]) -> None:
        for asked in aborted_reqs:
            asked.ended.set_result("abort")

    def reset_mm_cache(self) -> None:
        """Forget no items: there are none."""


class Client(AsyncMPClient):  # type: ignore[misc]
    """vLLM's client; calls take a while to the core and back, and keep their order."""

    core_engine = b""
    core_engines = (b"",)

    def __init__(self, core: Core, rng: random.Random) -> None:
        self._core, self._rng = core, rng
        self._called = 0
        self._waiting: dict[int, Any] = {}
        self._there: deque[Any] = deque()
        self._back: deque[Any] = deque()

    def send(self, *message: Any) -> None:
        """Send to the core what it gets a little later."""
        self._travel(self._there, partial(self._core.tell, *message))

    def _travel(self, way: deque[Any], arrive: Callable[[], None]) -> None:
        """Let it arrive a little later, and not before what was sent first."""
        way.append(arrive)
        delay_s = self._rng.choice([0.0, 0.0, 0.001, 0.02])
        asyncio.get_running_loop().call_later(delay_s, lambda: way.popleft()())

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        assert engine == b""
        self._called += 1
        future = self._waiting[self._called] = asyncio.get_running_loop().create_future()

        def answer(output: Any) -> None:
            self._travel(self._back, partial(_process_utility_output, output, self._waiting))

        self.send("call", self._called, method, args, answer)
        return await future


class Llm(AsyncLLM):  # type: ignore[misc]
    """vLLM's engine with a paced core."""

    def __init__(self, core: Core, rng: random.Random) -> None:
        async def clear() -> None:
            pass

        self.engine_core = Client(core, rng)
        self.logger_manager = None
        self.renderer = SimpleNamespace(clear_mm_cache_async=clear)
        self.core = core
        self._asked = 0

    def ask(self, steps: int) -> asyncio.Future[str]:
        """Begin a request."""
        self._asked += 1
        asked = Asked(steps, asyncio.get_running_loop().create_future())
        self.engine_core.send("add", str(self._asked), asked)
        return asked.ended

    async def abort(self, request_id: Any, internal: bool = False) -> None:  # noqa: ARG002
        """End requests."""
        self.engine_core.send("abort", [*request_id])

    def __del__(self) -> None:
        pass
