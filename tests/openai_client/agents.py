"""Agents with the real `openai` client, sync and async, that ask in one way; and what they say."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import openai

from semel.openai import Memory, async_client, client

KEY = "a-client-s-key"


class Agent(Protocol):
    """Asks a server."""

    def ask(self, messages: list[Any], **options: Any) -> list[dict[str, Any]]:
        """The answer, or the chunks of the stream, as the caller sees them."""
        ...


class _Sync:
    def __init__(self, made: openai.OpenAI) -> None:
        self._client = made

    def ask(self, messages: list[Any], **options: Any) -> list[dict[str, Any]]:
        found = self._client.chat.completions.create(model="m", messages=messages, **options)
        return [one.model_dump(exclude_unset=True) for one in (found if options.get("stream") else [found])]


class _Async:
    def __init__(self, made: openai.AsyncOpenAI, runner: asyncio.Runner) -> None:
        self._client = made
        self._runner = runner

    def ask(self, messages: list[Any], **options: Any) -> list[dict[str, Any]]:
        async def ask() -> list[dict[str, Any]]:
            found: Any = await self._client.chat.completions.create(model="m", messages=messages, **options)
            chunks: AsyncIterator[Any] = found if options.get("stream") else _only(found)
            return [one.model_dump(exclude_unset=True) async for one in chunks]

        return self._runner.run(ask())


async def _only(value: Any) -> AsyncIterator[Any]:
    yield value


@contextmanager
def agent(
    url: str, *, is_async: bool, memory: Memory | None, key: str = KEY, retries: int = 0, **options: Any
) -> Iterator[Agent]:
    """An agent with semel's client; with the one of `openai` if it has no memory."""
    named: Any = {"base_url": url, "api_key": key, "max_retries": retries}
    if not is_async:
        made = None if memory is None else client(memory=memory, **options)
        with openai.OpenAI(**named, http_client=made) as one:
            yield _Sync(one)
        return
    with asyncio.Runner() as runner:
        other = None if memory is None else async_client(memory=memory, **options)
        asking = openai.AsyncOpenAI(**named, http_client=other)
        try:
            yield _Async(asking, runner)
        finally:
            runner.run(asking.close())


def picture(size: int = 3_000, *, mime: str = "image/png") -> str:
    """A data URL that nobody has sent before."""
    return f"data:{mime};base64,{base64.b64encode(os.urandom(size)).decode()}"


def image(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": "what ist this? é"}]}
