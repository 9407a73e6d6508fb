"""What comes with a prompt is counted before it is read, is all in the account, and takes no room of others (S18)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.cache import SharedCache
from semel.core import Feature, Field, Layout, Mask, Media, Submission, Tensor
from semel.errors import FeatureRejected
from semel.frontend.budget import Budget
from semel.frontend.http.body import BodyLimits
from semel.frontend.limits import BudgetLimits
from semel.frontend.routes.render import SAFETENSORS
from semel.interchange.safetensors import FeatureEntry, read_file, write
from semel.render import ChatRenderer
from tests.frontend.rig import MAX_TOKENS, Rig, rig
from tests.frontend.test_client_features import file_of, post_file, rewritten, unsealed
from tests.frontend.test_generate import CHAT, GENERATE, RENDER, body, digests_of
from tests.render.drawn import FEATURE_BYTES, Drawing, drawn
from tests.waiting import until

FEW = BodyLimits(max_values=1_000)
MANY = FEW.max_values + 2 * MAX_TOKENS
"""Values that are too many for any prompt."""

LARGE_BYTES = 16 * FEATURE_BYTES
"""Of a tensor beside which the JSON of its prompt is nothing."""


@pytest.fixture
def memory() -> SharedCache:
    return SharedCache.create(8 * FEATURE_BYTES)


@pytest.fixture
def drawing(parts_renderer: ChatRenderer, memory: SharedCache) -> Drawing:
    return Drawing(parts_renderer, memory)


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing, memory: SharedCache) -> AsyncIterator[Rig]:
    """A frontend as it is by default: its features lie in memory that is lent to its worker."""
    async with rig(tmp_path, drawing.pipeline, engine_bytes=64 * FEATURE_BYTES, memory=memory) as made:
        take(made, Field("uint8", (FEATURE_BYTES,)))
        yield made


def take(app: Rig, pixels: Field) -> None:
    """Let the contract say what an image is."""
    serving = app.service.serving()
    contract = replace(serving.contract, fields={"image": {"pixel_values": pixels}})
    app.service.begin(replace(serving, contract=contract))


def draw_layouts(app: Rig, layout: Layout) -> None:
    """Let every image have this layout from now on."""

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return replace(drawn(media), layout=layout)

    serving = app.service.serving()
    app.service.begin(replace(serving, pipeline=replace(serving.pipeline, process=process)))


def by_hand(header: str, data: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


def texts_of(content: bytes) -> dict[str, str]:
    """The metadata of a file, as it would be parsed."""
    end = 8 + int.from_bytes(content[:8], "little")
    texts: dict[str, str] = json.loads(content[8:end])["__metadata__"]
    return texts


def veiled(texts: Mapping[str, str]) -> bytes:
    """A file without tensors, in whose texts nothing is seen of commas and brackets before they are parsed."""
    written = {name: json.dumps(text) for name, text in texts.items()}
    for mark in ",[{":
        written = {name: text.replace(mark, f"\\u{ord(mark):04x}") for name, text in written.items()}
    inner = ",".join(f'"{name}":{text}' for name, text in written.items())
    return by_hand(f'{{"__metadata__":{{{inner}}}}}')


async def refusal(app: Rig, content: bytes) -> tuple[int, bool]:
    reply = await post_file(app, content)
    assert (app.engine.submissions, app.service.budget.in_flight) == (0, 0)
    return reply.status_code, "--max-body-values" in reply.text


async def test_values_are_counted_in_the_texts_that_are_parsed_however_they_are_written_S18(app: Rig) -> None:
    texts = texts_of(await file_of(app, 1))
    app.service.body = FEW
    prompt, layouts = json.loads(texts["generate"]), json.loads(texts["semel"])
    (layout,) = layouts.values()
    for count, is_over in ((MANY // 2, False), (MANY, True)):
        prompt["token_ids"] = layout["token_ids"] = [1] * count
        for changed in ({"generate": json.dumps(prompt)}, {"semel": json.dumps(layouts)}):
            status, tells_flag = await refusal(app, veiled({**texts, **changed}))
            assert (status == 413, tells_flag) == (is_over, is_over)


async def test_the_values_of_the_header_itself_are_counted_S18(app: Rig) -> None:
    app.service.body = FEW
    for text in ("[" + "1," * MANY + "1]", "{" + '"a":[],' * (MANY // 2) + '"b":1}'):
        assert await refusal(app, by_hand(f'{{"a\\\\":"\\",\\\\","x":{text}}}')) == (413, True)
    assert await refusal(app, by_hand(json.dumps({"__metadata__": {"note": ",[{" * MANY}}))) == (400, False)


@pytest.mark.parametrize("accept", [SAFETENSORS, "application/json"])
async def test_what_is_rendered_of_the_longest_prompt_is_taken(app: Rig, accept: str) -> None:
    tokens = MAX_TOKENS - 64
    draw_layouts(app, Layout((300,) * tokens, Mask([True] * 4 + [False] * (tokens - 4))))
    app.service.body = FEW
    await app.ok(CHAT, body(1))
    rendered = await app.post(RENDER, body(1), accept=accept)
    (digest,) = digests_of(await app.ok(RENDER, body(1)))
    await until(lambda: app.worker.holding(digest) is not None)
    reply = await app.client.post(GENERATE, content=rendered.content, headers={"content-type": accept})
    assert reply.status_code == 200, reply.text
    assert tokens < reply.json()["usage"]["prompt_tokens"] < MAX_TOKENS


async def askew(app: Rig) -> bytes:
    """A file whose tensor of floats does not begin where a float may, for a model that takes floats."""
    take(app, Field("float32", (LARGE_BYTES // 4,)))
    file = read_file(memoryview(await file_of(app, 1)))
    (given,) = [entry for entry in file.entries if isinstance(entry, FeatureEntry)]
    tensor = Tensor("float32", (LARGE_BYTES // 4,), memoryview(bytes(LARGE_BYTES)))
    feature = replace(given.feature, tensors={"pixel_values": tensor})
    content = b"".join(write({given.digest: feature}, file.texts))
    length = int.from_bytes(content[:8], "little") + 1
    return length.to_bytes(8, "little") + content[8 : 7 + length] + b" " + content[7 + length :]


async def test_tensors_that_have_to_be_copied_are_in_the_account_twice_S18(
    app: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, held = await askew(app), []
    submit = app.engine.submit

    async def watched(submission: Submission) -> Any:
        held.append(app.service.budget.in_flight)
        return await submit(submission)

    monkeypatch.setattr(app.engine, "submit", watched)
    assert (await post_file(app, content)).status_code == 200
    assert held[0] >= len(content) + LARGE_BYTES
    small = len(content) + LARGE_BYTES  # and nothing for its JSON
    app.service.budget = Budget(BudgetLimits(max_request_bytes=small, max_bytes=small))
    reply = await post_file(app, content)
    assert (reply.status_code, "--max-request-media-bytes" in reply.text) == (413, True)
    assert app.service.budget.in_flight == 0


def ways(app: Rig) -> dict[str, str]:
    """How many features went which way."""
    return {name.split('"')[1]: value for name, value in app.metrics("semel_features_sent_total").items()}


def seen(drawing: Drawing, memory: SharedCache) -> tuple[object, ...]:
    return drawing.seen(), memory.occupied, memory.leases


async def test_what_a_client_sends_takes_no_room_in_memory_that_others_features_lie_in_E2_S18(
    app: Rig, drawing: Drawing, memory: SharedCache
) -> None:
    """The control: what a chat brings goes there, and to the worker by memory."""
    for number in (1, 2, 3, 4):
        await app.ok(CHAT, body(number))
    files = [rewritten(await file_of(app, number), unsealed) for number in (5, 6, 7)]
    before = seen(drawing, memory)
    assert (len(memory), ways(app)) == (4, {"memory": "4.0"})
    for content in files:
        assert (await post_file(app, content)).status_code == 200
    assert seen(drawing, memory) == before
    assert ways(app) == {"memory": "4.0", "frames": "3.0"}


async def test_what_the_worker_refuses_has_not_been_kept_S9(
    app: Rig, memory: SharedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = await file_of(app, 1)

    async def refuse(_: Submission) -> None:
        raise FeatureRejected("the image feature is malformed: its grid does not tile")

    monkeypatch.setattr(app.engine, "submit", refuse)
    assert (await post_file(app, content)).status_code == 400
    assert (len(memory), memory.occupied) == (0, 0)
