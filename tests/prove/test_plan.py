"""The requests of a run are functions of its seed, and their answers of their questions."""

from __future__ import annotations

import io
import json
from collections import Counter

from PIL import Image

from semel.lab.prove.answers import Answer, ask_references, parse_stream, parse_whole
from semel.lab.prove.plan import REFUSALS, TENANTS, Ask, Kind, Media, Mix, Question, bodies, draw_image, plan

MIX = Mix(2_000, seed=3)
MEDIA = Media([draw_image(3, number) for number in range(MIX.images)])


def test_a_plan_is_a_function_of_its_seed_and_has_every_kind_of_request() -> None:
    asks = plan(MIX)
    assert asks == plan(MIX) != plan(Mix(2_000, seed=4))
    kinds = Counter(ask.kind for ask in asks)
    assert 150 < kinds[Kind.REFUSED] < 250
    assert 150 < kinds[Kind.LEFT_EARLY] + kinds[Kind.LEFT_AT_ONCE] < 250
    assert {ask.refusal for ask in asks} == {"", *REFUSALS}
    assert {ask.tenant for ask in asks} == {*TENANTS}
    assert {source for ask in asks for source in ask.sources} == {"data", "url", "file", "named", "name"}
    questions = {ask.question for ask in asks}
    assert len(questions) < 100
    assert any(one.next_text for one in questions) and any(one.has_schema for one in questions)
    assert any(one.sequences > 1 for one in questions) and any(len(one.images) == 2 for one in questions)


def test_images_are_what_they_say_and_differ() -> None:
    sizes = {Image.open(io.BytesIO(data)).convert("RGB").size for data in MEDIA.images}
    assert sizes == {(56, 56)}
    assert len(set(MEDIA.images)) == MIX.images


def test_a_file_of_another_tenant_is_never_ones_own() -> None:
    files = {(tenant, image): f"file-{tenant}-{image}" for tenant in TENANTS for image in range(2)}
    media = Media(MEDIA.images, files=files)
    for number, tenant in enumerate(TENANTS * 3):
        ((_, body),) = bodies(Ask(number, tenant, Question("x"), (), Kind.REFUSED, "another tenant's file"), media)
        assert f"file-{tenant}-" not in json.dumps(body)


def test_tokens_that_differ_are_counted_and_a_beginning_is_right() -> None:
    expected = Answer({0: " 1 2 3"}, {0: [1, 2, 3]})
    assert expected.differing(Answer({0: " 1 2 3"}, {0: [1, 2, 3]})) == 0
    assert Answer({0: " 1 9"}, {0: [1, 9]}).differing(expected) == 2
    assert Answer({0: " 1 2 4"}).differing(Answer({0: " 1 2 3"})) == 1
    assert Answer({0: " 1"}, {0: [1]}).begins(expected)
    assert not Answer({0: " 2"}, {0: [2]}).begins(expected)


def test_streams_and_whole_answers_of_both_apis_are_read_alike() -> None:
    choice = {"index": 1, "token_ids": [7], "message": {"content": " 7"}}
    stream = 'data: {"choices": [{"index": 1, "token_ids": [7], "delta": {"content": " 7"}}]}\n\ndata: [DONE]\n\n'
    assert parse_whole({"choices": [choice]}) == parse_stream(stream)[0] == Answer({1: " 7"}, {1: [7]})
    assert parse_stream(stream)[1] == ""
    assert "no end" in parse_stream(stream.replace("data: [DONE]", ""))[1]
    responses = (
        'data: {"type": "response.output_text.delta", "delta": "ab"}\n\ndata: {"type": "response.completed"}\n\n'
    )
    output = [{"content": [{"type": "output_text", "text": "ab"}]}]
    assert parse_stream(responses) == (parse_whole({"output": output}), "")
    assert parse_stream('data: {"error": {"code": "worker_lost"}}\n\ndata: [DONE]\n\n')[1]


async def test_a_reference_with_two_equally_likely_tokens_is_left_out() -> None:
    async def answer(_: str, body: object) -> dict[str, object]:
        margin = 0.0 if "one" in json.dumps(body) else 1.0
        likely = [{"logprob": -1.0}, {"logprob": -1.0 - margin}]
        logprobs = {"content": [{"top_logprobs": likely}]}
        return {"choices": [{"index": 0, "token_ids": [1], "message": {"content": " 1"}, "logprobs": logprobs}]}

    found = await ask_references(answer, [Question("one"), Question("two")], MEDIA)
    assert found.expected(Question("one")) is None
    assert found.expected(Question("two")) == Answer({0: " 1"}, {0: [1]})
