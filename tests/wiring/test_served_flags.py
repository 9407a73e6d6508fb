"""`semel worker` and `semel frontend` with every flag of limits, media, caches and metrics set: each is seen to act.

The tests share both processes. Those that leave something behind stand at the end.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import resource
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import av
import httpx
import numpy as np
import psutil
import pytest
import zmq
from PIL import Image

from semel.core import Key
from semel.engine.vllm.compat.internals import GUARDED_WORKER, SCHEDULER
from semel.lab.testing.pdf import page_of, pdf
from semel.settings.secrets import create_key
from semel.sizing import usable_cores
from semel.wire.messages import Status
from semel.wire.zmq import Connected, FrontendLink
from tests.embeddings.certificates import Authority
from tests.embeddings.redis import Redis, running_redis
from tests.serve.served import until
from tests.wiring.command import FAIL, HANG, HOLD
from tests.wiring.lines import ACME, BETA, CONFIG, served_frontend, served_worker
from tests.wiring.processes import Origin, Places, Running, flags_as_words, origin, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOON_S = 40.0
CHAT = "/deep/v1/chat/completions"
ADMIN_KEY = "an-admin-key-0123456789"
ADDED = "sk-added-0123456789abcdef"
URL_SECRET = "a-secret-in-a-url-0123456789"
TEMPLATE = (
    "{% for m in messages %}WIRED {% if m.content is string %}text {{ m.content }}"
    "{% else %}parts {% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
"""A loop over the content: without the flag the template gets parts."""


@dataclass
class Fleet:
    worker: Running
    frontend: Running
    origin: Origin
    redis: Redis
    home: Path
    key: Key

    @property
    def address(self) -> str:
        return f"ipc://{self.home}/w.sock"

    def ask(self, content: object, key: str = ACME, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
        return self.frontend.post(CHAT, body, key)

    def refusal(self, content: object, key: str = ACME, **fields: object) -> tuple[int, str]:
        """The status of a request that is refused, and why."""
        reply = self.ask(content, key, **fields)
        assert reply.status_code >= 400, reply.text
        return reply.status_code, reply.json()["error"]["message"]

    @contextmanager
    def waiting(self, count: int, content: object = "hello", **fields: object) -> Iterator[None]:
        """So many requests of acme that are not answered."""
        with self._sent(count, ACME, content, seed=HOLD, **fields):
            until(lambda: self.frontend.metric("semel_requests_waiting") == count, SOON_S)
            yield
        until(lambda: self.frontend.metric("semel_requests_in_flight") == 0, SOON_S)

    @contextmanager
    def streams(self, count: int, key: str) -> Iterator[None]:
        """So many answers that have begun, one after the other."""
        with ExitStack() as stack:
            for _ in range(count):
                (one,) = stack.enter_context(self._sent(1, key, "hello", stream=True, max_tokens=500))
                seen = b""
                while b"data: " not in seen:
                    seen += (piece := one.recv(65_536))
                    assert piece, seen
            yield

    @contextmanager
    def _sent(self, count: int, key: str, content: object, **fields: object) -> Iterator[list[Any]]:
        body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        sockets = [self.frontend.connect() for _ in range(count)]
        try:
            for one in sockets:
                one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            yield sockets
        finally:
            for one in sockets:
                one.close()


@pytest.fixture(scope="module")
def fleet(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home, ignored = tmp_path_factory.mktemp("served"), shutil.ignore_patterns("*.safetensors")
    model = shutil.copytree(tiny("qwen2-vl"), home / "model", ignore=ignored)  # the checks would miss its weights
    authority, key = Authority.create(home / "tls"), create_key(home / "key")
    _write_secret(home / "password", "a password")
    _write_secret(home / "admin-key", ADMIN_KEY)
    _write_secret(home / "keys", f"acme {ACME}\nbeta {BETA}\n")
    (home / "chat.jinja").write_text(TEMPLATE)
    (home / "media").mkdir()
    (home / "worker.yaml").write_text(CONFIG["served worker"])
    (home / "frontend.yaml").write_text(CONFIG["served frontend"])
    with running_redis(home, password="a password", authority=authority) as redis, origin() as server:
        store_port = redis.address.port
        assert store_port is not None
        at = Places(home, model, origin_port=server.port, store_port=store_port)
        (home / "workers").write_text(f"{at.worker}\n")
        worker_words = ["wired", "worker", model, *flags_as_words(served_worker(at))]
        frontend_words = ["frontend", model, *flags_as_words(served_frontend(at))]
        admin, metrics = f"http://127.0.0.3:{at.admin_port}", f"http://127.0.0.3:{at.metrics_port}"
        url = f"http://127.0.0.2:{at.port}"
        with (
            running("worker", home, *worker_words, url=admin, metrics_url=admin) as worker,
            running("frontend", home, *frontend_words, url=url, metrics_url=metrics) as frontend,
        ):
            worker.until_ready()
            frontend.until_ready()
            yield Fleet(worker, frontend, server, redis, home, key)


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def image(width: int = 60, height: int = 60, *, seed: int | None = None) -> bytes:
    buffer = io.BytesIO()
    pixels = b"\x40" * (3 * width * height) if seed is None else Random(seed).randbytes(3 * width * height)
    Image.frombytes("RGB", (width, height), pixels).save(buffer, "PNG", compress_level=0 if seed is not None else 6)
    return buffer.getvalue()


def parts(*data: bytes, kind: str = "image", mime: str = "image/png") -> list[dict[str, Any]]:
    urls = (f"data:{mime};base64,{base64.b64encode(one).decode()}" for one in data)
    return [{"type": f"{kind}_url", f"{kind}_url": {"url": url}} for url in urls]


def document(data: bytes, **options: object) -> dict[str, Any]:
    url = f"data:application/pdf;base64,{base64.b64encode(data).decode()}"
    return {"type": "file", "file": {"file_data": url, **options}}


def at_url(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def movie(frames: int, rate: int, side: int = 56) -> list[dict[str, Any]]:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for number in range(frames):
            pixels = np.full((side, side, 3), number % 200, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return parts(buffer.getvalue(), kind="video", mime="video/mp4")


def test_a_frontend_is_where_its_flags_say_with_the_workers_of_its_file(fleet: Fleet) -> None:
    assert fleet.ask("hello").status_code == 200
    assert fleet.frontend.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}, ACME).status_code == 200
    port = httpx.URL(fleet.frontend.url).port
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    with pytest.raises(httpx.ConnectError):
        httpx.get(fleet.frontend.metrics_url.replace("127.0.0.3", "127.0.0.1"))


def test_the_prefix_of_a_config_file_is_taken_off(fleet: Fleet) -> None:
    with fleet.frontend.client(ACME) as client:
        assert client.get("/deep/v1/models").json()["data"][0]["id"] == str(fleet.home / "model")
        assert client.get("/other/v1/models").status_code == 404


def test_the_chat_template_and_its_format_are_the_operators(fleet: Fleet) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
    tokens = fleet.frontend.post("/tokenize", body, ACME).json()["tokens"]
    assert fleet.frontend.post("/detokenize", {"tokens": tokens}, ACME).json()["prompt"] == "WIRED text hello"


def test_the_keys_of_the_file_are_needed(fleet: Fleet) -> None:
    assert fleet.ask("hello", BETA).status_code == 200
    assert fleet.ask("hello", "sk-other").status_code == 401


def test_a_key_that_is_put_into_the_file_is_taken_without_a_restart_and_one_taken_out_is_not_S25(fleet: Fleet) -> None:
    assert fleet.ask("hello", ADDED).status_code == 401
    keys = f"acme {ACME}\nbeta {BETA}\n"
    replace_keys(fleet, f"{keys}acme {ADDED}\n")
    until(lambda: fleet.ask("hello", ADDED).status_code == 200, SOON_S, every_s=0.5)  # refusals are slowed down
    replace_keys(fleet, keys)
    until(lambda: fleet.ask("hello", ADDED).status_code == 401, SOON_S, every_s=0.5)
    assert fleet.ask("hello", ACME).status_code == 200


def replace_keys(fleet: Fleet, text: str) -> None:
    _write_secret(fleet.home / "new", text)
    (fleet.home / "new").replace(fleet.home / "keys")


def test_only_the_tenant_with_priority_may_set_one(fleet: Fleet) -> None:
    assert fleet.ask("hello", ACME, priority=1).status_code == 200
    status, why = fleet.refusal("hello", BETA, priority=1)
    assert status == 400 and "--priority-tenant" in why


def test_an_adapter_is_there_for_its_tenants_alone_S12(fleet: Fleet) -> None:
    assert fleet.ask("hello", ACME, model="law").json()["model"] == "law"
    status, why = fleet.refusal("hello", BETA, model="law")
    assert (status, why) == (404, fleet.refusal("hello", BETA, model="war")[1].replace("war", "law"))
    with fleet.frontend.client(ACME) as theirs, fleet.frontend.client(BETA) as others:
        mine, none = ([one["id"] for one in it.get("/deep/v1/models").json()["data"]] for it in (theirs, others))
    assert mine == [*none, "law"]


def test_an_unknown_field_is_refused(fleet: Fleet) -> None:
    status, why = fleet.refusal("hello", no_such_field_at_all=1)
    assert status == 400 and "no_such_field_at_all" in why


def test_metrics_are_by_tenant(fleet: Fleet) -> None:
    with fleet.waiting(1):
        assert 'semel_tenant_requests_waiting{tenant="acme"} 1.0' in fleet.frontend.page()


def test_metrics_are_not_by_worker(fleet: Fleet) -> None:
    page = fleet.frontend.page()
    assert "semel_workers" in page and "semel_worker_connected{" not in page


def test_both_processes_name_their_cell_and_log_in_json(fleet: Fleet) -> None:
    for one in (fleet.frontend, fleet.worker):
        assert 'semel_cell_info{cell="c1"} 1.0' in one.page()
        lines = [json.loads(line) for line in one.text.splitlines() if line.startswith("{")]
        own = [line for line in lines if line.get("pid") == one.process.pid]
        assert own and all(line["cell"] == "c1" for line in own)
    assert '"GET' not in fleet.frontend.text and "/v1/models" not in fleet.frontend.text, "there is no access log"


def test_spans_of_both_go_to_the_collector(fleet: Fleet) -> None:
    """A frontend's go in batches, and a worker's with vLLM's: the engine gets the same address."""
    assert fleet.ask("hello").status_code == 200
    until(lambda: "/v1/traces" in fleet.origin.asked, SOON_S)
    arguments = fleet.worker.recorded["arguments"]
    assert arguments["otlp_traces_endpoint"] == repr(f"http://127.0.0.1:{fleet.origin.port}/v1/traces")


def test_media_come_from_the_named_host_and_network_each_time(fleet: Fleet) -> None:
    fleet.origin.files["/a.png"] = image()
    url = f"http://localhost:{fleet.origin.port}/a.png"
    for _ in range(2):
        reply = fleet.ask(at_url(url))
        assert reply.status_code == 200, reply.text
    assert fleet.origin.asked.count("/a.png") == 2, "--media-cache-gb is 0"


def test_media_come_from_no_other_host_and_the_log_has_no_query_of_a_url(fleet: Fleet) -> None:
    """The network of both is allowed."""
    reply = fleet.ask(at_url(f"http://127.0.0.2:{fleet.origin.port}/x.png?key={URL_SECRET}"))
    assert reply.status_code >= 400 and reply.json()["error"]["code"] == "media_url_not_allowed", reply.text
    assert URL_SECRET not in fleet.frontend.text


def test_a_host_that_does_not_answer_is_given_up(fleet: Fleet) -> None:
    _, why = fleet.refusal(at_url(f"http://localhost:{fleet.origin.port}/slow"))
    assert "4.5 for all of it" in why and "(--media-timeout-s)" in why


def test_files_of_the_folder_are_read_up_to_the_limit(fleet: Fleet) -> None:
    (fleet.home / "media" / "a.png").write_bytes(image(64, 64))
    (fleet.home / "media" / "large.png").write_bytes(image(400, 400, seed=1))
    assert fleet.ask(at_url(f"file://{fleet.home}/media/a.png")).status_code == 200
    assert "400,000 bytes; raise the limit with --max-media-bytes" in str(
        fleet.refusal(at_url(f"file://{fleet.home}/media/large.png"))
    )


def test_uploads_lie_in_the_folder_for_their_time_and_within_its_size(fleet: Fleet) -> None:
    with fleet.frontend.client(ACME) as client:
        reply = client.post("/v1/files", files={"file": ("a.png", image())}, data={"purpose": "vision"}).json()
    assert reply["expires_at"] - reply["created_at"] == 1_000
    assert any(path.is_file() for path in (fleet.home / "store").rglob("*"))
    whole = int(0.05 * 2**30)
    assert fleet.frontend.metric("semel_media_store_capacity_bytes") == whole - whole // 10  # a tenth is for responses


def test_a_response_is_stored_and_continued(fleet: Fleet) -> None:
    """Without the flag the second is 400."""
    body = {"input": "hello", "max_output_tokens": 1}
    first = fleet.frontend.post("/v1/responses", body, ACME).json()
    assert first["store"] is True
    again = fleet.frontend.post("/v1/responses", {**body, "previous_response_id": first["id"]}, ACME)
    assert again.status_code == 200, again.text


def test_an_upload_over_the_limit_is_refused(fleet: Fleet) -> None:
    with fleet.frontend.client(ACME) as client:
        large = {"file": ("large.png", image(400, 400, seed=1))}
        reply = client.post("/v1/files", files=large, data={"purpose": "vision"})
    assert reply.status_code == 413 and "--max-media-bytes" in reply.text, reply.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (parts(image(672, 685)), "(--max-image-pixels)"),
        (parts(image(10, 100)), "each side needs 20 pixels (--min-image-side)"),
        (movie(25, 1), "20 s (--max-video-s)"),
        (movie(60, 30), "50 (--max-video-frames)"),
        (movie(40, 4, 196), "(--max-video-pixels)"),
    ],
    ids=["pixels", "side", "seconds", "frames", "video-pixels"],
)
def test_a_medium_over_a_limit_is_refused(fleet: Fleet, content: object, why: str) -> None:
    assert why in fleet.refusal(content)[1]


@pytest.mark.parametrize(
    ("data", "options", "why"),
    [
        (pdf([page_of(1)] * 4), {}, "is 3 (--max-document-pages)"),
        (pdf([page_of(1)]) + bytes(9_000), {}, "is 9,000 (--max-document-bytes)"),
        (pdf([page_of(1)]), {"dpi": 101}, "is 100 (--max-document-dpi)"),
    ],
    ids=["pages", "bytes", "dpi"],
)
def test_a_document_over_a_limit_is_refused(fleet: Fleet, data: bytes, options: dict[str, object], why: str) -> None:
    status, words = fleet.refusal([document(data, **options)])
    assert status == 413 and why in words
    assert fleet.ask([document(pdf([page_of(1)] * 3), dpi=100)]).status_code == 200


def test_a_medium_within_the_limits_is_taken(fleet: Fleet) -> None:
    assert fleet.ask(parts(image(100, 40))).status_code == 200
    assert fleet.ask(movie(20, 10)).status_code == 200


def test_a_video_is_read_as_its_request_says_within_the_limits_and_a_repeat_is_not_decoded(fleet: Fleet) -> None:
    """Another rate is another item; what was answered once costs no decode."""

    def decodes(content: object, **video: object) -> float:
        before = fleet.frontend.metric("semel_pool_decoded_total")
        reply = fleet.ask(content, media_io_kwargs={"video": video})
        assert reply.status_code == 200, reply.text
        return fleet.frontend.metric("semel_pool_decoded_total") - before

    seen, frames = movie(40, 10), base64.b64encode(image(56, 56)).decode()
    assert [decodes(seen, fps=1), decodes(seen, fps=1), decodes(seen, fps=2), decodes(seen, fps=2)] == [1, 0, 1, 0]
    many = [{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join([frames] * 60)}}]
    assert [decodes(many, fps=4), decodes(many, fps=4), decodes(many, num_frames=8)] == [1, 0, 1]
    assert "20 s (--max-video-s)" in fleet.refusal(many)[1]  # 32 frames, one a second
    assert "the list has 60 frames; the limit is 50 (--max-video-frames)" in str(
        fleet.refusal(many, media_io_kwargs={"video": {"num_frames": -1}})
    )
    assert "used, and total_num_frames" in str(
        fleet.refusal(many, media_io_kwargs={"video": {"frames_indices": [1], "num_frames": 4}})
    )


def test_an_image_that_no_prompt_can_have_is_refused_where_it_is_made(fleet: Fleet) -> None:
    """The limit of its offer: without it the prompt is found too long later, in other words."""
    _, why = fleet.refusal(parts(image()), mm_processor_kwargs={"min_pixels": 460_000})
    assert "the image alone has" in why and "the model takes 600" in why


def test_images_that_no_prompt_can_have_are_refused_before_it_is_put_together(fleet: Fleet) -> None:
    two = parts(image(), image(61, 61))
    _, why = fleet.refusal(two, mm_processor_kwargs={"min_pixels": 784 * 400})
    assert "the items alone have" in why and "the model takes 600" in why


def test_the_pool_has_its_processes_with_their_memory(fleet: Fleet) -> None:
    assert fleet.frontend.metric("semel_pool_processes") == usable_cores() + 1
    children = psutil.Process(fleet.frontend.process.pid).children(recursive=True)
    limits = [resource.prlimit(child.pid, resource.RLIMIT_DATA)[0] for child in children]
    assert sum(3 * 2**30 <= limit < 4 * 2**30 for limit in limits) >= usable_cores() + 1, limits  # and what is loaded


def test_the_feature_cache_is_in_the_process_and_of_its_size(fleet: Fleet) -> None:
    page = fleet.frontend.page()
    assert fleet.frontend.metric("semel_mm_cache_capacity_bytes") == 2**29
    assert "semel_leases" not in page, "a shared one lends"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" + b" " * 1_900_000 + b"]", "1,800,000 bytes; raise it with --max-body-bytes"),
        (json.dumps(["a word " * 60_000]).encode(), "--max-body-text-bytes"),
        (json.dumps([1] * 3_000).encode(), "--max-body-values"),
    ],
    ids=["bytes", "text", "values"],
)
def test_a_body_over_a_limit_is_refused(fleet: Fleet, body: bytes, why: str) -> None:
    with fleet.frontend.client(ACME) as client:
        reply = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 413 and why in reply.text


def test_a_request_over_its_bytes_is_refused(fleet: Fleet) -> None:
    status, why = fleet.refusal(parts(image(650, 600, seed=2)))
    assert status == 413 and "--max-request-media-bytes" in why


def test_the_bytes_of_all_requests_are_limited(fleet: Fleet) -> None:
    assert fleet.frontend.metric("semel_media_in_flight_limit_bytes") == 24 * 2**20


def test_requests_over_those_that_may_wait_are_refused(fleet: Fleet) -> None:
    with fleet.waiting(2):
        status, why = fleet.refusal("hello")
    assert status == 429 and "--max-waiting-requests" in why


def test_requests_in_flight_over_the_limits_are_refused_and_tenants_take_no_turns(fleet: Fleet) -> None:
    """The engine's window has room for one: with turns, the other answers would not begin."""
    with fleet.streams(3, ACME):
        status, why = fleet.refusal("hello", ACME)
        assert status == 429 and "--max-tenant-requests" in why
        with fleet.streams(2, BETA):
            status, why = fleet.refusal("hello", BETA)
            assert status == 429 and "--max-requests" in why
    until(lambda: fleet.frontend.metric("semel_requests_in_flight") == 0, SOON_S)


def test_a_request_that_takes_too_long_is_ended(fleet: Fleet) -> None:
    status, why = fleet.refusal("hello", seed=HOLD)
    assert status == 504 and "longer than 20 s; raise it with --request-timeout-s" in why


def test_connections_of_one_address_are_limited(fleet: Fleet) -> None:
    before = fleet.frontend.metric("semel_connections_closed_total")
    sockets = [fleet.frontend.connect() for _ in range(40)]
    try:
        until(lambda: fleet.frontend.metric("semel_connections_closed_total") >= before + 10, SOON_S)
    finally:
        for one in sockets:
            one.close()


def test_a_connection_without_a_first_request_is_closed_and_one_that_is_idle_too(fleet: Fleet) -> None:
    """Long before the 10 s and 75 s that there are without the flags."""
    for sent, within_s in ((b"", 8.0), (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 60.0)):
        with fleet.frontend.connect() as connection:
            connection.settimeout(within_s)
            connection.sendall(sent)
            while connection.recv(65_536):
                pass


def test_the_engine_is_started_with_what_the_worker_was(fleet: Fleet) -> None:
    recorded = fleet.worker.recorded
    arguments, grammars = recorded["arguments"], recorded["grammars"]
    assert (recorded["processor"], arguments["trust_remote_code"], arguments["max_num_seqs"]) == ("hf", "True", "7")
    assert grammars["max_schema_bytes"] == 111 and grammars["max_request_bytes"] == 222
    assert grammars["compile_s"] == 1.5 and grammars["kinds"] == "schemas"


def test_the_encoder_is_set_as_the_worker_was(fleet: Fleet) -> None:
    arguments = fleet.worker.recorded["arguments"]
    assert (arguments["scheduler_cls"], arguments["worker_cls"]) == (repr(SCHEDULER), repr(GUARDED_WORKER))
    assert "5000" in arguments["ec_manager_config"]
    assert str(2**29) in arguments["ec_transfer_config"] and str(64 * 2**20) in arguments["ec_transfer_config"]


def test_the_embedding_store_is_reached_by_password_and_certificate_and_its_entries_expire(fleet: Fleet) -> None:
    until(lambda: bool(fleet.redis.all_keys()), SOON_S)
    left = [fleet.redis.ask("TTL", name) for name in fleet.redis.all_keys()]
    assert all(isinstance(one, int) and 600 < one < 2 * 1_234 for one in left), left


def test_the_embedding_store_is_used_as_the_worker_was_told(fleet: Fleet) -> None:
    recorded = fleet.worker.recorded
    assert (recorded["publish_after"], recorded["fetch_s"]) == (7, 0.077)


def reset(fleet: Fleet, key: str = ADMIN_KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{fleet.worker.url}/v1/mm_cache/reset", headers=headers, timeout=30)


def test_the_admin_address_wants_its_key(fleet: Fleet) -> None:
    assert [reset(fleet).status_code, reset(fleet, "another-key-0123456789").status_code] == [200, 401]


@asynccontextmanager
async def five_more(fleet: Fleet) -> AsyncIterator[list[Status]]:
    """Five frontends of ours at the worker, and what it reports to them."""
    reports: list[Status] = []

    async def listen(link: FrontendLink) -> None:
        async for event in link:
            if isinstance(event, Status):
                reports.append(event)  # noqa: PERF401 it is read meanwhile

    with zmq.Context() as context:
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[None]] = []
            for number in range(5):
                link = FrontendLink(fleet.address, key=fleet.key, frontend_id=f"f{number}", context=context)
                await stack.enter_async_context(link)
                async with asyncio.timeout(SOON_S):
                    async for event in link:
                        if isinstance(event, Connected):
                            break
                tasks.append(asyncio.create_task(listen(link)))
            try:
                yield reports
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_worker_reports_its_load_as_seldom_as_the_flag_says(fleet: Fleet) -> None:
    """What is forgotten on demand is reported at once: so reports do come."""
    async with five_more(fleet) as reports:
        reports.clear()
        for number in range(3):
            content = parts(image(80 + number, 60))
            assert (await asyncio.to_thread(fleet.ask, content, max_tokens=30)).status_code == 200
        rounds = [report for report in reports if report.since is not None]  # not the first one to each
        assert len(rounds) <= 5, "with 0.25 s between two rounds each of them hears of each request"
        reports.clear()
        assert (await asyncio.to_thread(reset, fleet)).status_code == 200
        async with asyncio.timeout(SOON_S):
            while len(reports) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_worker_takes_so_many_frontends(fleet: Fleet) -> None:
    """Six: its own and five of ours."""
    async with five_more(fleet), FrontendLink(fleet.address, key=fleet.key, frontend_id="one-too-many"):
        async with asyncio.timeout(SOON_S):
            while "(--max-frontends)" not in fleet.worker.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def test_an_item_that_takes_too_long_is_given_up(fleet: Fleet) -> None:
    """The processes of the pool are stopped: 6 s, and 6 s more for a second one. Without the flag 20 s come first."""
    children = psutil.Process(fleet.frontend.process.pid).children(recursive=True)
    stopped = [child for child in children if not child.children()]  # not what they are forked from
    for one in stopped:
        one.suspend()
    try:
        _, why = fleet.refusal(parts(image(70, 50)))
    finally:
        for one in stopped:
            if one.is_running():
                one.resume()
    assert "stood still" in why


def test_a_worker_that_fails_once_is_ejected(fleet: Fleet) -> None:
    assert fleet.frontend.metric("semel_worker_ejections_total") == 0
    for key in (ACME, BETA):  # one tenant alone ejects nobody
        assert fleet.ask("hello", key, seed=FAIL).status_code == 500
    assert fleet.frontend.metric("semel_worker_ejections_total") >= 1


def test_a_frontend_without_a_pool_is_not_ready(fleet: Fleet) -> None:
    """No process can be started: it may have no more files."""
    pid = fleet.frontend.process.pid
    children = psutil.Process(pid).children(recursive=True)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    ready = f"{fleet.frontend.metrics_url}/ready"
    with httpx.Client(timeout=30) as client:
        assert client.get(ready).json()["ready"], "and the connection stays: no other can be taken"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds(), before[1]))
        try:
            for child in children:
                child.kill()
            until(lambda: client.get(ready).status_code == 503, SOON_S)
            assert "no preprocessing process can be started" in client.get(ready).json()["reason"]
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        until(lambda: client.get(ready).status_code == 200, 3 * SOON_S)  # it tries again every 30 s


def test_an_engine_without_progress_ends_its_worker(fleet: Fleet) -> None:
    with pytest.raises(httpx.HTTPError), fleet.frontend.client(ACME) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "seed": HANG}
        client.post(CHAT, json=body, timeout=4)  # long enough for the engine to get it
    until(lambda: fleet.worker.process.poll() is not None, SOON_S)
    assert fleet.worker.process.returncode != 0
    assert "--engine-progress-s" in fleet.worker.text or "10 s" in fleet.worker.text


def test_a_frontend_that_ends_waits_as_long_as_its_flags_say(fleet: Fleet) -> None:
    fleet.frontend.end()
    assert "takes requests for 0.5 s (--drain-delay-s)" in fleet.frontend.text
    assert "within 3.5 s" in fleet.frontend.text
