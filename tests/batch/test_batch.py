"""Batches against a small server over real sockets: results, repairs, retries, errors by line."""

from __future__ import annotations

import json
import os
import resource
import threading
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from semel.batch.lines import BatchFile
from semel.batch.results import Results
from semel.batch.run import BatchProgress
from semel.batch.schedule import Schedule
from semel.errors import ConfigError, NotReady, ServiceError
from semel.lab.testing.references import ReferenceServer, Rejection, _Handler, serve_references
from tests.batch.files import Batch, chat, data_url, request
from tests.commands import run_main

LINES = [request(f"line-{number}", chat(data_url(number % 5), text=f"{number}")) for number in range(20)]


@pytest.fixture
def server() -> Iterator[ReferenceServer]:
    with serve_references() as made:
        yield made


def test_each_line_has_a_result_in_openais_shape_and_the_server_got_each_body_as_it_stands(
    server: ReferenceServer, tmp_path: Path
) -> None:
    batch = Batch(tmp_path, *LINES)
    state = batch.run(server.url)
    assert (state.done, state.failed, state.answered) == (20, 0, 20)
    results = batch.results
    assert results.keys() == {one["custom_id"] for one in LINES}
    for one in results.values():
        assert one.keys() == {"id", "custom_id", "response", "error"}
        assert one["response"].keys() == {"status_code", "request_id", "body"}
        assert one["response"]["body"]["choices"][0]["message"]["content"] == "word"
        assert "media_ids" not in one["response"]["body"]
    messages = {json.dumps(one["messages"], sort_keys=True) for one in server.expanded}
    assert messages == {json.dumps(one["body"]["messages"], sort_keys=True) for one in LINES}


def uploads(server: ReferenceServer) -> int:
    return sum("base64" in json.dumps(body) for body in server.bodies)


SHARED = [request(str(number), chat(data_url(number // 6), text=f"{number}")) for number in range(36)]


@pytest.fixture
def full_server(server: ReferenceServer, monkeypatch: pytest.MonkeyPatch) -> ReferenceServer:
    """It answers when three requests are there."""
    answer, three = server.answer, threading.Barrier(3)

    def wait(body: dict[str, Any], owner: str) -> dict[str, Any]:
        three.wait(30)
        return answer(body, owner)

    monkeypatch.setattr(server, "answer", wait)
    return server


def test_an_image_that_lines_share_is_uploaded_once_but_for_the_last_that_nothing_else_is_sent_with(
    full_server: ReferenceServer, tmp_path: Path
) -> None:
    Batch(tmp_path, *SHARED).run(full_server.url, concurrency=3)
    assert uploads(full_server) in (6, 7, 8)


def test_mutant_an_order_that_does_not_know_what_is_in_flight_uploads_more(
    full_server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, "add", lambda self, line: self._near.append(line))
    monkeypatch.setattr(Schedule, "take", lambda self: self._begin(self._near.popleft()) if self._near else None)
    Batch(tmp_path, *SHARED).run(full_server.url, concurrency=3)
    assert uploads(full_server) > 8


@pytest.mark.parametrize("cut", [1, 30, 10_000])
def test_a_torn_last_line_is_repaired_and_its_request_sent_again(
    server: ReferenceServer, tmp_path: Path, cut: int
) -> None:
    batch = Batch(tmp_path, *LINES)
    batch.run(server.url)
    written = batch.output.read_bytes()
    batch.output.write_bytes(written[:-cut])
    missing = 20 - written[:-cut].count(b"\n")
    server.bodies.clear()
    assert batch.run(server.url).answered == missing == len(server.bodies)
    assert len(batch.results) == 20


def test_a_batch_that_is_done_sends_nothing_and_one_with_more_lines_sends_these(
    server: ReferenceServer, tmp_path: Path
) -> None:
    batch = Batch(tmp_path, *LINES)
    batch.run(server.url)
    server.bodies.clear()
    batch.write(*LINES, "", request("new", chat()))
    assert batch.run(server.url).done == 21
    assert len(server.bodies) == 1


def test_another_batch_file_a_foreign_file_and_a_second_client_are_refused(
    server: ReferenceServer, tmp_path: Path
) -> None:
    batch = Batch(tmp_path, *LINES[:3])
    batch.run(server.url)
    before = batch.output.read_bytes()
    batch.write(*LINES[1:])
    with pytest.raises(ConfigError, match="result of another line 1"):
        batch.run(server.url)
    opened = Results.open(batch.output)
    with pytest.raises(ConfigError, match="another `semel batch` writes to it"):
        batch.run(server.url)
    opened.close()
    assert batch.output.read_bytes() == before
    batch.output.write_text("my notes\nare here")
    with pytest.raises(ConfigError, match="line 1 is no result"):
        batch.run(server.url)
    assert batch.output.read_text() == "my notes\nare here"
    with pytest.raises(ConfigError, match="line 1 is no result"):
        batch.output.write_text("my notes")
        batch.run(server.url)
    assert batch.output.read_text() == "my notes"


def test_a_full_disk_leaves_no_part_of_a_result_before_the_next_one(server: ReferenceServer, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *LINES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    opened = Results.open(batch.output)
    with closing(BatchFile.open(batch.input)) as file:
        first, second = file.read(2, lambda *_: False)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(ServiceError, match="File too large; then the same command goes on"):
            opened.put(first, "line-0", {"status_code": 200, "body": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    opened.put(second, "line-1", {"status_code": 200})
    opened.close()
    assert batch.run(server.url).answered == 19
    assert len(batch.results) == 20


def test_a_byte_order_mark_is_no_part_of_the_first_line(server: ReferenceServer, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *LINES)
    batch.input.write_bytes(BOM_UTF8 + batch.input.read_bytes().replace(b"\n", b"\r\n"))
    assert (batch.run(server.url).failed, len(batch.results)) == (0, 20)


def test_a_body_that_is_too_deep_to_look_for_files_in_is_an_error_of_its_line(
    server: ReferenceServer, tmp_path: Path
) -> None:
    line = json.dumps(request("deep", chat("file:///a.png", x=0)))
    batch = Batch(tmp_path, line.replace('"x": 0', '"x": ' + "[" * 900 + "]" * 900), *LINES)
    assert batch.run(server.url, allowed_local_media_path=tmp_path).failed == 1
    assert "nested too deeply" in batch.results["deep"]["error"]["message"]


def test_what_is_wrong_with_a_line_is_its_result(server: ReferenceServer, tmp_path: Path) -> None:
    server.returns_ids, server.is_strict = False, False
    batch = Batch(
        tmp_path,
        request("stream", chat(stream=True)),
        request("method", chat(), method="GET"),
        request("elsewhere", chat(), url="//example.com/v1"),
        request("blank", chat(), url="/v1/chat completions"),
        '{"custom_id": "no-body", "url": "/v1/chat/completions"}',
        '{"custom_id": "torn',
        request("unknown", {"messages": [{"role": "user", "content": [{"image_url": {"file_id": "file-0"}}]}]}),
        request("good", chat()),
    )
    server.returns_ids = True
    state = batch.run(server.url)
    results = batch.results
    assert (state.done, state.failed) == (8, 7)
    assert results["good"]["error"] is None
    assert (results["unknown"]["response"]["status_code"], results["unknown"]["error"]) == (404, None)
    assert results["unknown"]["response"]["body"]["error"]["code"] == "unknown_media"
    for name, words in {
        "stream": "stream",
        "method": "method",
        "elsewhere": "url",
        "blank": "url",
        "no-body": "body",
        None: "",
    }.items():
        assert results[name]["response"] is None  # type: ignore[index]
        assert results[name]["error"]["code"] == "invalid_request"  # type: ignore[index]
        assert words in results[name]["error"]["message"]  # type: ignore[index]


def test_lines_whose_results_are_errors_are_sent_again_if_asked_for(server: ReferenceServer, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *LINES, request("never", chat(stream=True)))
    server.faults = [Rejection(403, "forbidden"), Rejection(500, "internal_error")]
    assert batch.run(server.url, concurrency=1).failed == 3
    sent = len(server.bodies)
    assert batch.run(server.url).failed == 3
    assert len(server.bodies) == sent, "errors are results"
    state = batch.run(server.url, retry_errors=True)
    assert (state.failed, len(server.bodies), len(batch.results)) == (1, sent + 2, len(LINES) + 1)
    assert not [*tmp_path.glob("*.new")]


def test_429_and_503_are_tried_again_after_the_time_that_they_name(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = slept(monkeypatch)
    server.faults = [Rejection(429, "busy"), Rejection(503, "not_ready"), Rejection(502, "bad_gateway")]
    monkeypatch.setattr(BaseHTTPRequestHandler, "end_headers", _with_retry_after(BaseHTTPRequestHandler.end_headers))
    assert Batch(tmp_path, *LINES[:3]).run(server.url, concurrency=1).failed == 0
    assert len(server.bodies) == 6
    assert all(7 <= pause < 9 for pause in pauses), pauses
    assert len(pauses) == 3


@pytest.mark.parametrize("value", ["-5", "nan", "0", "Thu, 19 Nov 2026 04:00:00 GMT", ""])
def test_a_server_that_names_no_time_is_tried_again_less_and_less_often(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    pauses = slept(monkeypatch)
    server.faults = [Rejection(429, "busy")] * 3
    end_headers = _with_retry_after(BaseHTTPRequestHandler.end_headers, value)
    monkeypatch.setattr(BaseHTTPRequestHandler, "end_headers", end_headers)
    assert Batch(tmp_path, *LINES[:1]).run(server.url).failed == 0
    assert [pause >= least for pause, least in zip(pauses, (1, 2, 4), strict=True)] == [True] * 3


def _with_retry_after(end_headers: Any, value: str = "7") -> Any:
    def end(self: Any) -> None:
        self.send_header("Retry-After", value)
        end_headers(self)

    return end


def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before requests are sent again, which take no time."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("semel.batch.run._pause", pause)
    return pauses


def test_a_connection_that_is_reset_is_made_again(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept(monkeypatch)
    answer, resets = server.answer, iter(range(3))

    def reset(body: dict[str, Any], owner: str) -> dict[str, Any]:
        if next(resets, None) is not None:
            raise ConnectionResetError
        return answer(body, owner)

    monkeypatch.setattr(server, "answer", reset)
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *_: None)
    assert Batch(tmp_path, *LINES[:2]).run(server.url).failed == 0


def test_a_server_that_is_not_there_ends_the_batch_and_costs_no_line_its_result(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Handler, "do_GET", lambda self: self._send(503, {}))
    batch = Batch(tmp_path, *LINES)
    with pytest.raises(NotReady, match="the same command goes on"):
        batch.run("http://127.0.0.1:1", retry_s=0)
    server.faults = [Rejection(503, "not_ready")] * 20
    with pytest.raises(NotReady, match=r"503.*not_ready"):
        batch.run(server.url, retry_s=0)
    assert not batch.output.read_bytes()
    server.faults.clear()
    assert batch.run(server.url).done == 20


def test_a_line_that_alone_is_refused_for_long_has_that_as_its_result(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept(monkeypatch)
    answer = server.answer

    def refuse(body: dict[str, Any], owner: str) -> dict[str, Any]:
        if body["messages"][0]["content"][-1]["text"] == "1":
            raise Rejection(503, "request_quarantined")
        return answer(body, owner)

    monkeypatch.setattr(server, "answer", refuse)
    batch = Batch(tmp_path, *LINES)
    assert batch.run(server.url, retry_s=0.2, concurrency=4).failed == 1
    assert batch.results["line-1"]["response"]["status_code"] == 503


def test_a_wrong_key_ends_the_batch_and_is_no_result(server: ReferenceServer, tmp_path: Path) -> None:
    server.faults = [Rejection(401, "invalid_api_key")] * 20
    batch = Batch(tmp_path, *LINES)
    with pytest.raises(ConfigError, match="--api-key"):
        batch.run(server.url, key="wrong")
    assert not batch.output.read_bytes()


def test_files_of_the_folder_are_sent_and_no_others(server: ReferenceServer, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "a page.png").write_bytes(os.urandom(3_000))
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "way-out.png").symlink_to(tmp_path / "secret.png")
    names = {"page": "a%20page.png", "again": "a%20page.png", "out": "../secret.png", "link": "way-out.png"}
    lines = [request(name, chat(f"file://{folder}/{path}")) for name, path in names.items()]
    text = request("text", {"messages": [{"role": "user", "content": f"file://{folder}/a%20page.png"}]})
    batch = Batch(tmp_path, *lines, text)
    batch.run(server.url, allowed_local_media_path=folder, concurrency=1)
    results = batch.results
    assert {name: one["error"] is None for name, one in results.items()} == {
        **dict.fromkeys(("page", "again", "text"), True),
        **dict.fromkeys(("out", "link"), False),
    }
    assert {one["code"] for one in (results["out"]["error"], results["link"]["error"])} <= {
        "invalid_media",
        "media_unavailable",
        "media_not_allowed",
        "invalid_request",
    }
    assert "file://" in json.dumps([one for one in server.bodies if "image" not in json.dumps(one)])
    assert uploads(server) == 1


def test_a_server_gets_the_urls_of_files_as_they_are_if_no_folder_is_named(
    server: ReferenceServer, tmp_path: Path
) -> None:
    Batch(tmp_path, request("a", chat("file:///pages/a.png"))).run(server.url)
    assert "file:///pages/a.png" in json.dumps(server.bodies)


def test_the_progress_has_the_rate_the_remaining_time_the_hits_and_the_errors() -> None:
    state = BatchProgress(done=1_000, failed=2, total=5_000, seconds=100.0, answered=800, hits=0.85, trouble="503")
    assert state.figures == "8.0 lines/s, 0:08:20 left, 85% of items cached, 2 errors, trying again after 503"
    assert BatchProgress(done=0, failed=0).figures == "0.0 lines/s"


def test_memory_does_not_grow_with_the_file(server: ReferenceServer, tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    with batch.input.open("w") as file:
        for number in range(100):
            file.write(json.dumps(request(str(number), {"messages": [], "x": "y" * 100_000})) + "\n")
    server.answer = lambda *_: {}  # type: ignore[method-assign]
    tracemalloc.start()
    batch.run(server.url, concurrency=2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 5 << 20 < batch.input.stat().st_size


def test_the_command_passes_its_flags_on_and_its_exit_code_tells_of_errors(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.png").write_bytes(os.urandom(3_000))
    batch, owners = Batch(tmp_path, request("a", chat(f"file://{tmp_path}/page.png"))), set[str]()
    answer = server.answer

    def note(body: dict[str, Any], owner: str) -> dict[str, Any]:
        owners.add(owner)
        return answer(body, owner)

    monkeypatch.setattr(server, "answer", note)
    words = [
        "batch",
        str(batch.input),
        str(batch.output),
        "--base-url",
        server.url,
        "--retry-s",
        "1",
        "--concurrency=1",
    ]
    code, printed = run_main(*words, "--api-key", "mine", "--allowed-local-media-path", str(tmp_path))
    assert (code, owners, uploads(server)) == (0, {"Bearer mine"}, 1), printed
    batch.write(request("a", chat(f"file://{tmp_path}/page.png")), "no request")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    code, printed = run_main(*words)
    assert (code, "2 results" in printed, "1 of them errors" in printed) == (1, True, True), printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--base-url", "localhost:8000"), "http://HOST:PORT"),
        (("--base-url", "http://"), "http://HOST:PORT"),
        (("--base-url", "http://localhost:port/v1"), "http://HOST:PORT"),
        (("--base-url", "https://localhost:99999"), "http://HOST:PORT"),
        (("model", "--base-url", "http://localhost:8000"), "leave one of them out"),
        (("--enforce-eager",), "name it after OUTPUT"),
        ((), "No such file"),
    ],
)
def test_a_wrong_command_line_is_refused_in_words(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    code, printed = run_main("batch", str(tmp_path / "in"), str(tmp_path / "out"), *words)
    assert (code, message in printed) == (2, True), printed


def test_files_that_cannot_be_read_from_their_beginning_are_refused(tmp_path: Path) -> None:
    batch, pipe = Batch(tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    for paths in ((pipe, batch.output), (batch.input, pipe), (batch.input, Path("/dev/null")), (batch.input, tmp_path)):
        code, printed = run_main("batch", *map(str, paths))
        assert (code, "is no regular file" in printed) == (2, True), printed
    for paths in ((Path("a" * 300), batch.output), (batch.input, Path("a" * 300))):
        code, printed = run_main("batch", *map(str, paths))
        assert (code, "File name too long" in printed) == (2, True), printed
