"""`semel serve` as its users see it: three processes and more, over HTTP, with the ordinary client."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from semel.core import Media, Page
from semel.engine.vllm.compat.server_flags import server_flag
from semel.lab.bench.ports import free_port
from semel.lab.testing.pdf import page_of, pdf
from semel.media import DecodeLimits, image_of
from semel.settings.secrets import create_key
from tests.engine.engines import Engines
from tests.engine.families import FAMILIES
from tests.engine.parity import Answer, Chat, draw_image, image_part, random_chat
from tests.fleet.segments import Segment, left_of, segments_of
from tests.serve.collector import SpanCollector, collecting
from tests.serve.generating import RenderedByVllm, generated, rendered, rendered_by_vllm, rendered_file
from tests.serve.http_parity import compare_over_http
from tests.serve.served import SEMEL, Served, events, image_url, serving, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROUNDS = 3
"""Of which the quickest counts: other processes of the machine only make an abort slower."""

RNG = np.random.default_rng(0)
CHATS = [random_chat(RNG, [image_part(draw_image(RNG)) for _ in range(index % 4)]) for index in range(48)]
SHOWN = [chat for index, chat in enumerate(CHATS) if index % 4][:9]
"""Those with images."""

DOCUMENT = pdf([page_of(number) for number in range(5)])
DPI = 72


def as_png(page: int) -> bytes:
    file = io.BytesIO()
    image_of(Media("image", DOCUMENT, page=Page(page, DPI)), DecodeLimits()).save(file, "PNG")
    return file.getvalue()


def about(*parts: dict[str, Any], question: str = "what is in this document ?") -> Chat:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def document(pages: str = "1-", data: bytes = DOCUMENT) -> dict[str, Any]:
    url = "data:application/pdf;base64," + base64.b64encode(data).decode()
    return {"type": "file", "file": {"file_data": url, "dpi": DPI, "page_range": pages}}


PAGES = [about(*(image_part(as_png(page)) for page in pages)) for pages in ((1, 2, 3, 4, 5), (4,), (2, 3))]
CHATS += PAGES
"""Bare vLLM is asked about pages as images, as every client that has no semel sends them."""

PICTURE = image_url(draw_image(np.random.default_rng(5)))


@pytest.fixture(scope="module")
async def bare(engines: Engines) -> tuple[list[Answer], list[RenderedByVllm]]:
    """What bare vLLM answers and renders, from the engine of the group, which is gone before the tests begin."""
    rig = await engines.of(FAMILIES["qwen2-vl"].start)
    answers = [await rig.bare(chat) for chat in CHATS]
    rendered = [await rendered_by_vllm(rig, chat) for chat in SHOWN]
    await engines.close()
    return answers, rendered


@pytest.fixture(scope="module")
def expected(bare: tuple[list[Answer], list[RenderedByVllm]]) -> list[Answer]:
    return bare[0]


@pytest.fixture(scope="module")
def seen() -> set[Segment]:
    """Shared memory that its processes had before they were killed or ended."""
    return set()


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # of the SDK: milliseconds until a batch goes out
        yield collector


OF_VLLMS_SERVER = (
    *("--host", "127.0.0.1", "--uvicorn-log-level", "warning", "--root-path", "/llm", "--api-server-count", "1"),
    *("--chat-template-content-format", "openai", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *(
        "--disable-log-requests",
        "--disable-fastapi-docs",
        "--enable-prompt-tokens-details",
        "--allowed_origins",
        '["*"]',
    ),
    *("--enable-request-id-headers", "--max-log-len", "100", "--response-role", "assistant"),
)
"""Server flags that are often on a `vllm serve` line, with `--port` and the engine's; keys have tests of their own."""


@pytest.fixture(scope="module")
def served(
    tiny: Callable[[str], Path],
    expected: list[Answer],
    collector: SpanCollector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """It is traced, and has the flags of a `vllm serve` line, so that all that follows holds with both."""
    flags = ("--otlp-traces-endpoint", collector.url, *OF_VLLMS_SERVER)
    with serving(tiny("qwen2-vl"), tmp_path_factory.mktemp("serve"), *flags) as running_now:
        yield running_now


def test_it_tells_where_it_serves_and_what_to_try(served: Served) -> None:
    until(lambda: "Ctrl-C ends it" in served.log.read_text(), 30)
    text = served.log.read_text()
    assert f"semel is ready: {served.url}/v1" in text
    assert f"curl {served.url}/v1/chat/completions" in text


def test_a_vllm_serve_line_starts_it_and_each_flag_that_is_ignored_has_a_line(served: Served) -> None:
    text = served.log.read_text()
    ignored = {flag for flag in OF_VLLMS_SERVER if (row := server_flag(flag)) and row.handling == "ignored"}
    assert ignored == set(re.findall(r"^semel: (--[\w-]+) is ignored: ", text, re.MULTILINE))
    for prefix in ("", "/llm"):
        reply = httpx.get(f"{served.url}{prefix}/v1/models", headers={"Origin": "https://chat.example.com"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


async def test_answers_are_those_of_bare_vllm_with_sixteen_requests_at_a_time(
    served: Served, expected: list[Answer]
) -> None:
    await compare_over_http(served, CHATS, expected)


async def test_answers_about_a_pdf_are_those_of_bare_vllm_about_its_pages_as_png_and_a_page_is_made_once(
    served: Served, expected: list[Answer]
) -> None:
    """Also of a part of its pages; of a second question nothing is rendered, decoded or preprocessed."""
    data = DOCUMENT + b"%% of its own"  # no other test has opened it
    asked = [about(document(pages, data)) for pages in ("1-", "4", "2-3")]
    counters = ("semel_pool_decoded_total", "semel_pool_processed_total")
    before = [served.metric(name) for name in counters]
    for again in range(2):
        await compare_over_http(served, asked, expected[-len(PAGES) :])
        assert [served.metric(name) for name in counters] == [5 + count for count in before], again
    answer = served.chat(about(document(data=data), question="and what else ?")[0]["content"])
    assert answer.status_code == 200, answer.text
    assert [served.metric(name) for name in counters] == [5 + count for count in before]
    with pytest.raises(AssertionError):  # another page's answer would be seen
        await compare_over_http(served, [about(document("1"))], [expected[-2]])


def test_prompts_that_were_rendered_elsewhere_are_answered_as_by_vllm_s_own_route_in_every_form_E2(
    served: Served, bare: tuple[list[Answer], list[RenderedByVllm]]
) -> None:
    """With tensors in a file and in vLLM's JSON, and by digest; vLLM's routes and the chat give the same tokens."""
    direct = [answer for index, answer in enumerate(bare[0]) if index % 4]
    for chat, theirs, answer in zip(SHOWN, bare[1], direct, strict=False):
        assert theirs.answer == answer
        file = rendered_file(served, chat)
        for form in (file, theirs.body, rendered(served, chat).json(), file, theirs.body):
            assert generated(served, form) == answer


def test_tensors_that_the_model_cannot_take_are_the_client_s_fault_and_the_engine_lives_on_S9(
    served: Served, bare: tuple[list[Answer], list[RenderedByVllm]]
) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item, encode_mm_kwargs_item

    theirs = bare[1][0]
    (data, *_), (told, *_) = (theirs.body["features"][name]["image"] for name in ("kwargs_data", "mm_metadata"))
    item = decode_mm_kwargs_item(data)
    item["image_grid_thw"].data[1] *= 2  # more patches than there are
    wrong = {**theirs.body["features"], "mm_metadata": None}
    wrong["kwargs_data"] = {"image": [encode_mm_kwargs_item(item), *wrong["kwargs_data"]["image"][1:]]}
    reply = httpx.post(f"{served.url}/inference/v1/generate", json={**theirs.body, "features": wrong}, timeout=60)
    assert (reply.status_code, "image_grid_thw" in reply.text) == (400, True), reply.text
    assert told is not None
    assert generated(served, theirs.body) == theirs.answer


def test_one_trace_goes_from_the_client_over_the_frontend_and_the_worker_into_the_engine(
    served: Served, collector: SpanCollector
) -> None:
    trace, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    chat = [{"role": "user", "content": [image_url(draw_image(np.random.default_rng(81)))]}]
    answer = httpx.post(
        f"{served.url}/v1/chat/completions",
        json={"messages": chat, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True},
        headers={"traceparent": f"00-{trace}-{client}-01"},
        timeout=60,
    )
    assert answer.status_code == 200
    wanted = {"POST /v1/chat/completions", "generate", "llm_request", "process item"}
    until(lambda: wanted <= {span.name for span in collector.of(trace)}, 30)
    spans = {span.name: span for span in collector.of(trace)}
    root, worker, engine = (spans[name] for name in ("POST /v1/chat/completions", "generate", "llm_request"))
    assert (root.service, root.parent_id) == ("semel-frontend", client)
    assert (worker.service, worker.parent_id) == ("semel-worker", root.span_id)
    assert (engine.service, engine.parent_id) == ("semel-worker", worker.span_id)
    stages = {"parse", "digest", "layout", "process", "render", "send", "first_token"}
    assert {span.name for span in spans.values() if span.parent_id == root.span_id} == {
        *stages,
        "process item",
        "generate",
    }
    assert "8" in worker.attributes["gen_ai.usage.output_tokens"]
    line = f"[request {answer.headers['x-request-id']}] POST /v1/chat/completions 200"
    until(lambda: line in served.log.read_text(), 30)
    assert served.metric("semel_spans_dropped_total") == 0


def test_a_client_that_is_killed_mid_stream_is_aborted_in_the_engine_within_a_second(served: Served) -> None:
    program = f"""
import openai
client = openai.OpenAI(base_url="{served.url}/v1", api_key="none")
chat = [{{"role": "user", "content": "tell me a very long story"}}]
for chunk in client.chat.completions.create(model=client.models.list().data[0].id, messages=chat, stream=True,
                                            max_tokens=4000, extra_body={{"ignore_eos": True}}):
    print(chunk.choices[0].delta.content, flush=True)
"""
    aborted_s: list[float] = []
    while len(aborted_s) < ROUNDS and min(aborted_s, default=9.0) >= 1.0:
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            client.stdout.readline()
            client.stdout.readline()
            until(lambda: served.running() == 1, 30)
            client.kill()
            aborted_s.append(until(lambda: served.running() == 0, 30))
    assert min(aborted_s) < 1.0


@pytest.mark.parametrize("fault", ["processor", "key"])
def test_a_frontend_that_cannot_keep_the_contract_refuses_to_serve_and_says_why(
    served: Served, tiny: Callable[[str], Path], tmp_path: Path, fault: str
) -> None:
    folder, key = tiny("qwen2-vl"), served.folder / "key"
    if fault == "key":
        key = tmp_path / "other.key"
        create_key(key)
    else:
        folder = shutil.copytree(folder, tmp_path / "changed")
        for name in ("preprocessor_config.json", "processor_config.json"):
            config = folder / name
            config.write_text(config.read_text().replace("0.48145466", "0.5"))
    port = free_port()
    command = [SEMEL, "frontend", folder, "--worker", f"ipc://{served.folder}/worker.sock", "--fleet-key-file", key]
    stranger = replace(served, url=f"http://127.0.0.1:{port}")
    reason = "the workers do not fit this frontend" if fault == "processor" else "no worker is connected"
    why = "the worker's processor" if fault == "processor" else "fleet key"
    log = tmp_path / "frontend.log"
    started = [*map(str, command), "--port", str(port), "--drain-delay-s", "0"]
    with log.open("w") as output, subprocess.Popen(started, process_group=0, stderr=output) as frontend:
        try:
            until(lambda: reason in str(stranger.ready()[1]) and why in log.read_text(), 240)
            assert stranger.chat("hello").status_code == 503
        finally:
            frontend.terminate()
            frontend.wait(20)


def test_a_frontend_that_is_killed_has_its_requests_aborted_in_the_engine(served: Served, seen: set[Segment]) -> None:
    """Its successor is ready long before the 4,000 tokens would have been generated."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4_000, "ignore_eos": True, "stream": True}
    old = served.child("frontend")
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as stream,
    ):
        told = events(stream)
        next(told)
        until(lambda: served.running() == 1, 30)
        seen |= segments_of(one.pid for one in served.processes())
        old.kill()
        for _ in told:
            pass
    until(lambda: served.ready()[0], 60)
    assert served.child("frontend").pid != old.pid
    assert served.running() == 0
    assert served.chat("hello").status_code == 200


def test_a_worker_that_is_killed_is_replaced_and_clients_are_told_the_truth_meanwhile(
    served: Served, seen: set[Segment]
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as stream:
        told = events(stream)
        next(told)
        seen |= segments_of(one.pid for one in served.processes())
        served.child("worker").kill()
        *_, last = told
    assert last["error"]["code"] == "worker_lost"
    assert "send the request again" in last["error"]["message"]
    ready, reason = served.ready()
    assert not ready
    assert reason
    refused = served.chat("hello")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert httpx.get(f"{served.url}/health").status_code == 200
    until(lambda: served.ready()[0], 300)
    assert served.chat([PICTURE]).status_code == 200


def test_ctrl_c_ends_everything_soon_and_leaves_nothing_behind(served: Served, seen: set[Segment]) -> None:
    """The last test of the module: it ends what the others use."""
    processes = served.processes()
    assert len(processes) >= 5
    seen |= segments_of(one.pid for one in processes)
    assert any(segment.name.startswith("/memfd:semel") for segment in seen)
    began = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    assert time.monotonic() - began < 30  # 6 on a machine with nothing else to do
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
    assert not list(served.home.glob("semel-*"))
    assert not [path for path in served.home.rglob("*") if path.is_socket()]
    until(lambda: not left_of(seen), 10)
