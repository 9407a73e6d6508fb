"""An application whose engine says what a test has written, served at an address: for the clients of other APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from semel.cache import LruCache
from semel.core import Keyring, Output, Submission
from semel.engine import Stream
from semel.errors import EngineFailed
from semel.frontend.limits import BodyLimits
from semel.frontend.middleware.refusal_rate import RefusalLimits
from semel.render import ChatRenderer
from tests.frontend.conformance import served
from tests.frontend.hearing import Spoken
from tests.frontend.rig import Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing

KEY = "a-client-s-key-0123456789"
OTHER_KEY = "another-tenant-s-key-0123"
CALLS: tuple[Mapping[str, Any], ...] = (
    {"id": "call-a", "type": "function", "function": {"name": "look", "arguments": '{"at": "né"}'}},
    {"id": "call-b", "type": "function", "function": {"name": "go", "arguments": '{"far": [1, 2.5]}'}},
)


@dataclass
class Answer:
    """What the engine says: its message, in as many pieces as it has, and why it ends."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    finish: str = "stop"
    stop: int | str | None = None
    fails: bool = False

    def outputs(self, *, streamed: bool) -> list[Output]:
        made: list[Output] = []
        for delta in self.deltas():
            text = str(delta.get("content") or "")
            made.append(Output(0, text, (len(made),), message=delta if streamed else None))
        message = None if streamed else self.message()
        reasoning = 1 if self.reasoning else 0
        made[:1] = [_first(one) for one in made[:1]]
        end = Output(0, "", (99,), None, self.finish, self.stop, message=message or {}, reasoning_tokens=reasoning)
        return [*made, end]

    def message(self) -> dict[str, Any]:
        return {
            "content": self.content or None,
            "reasoning": self.reasoning or None,
            **({"tool_calls": list(self.calls)} if self.calls else {}),
        }

    def deltas(self) -> Iterator[dict[str, Any]]:
        for name, text in (("reasoning", self.reasoning), ("content", self.content)):
            for start in range(0, len(text), 3):
                yield {name: text[start : start + 3]}
        for index, call in enumerate(self.calls):
            function = call["function"]
            yield {"tool_calls": [{"index": index, **call, "function": {"name": function["name"], "arguments": ""}}]}
            for start in range(0, len(function["arguments"]), 4):
                piece = function["arguments"][start : start + 4]
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _first(output: Output) -> Output:
    return Output(output.index, output.text, output.token_ids, message=output.message, cached_tokens=2)


class _Failing(Spoken):
    async def __aiter__(self) -> AsyncIterator[Output]:
        for output in self._outputs[:-1]:
            yield output
        raise EngineFailed("the engine failed the request, as asked")


@dataclass
class Agents:
    """The address of an application, and what it was sent."""

    url: str = ""
    answer: Answer = field(default_factory=lambda: Answer(content="hello there"))
    last: Submission | None = None
    rig: Rig | None = None

    async def submit(self, submission: Submission) -> Stream:
        self.last = submission
        assert submission.parsing is not None
        outputs = self.answer.outputs(streamed=submission.parsing.stream)
        return _Failing(outputs) if self.answer.fails else Spoken(outputs)

    @contextmanager
    def limited(self, limits: BodyLimits) -> Iterator[None]:
        """Other limits of bodies inside."""
        assert self.rig is not None
        service, before = self.rig.service, self.rig.service.body
        service.body = limits
        try:
            yield
        finally:
            service.body = before

    def prompt(self) -> str:
        """The words of the last prompt."""
        assert self.last is not None
        assert self.rig is not None
        return self.rig.pipeline.tokenizer.decode(self.last.prompt.token_ids)

    @property
    def submission(self) -> Submission:
        assert self.last is not None
        return self.last


@contextmanager
def agents(folder: Path, renderer: ChatRenderer, *, keys: bool = True, **options: Any) -> Iterator[Agents]:
    """The application, at a port of this machine; `options` are those of `rig`."""
    made = Agents()

    @asynccontextmanager
    async def entered() -> AsyncIterator[ASGIApp]:
        drawing = Drawing(renderer, LruCache(64 * FEATURE_BYTES))
        keyring = Keyring([("acme", KEY), ("umbra", OTHER_KEY)]) if keys else None
        async with rig(folder, drawing.pipeline, keys=keyring, **options) as application:
            application.service.refusals = RefusalLimits(per_s=0)
            made.rig = application
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(application.engine, "submit", made.submit)
                yield application.app

    with served(entered, {"Authorization": f"Bearer {KEY}"}) as server:
        made.url = server.url
        yield made
