"""Prompts that were rendered elsewhere, in all forms that `/inference/v1/generate` takes, and vLLM's own of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from semel.frontend.routes.render import SAFETENSORS
from tests.engine.parity import GREEDY, Answer, Rig
from tests.serve.served import Served

GENERATE, RENDER = "/inference/v1/generate", "/v1/chat/completions/render"


@dataclass(frozen=True)
class RenderedByVllm:
    """What bare vLLM's render route gives for a chat, and what its generate route makes of it."""

    body: dict[str, Any]
    answer: Answer


async def rendered_by_vllm(rig: Rig, messages: list[dict[str, Any]]) -> RenderedByVllm:
    """By the very code of its two routes: its server is another process, and its engine a second one."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import extract_mm_features, mm_kwargs_from_features
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
    from vllm.renderers.params import ChatParams

    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    await rig.engine.reset()  # or vLLM renders references to what it holds, and no tensors
    _, (prompt,) = await rig.llm.renderer.render_chat_async([messages], params)
    await rig.engine.reset()  # what is held must not stand for what is sent
    features = extract_mm_features(prompt)
    assert features is not None
    places = {
        kind: [PlaceholderRange(offset=one.offset, length=one.length) for one in ranges]
        for kind, ranges in features.mm_placeholders.items()
    }
    items: Any = MultiModalKwargsItems(mm_kwargs_from_features(features))
    answer = await rig.bare_prompt(mm_input(prompt["prompt_token_ids"], items, features.mm_hashes, places))
    sampling = {**GREEDY, "output_kind": 2, "skip_clone": True, "skip_reading_prefix_cache": False}
    body = {
        "token_ids": list(prompt["prompt_token_ids"]),
        "features": features.model_dump(),
        "sampling_params": sampling,
    }
    return RenderedByVllm(body, answer)


def asked(messages: list[dict[str, Any]]) -> dict[str, Any]:
    fields = {key: value for key, value in GREEDY.items() if key != "logprobs"}
    return {"messages": messages, **fields, "logprobs": True, "top_logprobs": 3}


def rendered(served: Served, messages: list[dict[str, Any]]) -> httpx.Response:
    """The prompt, with its items by digest."""
    return _ok(httpx.post(f"{served.url}{RENDER}", json=asked(messages), timeout=60))


def rendered_file(served: Served, messages: list[dict[str, Any]]) -> bytes:
    """The prompt with its items' tensors."""
    headers = {"accept": SAFETENSORS}
    return _ok(httpx.post(f"{served.url}{RENDER}", json=asked(messages), headers=headers, timeout=60)).content


def generated(served: Served, body: bytes | dict[str, Any]) -> Answer:
    """What is made of it, whichever form it has."""
    url = f"{served.url}{GENERATE}"
    if isinstance(body, bytes):
        reply = _ok(httpx.post(url, content=body, headers={"content-type": SAFETENSORS}, timeout=60))
    else:
        reply = _ok(httpx.post(url, json=body, timeout=60))
    (choice,) = reply.json()["choices"]
    steps = [
        {one["token_id"]: one["logprob"] for one in step["top_logprobs"]} for step in choice["logprobs"]["content"]
    ]
    return Answer(tuple(choice["token_ids"]), tuple(steps))


def _ok(reply: httpx.Response) -> httpx.Response:
    assert reply.status_code == 200, reply.text
    return reply
