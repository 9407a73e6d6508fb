"""Files that cannot be read: a fault of the request that names them alone, whoever waits for the same feature."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from semel.cache import NoCache
from semel.core import Tenant
from semel.errors import RequestError, UnknownMedia
from semel.render import ChatRenderer, ChatRequest, Pipeline
from semel.render import pipeline as module
from semel.render.file_sources import FileSources
from tests.render.drawn import Drawing, image_part
from tests.waiting import until

ACME = Tenant("acme")
TEXT = {"type": "text", "text": "?"}
NAME = {"type": "image_url", "image_url": None, "uuid": "screen"}


@pytest.fixture
def drawing(parts_renderer: ChatRenderer) -> Drawing:
    return Drawing(parts_renderer, NoCache())


class EmptyStore:
    """A store that says after a while that it has nothing."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def read(self, *_: object) -> None:
        await self.answers.wait()


def chat(*parts: dict[str, Any]) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": [*parts, TEXT]}])


async def outcomes(drawing: Drawing, *chats: ChatRequest) -> list[object]:
    """What becomes of chats that all wait for one feature, whose first reads the store."""
    store: Any = EmptyStore()
    pipeline: Pipeline = replace(drawing.pipeline, files=FileSources(store))
    await pipeline.chat(chat({**image_part(7), "uuid": "screen"}), ACME)  # from now on the name is bound
    tasks = []
    for number, one in enumerate(chats):
        tasks.append(asyncio.create_task(pipeline.chat(one, ACME)))
        await until(lambda number=number: len(pipeline.flight) == 1 and pipeline.flight.joined == number)  # type: ignore[misc]
    store.answers.set()
    async with asyncio.timeout(60):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_chat_with_the_bytes_is_answered_though_one_that_names_them_is_not(drawing: Drawing) -> None:
    named, inline = await outcomes(drawing, chat(NAME), chat(image_part(7)))
    assert isinstance(named, UnknownMedia)
    assert not isinstance(inline, BaseException)
    assert drawing.processed == [7, 7]


async def test_each_chat_is_told_the_place_in_its_own_messages(drawing: Drawing) -> None:
    errors = await outcomes(drawing, chat(NAME), chat(TEXT, NAME))
    places = [error.param for error in errors if isinstance(error, UnknownMedia)]
    assert places == ["messages[0].content[0]", "messages[0].content[1]"]


async def test_mutant_a_fault_that_all_share_refuses_the_bytes_too(
    drawing: Drawing, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shared(RequestError):
        def __new__(cls, error: RequestError) -> Any:
            return error

    monkeypatch.setattr(module, "_UnreadError", Shared)
    _, inline = await outcomes(drawing, chat(NAME), chat(image_part(7)))
    assert isinstance(inline, UnknownMedia)
