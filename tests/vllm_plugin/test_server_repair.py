"""A plain vLLM server with semel inside: items that its engine core never got are sent before anybody sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine.parity import draw_image, image_part

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REFUSED = {"logit_bias": {"8888888": 1.0}}
"""vLLM refuses it when it has rendered the image, and counts it among those that the core has."""


def ask(server: Any, images: list[bytes], **fields: object) -> httpx.Response:
    content = [*map(image_part, images), {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    body = {"model": str(server.folder), "messages": messages, "max_tokens": 2, "temperature": 0, **fields}
    return httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)


def events(server: Any) -> dict[str, float]:
    page = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    return {name: float(total) for name, total in re.findall(r'plugin_events_total{event="(\w+)"} (\S+)', page)}


def test_requests_after_a_refused_one_are_answered_as_if_nothing_was_lost(door_server: Any) -> None:
    rng = np.random.default_rng(36)
    before = events(door_server)
    for fields in ({}, {"stream": True}, {"n": 3, "temperature": 0.5}):
        images = [draw_image(rng, side=112) for _ in range(2)]
        assert ask(door_server, images, **REFUSED).status_code == 400
        answer = ask(door_server, images, **fields)
        assert (answer.status_code, '"error"' in answer.text) == (200, False), answer.text
        again = ask(door_server, images, **fields)
        if "n" not in fields:
            assert texts(again) == texts(answer) != ""
    # As a worker of a fleet, the server does not count an item as sent before it is: of a loss, none is seen.
    after = events(door_server)
    lost, repaired = (after.get(name, 0) - before.get(name, 0) for name in ("lost", "repaired"))
    assert (lost > 0) == (repaired > 0)  # items, and requests


def texts(answer: httpx.Response) -> str:
    """What was said, of a stream or at once."""
    lines = answer.text.removeprefix("data: ").split("\n\ndata: ")
    choices = [one for line in lines if line.strip() != "[DONE]" for one in json.loads(line)["choices"]]
    return "".join((one.get("delta") or one.get("message")).get("content") or "" for one in choices)


def test_engine_parts_are_on_and_their_totals_in_vllms_own_metrics(door_server: Any) -> None:
    assert ask(door_server, [draw_image(np.random.default_rng(37), side=112)]).status_code == 200
    page = httpx.get(f"{door_server.base_url}/metrics", timeout=60).text
    queries = re.search(r'semel_encoder_cache_queries_total{engine="0"} (\S+)', page)
    assert queries is not None
    assert float(queries[1]) > 0
    assert "vllm:num_requests_running" in page
    assert "engine parts: encoder cache, late transfer, guard, encoder metrics" in door_server.log.read_text()
    assert not [one for one in Path("/dev/shm").iterdir() if one.name.startswith("semel-encoder")]
