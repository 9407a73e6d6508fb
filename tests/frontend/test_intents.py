"""Every route and its intent: what executes moves the main cache and its counters, what inspects moves nothing (E2)."""

from __future__ import annotations

from typing import Any

import pytest

from semel.frontend.service import SCORING_ROUTES
from semel.render import Intent
from tests.frontend.rig import Rig
from tests.render.drawn import Drawing, chat, image_part

INTENTS: dict[str, Intent | None] = {
    "/v1/chat/completions": "execute",
    "/v1/completions": "execute",
    "/invocations": "execute",
    "/v1/messages": "execute",
    "/v1/responses": "execute",
    "/inference/v1/generate": "inspect",
    "/v1/chat/completions/render": "inspect",
    "/v1/completions/render": "inspect",
    "/tokenize": "inspect",
    "/v1/messages/count_tokens": "inspect",
    "/v1/responses/input_tokens": "inspect",
    "/detokenize": None,
}
"""None: it renders nothing."""

FORMS: dict[str, Intent | None] = {
    "/v1/audio/transcriptions": "execute",
    "/v1/audio/translations": "execute",
    "/v1/files": None,
}
"""Those that take no JSON; `test_transcriptions.py` and `test_files.py` send them."""

POOLING: dict[str, Intent | None] = dict.fromkeys(
    ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", *SCORING_ROUTES), "execute"
)
"""Those of other models; `test_pooling.py`, `test_cohere_embed.py` and `test_scoring.py` send them."""

SUBMITS = {path for path, intent in INTENTS.items() if intent == "execute"} | {"/inference/v1/generate"}
"""What is answered by an engine: also what was rendered elsewhere, for which nothing is rendered here."""

AGENTS = {path for path in INTENTS if path.startswith(("/v1/responses", "/v1/messages"))}
TAKES_ITEMS = {path for path in INTENTS if "chat" in path} | {"/invocations", "/tokenize"} | AGENTS


def body_of(path: str, *numbers: int) -> dict[str, Any]:
    if path in AGENTS:
        return agents_body(path, *numbers)
    if path in TAKES_ITEMS:
        return {"messages": list(chat(*numbers).messages)}
    if path == "/inference/v1/generate":
        return {"token_ids": [1, 2], "sampling_params": {}}
    return {"tokens": [1, 2]} if path == "/detokenize" else {"prompt": "hello"}


def agents_body(path: str, *numbers: int) -> dict[str, Any]:
    """The chat with these images, as the API of a path has it."""
    urls = [image_part(number)["image_url"]["url"] for number in numbers]
    if path.startswith("/v1/responses"):
        content = [{"type": "input_image", "image_url": url} for url in urls]
        return {"input": [{"role": "user", "content": [*content, {"type": "input_text", "text": "?"}]}]}
    sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
    blocks = [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": "?"}]
    longest = {} if path.endswith("count_tokens") else {"max_tokens": 8}
    return {"messages": [{"role": "user", "content": blocks}], **longest}


async def test_the_agents_apis_give_the_prompt_of_the_chat(app: Rig) -> None:
    """With its items, so that the caches have one of each, whatever API it came by."""
    prompts = []
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        await app.ok(path, body_of(path, 1, 2))
        assert app.engine.last is not None
        prompts.append(app.engine.last.prompt)
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(prompts[0].items) == 2


def test_every_route_that_takes_a_body_has_its_intent_in_the_table_E2(app: Rig) -> None:
    posting = {path for path, operations in app.app.openapi()["paths"].items() if "post" in operations}
    assert posting == INTENTS.keys() | FORMS.keys() | POOLING.keys()


@pytest.mark.parametrize("path", INTENTS)
async def test_a_route_moves_the_main_cache_and_its_counters_if_it_executes_and_only_then_E2(
    app: Rig, drawing: Drawing, path: str
) -> None:
    before = len(drawing.cache), app.metrics("semel_mm_cache"), app.metrics("vllm:mm_cache")
    for _ in range(2):
        await app.ok(path, body_of(path, 1, 2))
    after = len(drawing.cache), app.metrics("semel_mm_cache"), app.metrics("vllm:mm_cache")
    if INTENTS[path] == "execute" and path in TAKES_ITEMS:
        assert after[0] == 2
        labels = 'modality="image",model="tiny",tier="processor"'
        assert after[1][f"semel_mm_cache_queries_total{{{labels}}}"] == "4.0"
        assert after[1][f"semel_mm_cache_hits_total{{{labels}}}"] == "2.0"
    else:
        assert after == before
    assert app.engine.submissions == (2 if path in SUBMITS else 0)
    assert sorted(drawing.processed) == ([1, 2] if path in TAKES_ITEMS else [])


async def test_a_hundred_requests_that_inspect_leave_no_trace_in_cache_order_or_counters_E1(
    app: Rig, drawing: Drawing
) -> None:
    for number in (0, 1, 2, 3, 4, 5, 6, 7, 3, 0):
        await app.ok("/v1/chat/completions", body_of("/v1/chat/completions", number))
    digests = [(await app.pipeline.read_chat(chat(number))).items[0].digest for number in range(8)]
    assert all(digest in drawing.cache for digest in digests)
    before = drawing.seen(), app.metrics("semel_mm_cache"), app.metrics("vllm:"), app.metrics("semel_flights")
    inspecting = [path for path, intent in INTENTS.items() if intent == "inspect"]
    for number in range(100):
        path = inspecting[number % len(inspecting)]
        await app.ok(path, body_of(path, number % 13, number % 29))
    assert before == (drawing.seen(), app.metrics("semel_mm_cache"), app.metrics("vllm:"), app.metrics("semel_flights"))
    order = []
    for number in range(100, 108):
        held = {digest for digest in digests if digest in drawing.cache}
        await app.ok("/v1/chat/completions", body_of("/v1/chat/completions", number))
        (gone,) = held - {digest for digest in digests if digest in drawing.cache}
        order.append(digests.index(gone))
    assert order == [1, 2, 4, 5, 6, 7, 3, 0]


async def test_what_a_chat_has_processed_is_not_processed_to_be_shown_and_the_other_way_round_it_is_E1(
    app: Rig, drawing: Drawing
) -> None:
    await app.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": [image_part(1)]}]})
    await app.ok("/tokenize", {"messages": [{"role": "user", "content": [image_part(1), image_part(2)]}]})
    assert drawing.processed == [1, 2]
    await app.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": [image_part(2)]}]})
    assert drawing.processed == [1, 2, 2]
