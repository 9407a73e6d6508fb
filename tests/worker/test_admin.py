"""The admin address as its operator meets it: a real server, real clients, real bodies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from openai import APIStatusError, OpenAI

from semel.client import contract, inject
from semel.core import Digest, Feature, Field, Modality
from semel.errors import ConfigError, MediaTooLarge, NotReady
from semel.interchange.injection import Outcome, decode
from semel.interchange.safetensors import write
from semel.settings.secrets import create_key
from semel.telemetry import Meter
from semel.telemetry.meter import Metric
from semel.web.listener import bind
from semel.worker.admin import AdminKey, create_admin_app
from tests.worker.stored import CONTRACT, Store, clip, digest_of, image, wrong

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parent.parent.parent
KEY = "an-operator-s-key-0123456789"
INJECT, RESET = "/v1/mm_cache/inject", "/v1/mm_cache/reset"
OCTETS = {"content-type": "application/octet-stream"}
BEARER = {"authorization": f"Bearer {KEY}"}
LABELS = ("model", "modality", "tier")
QUERIES = Metric("semel_mm_cache_queries_total", "Items that were looked up.", LABELS)
HITS = Metric("semel_mm_cache_hits_total", "Items that were there.", LABELS)


@dataclass
class Served:
    """A running admin address over a store."""

    url: str
    store: Store
    meter: Meter = field(default_factory=Meter)

    def metric(self, name: str, modality: Modality = "image") -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(rf'^{name}{{modality="{modality}",model="tiny",tier="worker"}} (\S+)$', text, re.MULTILINE)
        return float(found[0]) if found else 0.0

    def post(self, path: str, content: Any = b"", **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", content=content, headers=OCTETS | BEARER | headers, timeout=20)

    def inject(self, features: dict[Digest, Feature], key: str = KEY) -> list[Outcome]:
        return inject(self.url, features, key=key, timeout_s=20)


@contextlib.contextmanager
def serving(
    store: Store | None = None,
    *,
    key: AdminKey | str | None = KEY,
    max_body_bytes: int = 1 << 20,
    reset: Callable[[], Awaitable[None]] | None = None,
    idle_s: float = 20.0,
    turn_s: float = 20.0,
    reason: Callable[[], str] = str,
    host: str = "127.0.0.1",
) -> Iterator[Served]:
    """The admin app under uvicorn, in a thread with a loop of its own."""
    store = store or Store()
    meter = Meter()

    def count(modality: Modality, hit: bool) -> None:
        meter.count(QUERIES, "tiny", modality, "worker")
        if hit:
            meter.count(HITS, "tiny", modality, "worker")

    app = create_admin_app(
        store,
        meter,
        key=key,
        count=count,
        reset=reset or store.reset,
        max_body_bytes=max_body_bytes,
        idle_s=idle_s,
        turn_s=turn_s,
        reason=reason,
    )
    bound = bind(host, 0)
    bound.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}", store, meter)
    finally:
        server.should_exit = True
        thread.join(20)
        bound.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def served(running: Served) -> Served:
    """A server whose store is empty again."""
    running.store.held.clear()
    running.store.failures = {}
    return running


def test_injected_features_are_held_and_what_is_sent_again_is_a_hit_D6_D8(served: Served) -> None:
    before = served.metric(QUERIES.name), served.metric(HITS.name), served.metric(QUERIES.name, "audio")
    features = {digest_of(1): image(3), digest_of(2): clip(4), digest_of(3): wrong(), digest_of(4): image(101)}
    features[digest_of(5)] = Feature("image", {}, image(1).layout)
    outcomes = {outcome.digest: outcome for outcome in served.inject(features)}
    assert [outcomes[digest_of(n).hex()].status for n in range(1, 6)] == [
        "stored",
        "stored",
        "refused",
        "skipped",
        "skipped",
    ]
    assert served.store.held.keys() == {digest_of(1), digest_of(2)}
    assert bytes(served.store.held[digest_of(1)].tensors["pixel_values"].data) == bytes(3)
    assert served.inject({digest_of(1): image(3)}) == [Outcome(digest_of(1).hex(), "held")]
    after = served.metric(QUERIES.name), served.metric(HITS.name), served.metric(QUERIES.name, "audio")
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == (2, 1, 1)


def test_with_caching_off_injecting_harms_nothing_and_moves_no_counter_D6() -> None:
    with serving(Store.of(0)) as served:
        (outcome,) = served.inject({digest_of(1): image(3)})
        assert (outcome.status, outcome.reason) == ("skipped", "the engine's item cache is off")
        assert served.metric(QUERIES.name) == 0


def test_what_a_file_is_called_does_not_matter_but_that_it_is_one_does(served: Served) -> None:
    body = b"".join(write({digest_of(1): image(3)}))
    for content_type in ("application/x-safetensors", "Application/Octet-Stream; charset=binary"):
        assert served.post(INJECT, body, **{"content-type": content_type}).status_code == 200
    answer = served.post(INJECT, body, **{"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_type")


@pytest.mark.parametrize("path", [INJECT, RESET])
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer ü"],
)
def test_without_the_right_key_nothing_is_injected_or_reset_D7_S17(
    served: Served, path: str, authorization: str | None
) -> None:
    body = b"".join(write({digest_of(1): image(3)}))
    headers = httpx.Headers(OCTETS if authorization is None else OCTETS | {"authorization": authorization}, "latin-1")
    resets = served.store.resets
    answer = httpx.post(f"{served.url}{path}", content=body, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "--admin-key-file" in answer.json()["error"]["message"]
    assert not served.store.held
    assert served.store.resets == resets


@pytest.mark.parametrize("path", [INJECT, RESET])
def test_a_worker_without_an_admin_key_says_which_flag_to_set_D7(path: str) -> None:
    with serving(key=None) as served:
        answer = served.post(path, b"".join(write({digest_of(1): image(3)})))
        assert answer.status_code == 403
        assert "--admin-key-file" in answer.json()["error"]["message"]
        assert served.post(path, b"", authorization="Bearer None").status_code == 403
        assert not served.store.held
        with pytest.raises(ConfigError, match="--admin-key-file"):
            served.inject({digest_of(1): image(3)})


@pytest.mark.parametrize("key", ["", "short", "with a blank in it 0123456789", "ünprintable-0123456789", "a\nb" * 9])
def test_an_admin_key_that_could_be_guessed_or_not_be_sent_is_refused_S17(key: str) -> None:
    with pytest.raises(ConfigError, match="an admin key has at least 16"):
        create_admin_app(Store(), Meter(), key=key, count=lambda *_: None, reset=Store().reset)


def test_metrics_and_health_need_no_key(served: Served) -> None:
    served.meter.count(Metric("semel_seen_total", "Seen."))
    assert httpx.get(f"{served.url}/health").status_code == 200
    answer = httpx.get(f"{served.url}/metrics")
    assert "semel_seen_total 1.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


def test_reset_forgets_what_was_injected_D5(served: Served) -> None:
    served.inject({digest_of(1): image(3)})
    assert served.post(RESET).json() == {"reset": True}
    assert not served.store.held
    assert served.inject({digest_of(1): image(3)})[0].status == "stored"


def test_a_reset_that_fails_says_so_and_not_more_S7() -> None:
    async def reset() -> None:
        raise RuntimeError("secret detail")

    with serving(reset=reset) as served:
        answer = served.post(RESET)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["code"] == "internal_error"


def pieces(total: int, size: int = 1 << 16) -> Iterator[bytes]:
    for start in range(0, total, size):
        yield bytes(min(size, total - start))


def test_a_body_over_the_limit_is_refused_however_it_is_announced_S4_S10() -> None:
    with serving(max_body_bytes=1_000) as served:
        assert served.post(INJECT, bytes(1_000)).status_code == 400  # read, and no safetensors file
        chunked = served.post(INJECT, pieces(1_001))
        announced = served.post(INJECT, bytes(1_001))
        for answer in (chunked, announced):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "media_too_large")
        with pytest.raises(MediaTooLarge, match="1,000 bytes; send the features in several"):
            served.inject({digest_of(1): image(2_000)})


@contextlib.contextmanager
def stuck(served: Served) -> Iterator[socket.socket]:
    """A client with the key that announces half a terabyte and sends nothing of it."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            f"POST {INJECT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {1 << 39}\r\n\r\n".encode()
        )
        assert httpx.get(f"{served.url}/health").status_code == 200
        yield connection


def test_a_body_that_is_announced_and_never_comes_is_given_up_on_and_the_next_is_taken_S4_S10() -> None:
    with serving(max_body_bytes=1 << 40, idle_s=0.2) as served, stuck(served) as connection:
        assert served.inject({digest_of(1): image(3)})[0].status == "stored"
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")


def test_a_client_that_goes_away_lets_the_next_one_in() -> None:
    with serving(max_body_bytes=1 << 40) as served:
        with stuck(served):
            pass
        assert served.inject({digest_of(1): image(3)})[0].status == "stored"


def test_who_waits_too_long_for_another_s_body_is_told_to_come_again_S18() -> None:
    with serving(max_body_bytes=1 << 40, turn_s=0.1) as served, stuck(served):
        answer = served.post(INJECT, b"".join(write({digest_of(1): image(3)})))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert answer.headers["retry-after"] in {"1", "2"}, "scattered"
        with pytest.raises(NotReady, match="another injection"):
            served.inject({digest_of(1): image(3)})


def test_unknown_routes_and_methods_are_refused_in_openai_s_shape(served: Served) -> None:
    client = OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)
    with client, pytest.raises(APIStatusError) as refused:
        client.models.list()
    assert refused.value.status_code == 404
    assert httpx.get(f"{served.url}{INJECT}").json()["error"]["code"] == "invalid_request"


def test_many_at_the_same_time_are_taken_in_one_by_one_and_each_counted_once_D8(served: Served) -> None:
    before = served.metric(QUERIES.name), served.metric(HITS.name)
    outcomes: list[list[Outcome]] = []

    def run() -> None:
        outcomes.append(served.inject({digest_of(n): image(3) for n in range(1, 11)}))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    told = [outcome.status for answer in outcomes for outcome in answer]
    assert (told.count("stored"), told.count("held")) == (10, 70)
    assert served.metric(QUERIES.name) - before[0] == 80
    assert served.metric(HITS.name) - before[1] == 70


def test_the_log_tells_who_injected_and_never_the_key(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    served.inject({digest_of(1): image(3)})
    with pytest.raises(ConfigError):
        served.inject({digest_of(1): image(3)}, key="a-guess-that-is-wrong")
    assert "127.0.0.1:" in caplog.text
    assert "injected 1 items with 3 bytes: 1 stored" in caplog.text
    assert KEY not in caplog.text
    assert "a-guess" not in caplog.text


def test_every_admin_action_leaves_an_audit_line_with_who_what_where_and_the_result(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Control: metrics and probes, which change nothing, leave none."""
    caplog.set_level(logging.INFO)
    served.post(RESET)
    served.inject({digest_of(1): image(3)})
    served.post(RESET, authorization="Bearer a-guess-that-is-wrong")
    served.post(INJECT, b"no file", **{"content-type": "text/plain"})
    for path in ("/health", "/metrics"):
        httpx.get(f"{served.url}{path}")
    lines = [record for record in caplog.records if record.name == "semel.audit"]
    fields = [record.fields for record in lines]  # type: ignore[attr-defined]
    assert [(one["action"], one["who"], one["result"]) for one in fields] == [
        ("reset", "the admin key", "200"),
        ("inject", "the admin key", "200"),
        ("reset", "nobody", "refused 401"),
        ("inject", "the admin key", "refused 415"),
    ]
    assert all(one["peer"].startswith("127.0.0.1:") for one in fields)
    assert lines[0].getMessage().startswith("reset by the admin key from 127.0.0.1:")
    assert KEY not in caplog.text


def test_the_contract_is_told_to_whoever_has_the_key_D6(served: Served) -> None:
    assert contract(served.url, key=KEY) == CONTRACT
    with pytest.raises(ConfigError, match="--admin-key-file"):
        contract(served.url, key="a-guess-that-is-wrong")


def test_no_proxy_of_the_environment_sees_the_key(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert served.inject({digest_of(1): image(3)})[0].status == "stored"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_program_in_the_docs_runs_as_it_is_written_D6(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api/injection.md").read_text(), re.DOTALL)
    create_key(tmp_path / "fleet.key")
    admin = create_key(tmp_path / "admin.key")
    fields = {"pixel_values": Field("float32", (None, None)), "image_grid_thw": Field("int64", (3,))}
    expected = replace(CONTRACT, fields={"image": fields}, max_embeds=4_096, cache_bytes=1 << 30)
    with serving(Store(expected), key=admin.secret.hex(), max_body_bytes=1 << 30) as served:
        places = {
            "docs/once.png": ROOT / "docs/once.png",
            "/tmp/tiny-vl": tiny("qwen2-vl"),
            "http://127.0.0.1:9100": served.url,
        }
        for written, here in places.items():
            assert written in program
            program = program.replace(written, str(here))
        (tmp_path / "program.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        (held,) = served.store.held
        assert done.stdout.split() == [held.hex()[:12], "stored"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_command_in_the_docs_runs_as_it_is_written_D6(served: Served, tmp_path: Path) -> None:
    (command,) = re.findall(r"\$ (curl .*?)\n\{", (ROOT / "docs/api/injection.md").read_text(), re.DOTALL)
    (tmp_path / "admin.key").write_text(KEY + "\n")
    (tmp_path / "features.safetensors").write_bytes(b"".join(write({digest_of(1): image(3)})))
    here = command.replace("http://127.0.0.1:9100", served.url).replace("curl ", "curl -s ", 1)
    done = subprocess.run(["sh", "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert decode(done.stdout.encode()) == [Outcome(digest_of(1).hex(), "stored")]


def test_a_worker_is_ready_while_it_takes_requests_and_says_why_it_does_not() -> None:
    reasons = [""]
    with serving(reason=lambda: reasons[0]) as served:
        ready = httpx.get(f"{served.url}/ready", timeout=20)
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "reason": None})
        reasons[0] = "the worker is shutting down"
        ready = httpx.get(f"{served.url}/ready", timeout=20)
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "reason": reasons[0]})
        assert httpx.get(f"{served.url}/health", timeout=20).status_code == 200


def outside() -> str:
    """An address of this machine that is not loopback; no packet is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no other address than loopback")
        return str(one.getsockname()[0])


def test_who_comes_over_a_network_finds_metrics_and_probes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with the key, nor with a header that says that it comes from here."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # what makes uvicorn believe such a header
    host = outside()
    with serving(host="0.0.0.0") as served:
        port = served.url.rpartition(":")[2]
        headers = BEARER | {"X-Forwarded-For": "127.0.0.1"}
        with httpx.Client(base_url=f"http://{host}:{port}", headers=headers, timeout=20, trust_env=False) as stranger:
            for path in ("/metrics", "/health", "/ready"):
                assert stranger.get(path).status_code == 200
            for path in ("/openapi.json", "/v1/mm_cache/contract"):
                assert stranger.get(path).status_code == 403
            for path in ("/v1/mm_cache/inject", "/v1/mm_cache/reset"):
                assert stranger.post(path, headers=OCTETS).status_code == 403
        assert not served.store.held
        assert served.post("/v1/mm_cache/reset").status_code == 200, "over loopback it goes on as before"


def test_a_key_that_is_replaced_is_refused_and_the_new_one_is_taken_S17() -> None:
    """Control: an app that was given the text itself goes on with it."""
    new = "another-key-0123456789"
    key = AdminKey(KEY)
    with serving(key=key) as replaced, serving(key=KEY) as control:

        def statuses(served: Served) -> list[int]:
            keys = (BEARER, {"authorization": f"Bearer {new}"})
            return [served.post("/v1/mm_cache/reset", **headers).status_code for headers in keys]

        assert statuses(replaced) == [200, 401]
        key.replace(new)
        assert statuses(replaced) == [401, 200]
        assert statuses(control) == [200, 401]
        with pytest.raises(ConfigError, match="admin key"):
            key.replace("short")
        assert statuses(replaced) == [401, 200], "a bad one changes nothing"
    assert new not in repr(key)
