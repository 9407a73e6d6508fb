"""The answers of a running `semel serve`, held against those of bare vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.engine.parity import GREEDY, Answer
from tests.serve.served import Served


async def compare_over_http(served: Served, chats: list[list[dict[str, Any]]], expected: list[Answer]) -> None:
    """Ask all chats, sixteen at a time: tokens and top log probabilities have to be identical."""
    room = asyncio.Semaphore(16)
    fields = {key: value for key, value in GREEDY.items() if key != "logprobs"}
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask(chat: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"messages": chat, **fields, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
            async with room:
                reply = await client.post(f"{served.url}/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            choice: dict[str, Any] = reply.json()["choices"][0]
            return choice

        choices = await asyncio.gather(*map(ask, chats))
    for choice, bare in zip(choices, expected, strict=True):
        assert tuple(choice["token_ids"]) == bare.token_ids
        steps = [[entry["logprob"] for entry in step["top_logprobs"]] for step in choice["logprobs"]["content"]]
        assert steps == [sorted(step.values(), reverse=True) for step in bare.logprobs]
