"""Responses stored by two `semel frontend` processes over one folder, as the unmodified `openai` package uses them."""

from __future__ import annotations

import base64
import io
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.serve.served import SEMEL, until
from tests.wiring.processes import Places, Running, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RATE = 40


@dataclass
class Pair:
    frontends: list[Running]
    model: str

    def client(self, number: int) -> openai.OpenAI:
        url = f"{self.frontends[number].url}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def pair(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Pair]:
    tmp_path.chmod(0o700)
    key, model, at = tmp_path / "key", tiny("qwen2-vl"), Places(tmp_path, tiny("qwen2-vl"))
    subprocess.run([SEMEL, "key", "fleet", key], check=True, capture_output=True, timeout=60)
    common = ["--fleet-key-file", key]
    with ExitStack() as stack:
        words = ["testing", "worker", model, "--listen", at.worker, "--rate", str(RATE), *common]
        stack.enter_context(running("worker", tmp_path, *words))
        made = []
        for number, port in enumerate((at.port, at.metrics_port)):
            url = f"http://127.0.0.1:{port}"
            words = ["frontend", model, "--worker", at.worker, "--port", port, "--preprocessing-processes", 1, *common]
            words += ["--media-store", tmp_path / "store", "--store-responses", "--drain-delay-s", 0]
            made.append(stack.enter_context(running(f"f{number}", tmp_path, *words, url=url, metrics_url=url)))
        for one in made:
            one.until_ready()
        yield Pair(made, str(model))


def image() -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.effect_noise((300, 200), 60).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "input_image", "detail": "auto", "image_url": url}


def test_a_response_is_continued_read_and_deleted_at_the_other_frontend_also_after_kill_9(pair: Pair) -> None:
    one, other = pair.client(0), pair.client(1)
    picture = image()
    first: Any = [{"role": "user", "content": [picture, {"type": "input_text", "text": "look"}]}]
    begun = one.responses.create(model=pair.model, input=first, max_output_tokens=4)
    assert begun.status == "incomplete" and begun.model_extra is not None
    assert (begun.to_dict()["store"], begun.output_text) != (False, "")
    assert other.responses.retrieve(begun.id).to_dict() == begun.to_dict()

    next_turn = other.responses.create(
        model=pair.model, input="and now?", previous_response_id=begun.id, max_output_tokens=4
    )
    whole: Any = [*first, *(item.to_dict() for item in begun.output), {"role": "user", "content": "and now?"}]
    sent = one.responses.create(model=pair.model, input=whole, max_output_tokens=4, store=False)
    assert next_turn.usage is not None and sent.usage is not None
    assert next_turn.usage.input_tokens == sent.usage.input_tokens > begun.usage.input_tokens  # type: ignore[union-attr]

    items = list(one.responses.input_items.list(next_turn.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message", "message", "message"]
    (part, _) = items[0].content  # type: ignore[union-attr, misc]
    content = other.files.content(str(part.to_dict()["file_id"])).content
    assert base64.b64encode(content).decode() == picture["image_url"].partition(",")[2]

    with one.responses.create(model=pair.model, input="count", stream=True, max_output_tokens=400) as stream:
        created = next(iter(stream))
        assert created.type == "response.created"
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(created.response.id)
        pair.frontends[0].process.kill()
        pair.frontends[0].process.wait(30)
    with pytest.raises(openai.NotFoundError) as caught:
        other.responses.create(model=pair.model, input="go on", previous_response_id=created.response.id)
    assert caught.value.code == "previous_response_not_found"

    events = list(
        other.responses.create(
            model=pair.model, input="a fork", previous_response_id=begun.id, stream=True, max_output_tokens=4
        )
    )
    assert events[-1].type == "response.incomplete"
    assert other.responses.retrieve(events[-1].response.id).to_dict() == events[-1].response.to_dict()
    other.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(begun.id)
    assert other.responses.create(
        model=pair.model, input="more", previous_response_id=next_turn.id, max_output_tokens=2
    ).output_text
    until(lambda: pair.frontends[1].metric("semel_stored_responses_total", 'outcome="stored"') == 3, 10)
