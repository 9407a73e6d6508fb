"""The OpenAPI document is true: schemathesis calls all operations with what fits their schemas and what breaks them.

No 500; no status, content type, header or shape that is not in the document; what breaks a schema is refused. Left out:
what schemathesis makes to break the form for clips, since it fails on files; a test of its own breaks each field of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from schemathesis import Case, GenerationMode
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from semel.cache import LruCache
from semel.core import Feature, Key, Keyring, Layout, Media, Output, Submission, Tensor
from semel.engine import Stream
from semel.errors import MediaUndecodable, RequestError, ServiceError, told_kinds
from semel.frontend.api.openai.requests import DetokenizeRequest
from semel.frontend.api.tokens.render_response import Detokenized
from semel.frontend.app import create_app
from semel.frontend.middleware.refusal_rate import RefusalLimits
from semel.frontend.routes.openapi import DocumentedApp, DocumentedRoute, takes
from semel.frontend.service import FrontendState
from semel.lab.testing.engine import EchoEngine
from semel.render import ChatRenderer, Pipeline
from semel.store.records import SealedRecords
from semel.store.store import MediaStore
from semel.telemetry import Meter
from semel.web.errors import error_body, error_response
from semel.web.multipart import FORM
from semel.web.openapi import JSON, shape
from tests.effort import FACTOR
from tests.frontend import rig as rigs
from tests.frontend.conformance import EVENTS, NEGATIVE, POSITIVE, Served, served, validator
from tests.frontend.hearing import TOKENIZER, Hearing, Spoken, clip
from tests.frontend.rig import rig
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.store.stores import in_memory, store_over

ROOT = Path(__file__).parent.parent.parent
KEY = "a-client-s-key-0123456789"
FEW = 1 + FACTOR


@cache
def document(*, secured: bool = False) -> dict[str, Any]:
    return create_app(FrontendState(), Meter(), Keyring([("acme", KEY)]) if secured else None).openapi()


OPERATIONS = sorted(f"{method.upper()} {path}" for path, told in document()["paths"].items() for method in told)
TAKEN = {f"POST {path}": told["post"]["requestBody"] for path, told in document()["paths"].items() if "post" in told}
TYPED = sorted(label for label, body in TAKEN.items() if JSON in body["content"])
OWN = [label for label in TYPED if label != "POST /invocations"]
"""Those with a body of their own: that of `/invocations` is one of two others."""
CLIPS = sorted(label for label, body in TAKEN.items() if FORM in body["content"] and "/audio/" in label)
STREAMS = [
    *("POST /inference/v1/generate", "POST /v1/chat/completions", "POST /v1/completions"),
    *("POST /v1/messages", "POST /v1/responses"),
]


async def talk(submission: Submission) -> Spoken:
    """What an engine answers that tells all that it is asked for: every choice, log probabilities, calls of tools."""
    asked = submission.sampling
    tokens = (65, 66)
    logprobs = texts = told = None
    if asked.get("logprobs") is not None or asked.get("logprob_token_ids"):
        logprobs = tuple({token: -0.5, 67: float("-inf")} for token in tokens)
        texts = tuple({token: "é"} for token in tokens)
    if asked.get("prompt_logprobs") is not None:
        told = (None, *({token: (-1.0, 1, None)} for token in submission.prompt.token_ids[1:]))
    outputs = []
    for index in range(int(str(asked.get("n", 1)))):
        outputs.append(Output(index, "né", tokens, logprobs, texts=texts, cached_tokens=0, prompt_logprobs=told))
        outputs.append(Output(index, "", (), finish_reason="stop", message=_message(submission)))
    return Spoken(outputs)


def _message(submission: Submission) -> Mapping[str, Any] | None:
    parsing = submission.parsing
    if parsing is None or not parsing.tools:
        return None
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"reasoning": "hm", "content": None, "tool_calls": [{"index": 0, **call} if parsing.stream else call]}


@contextmanager
def patched(engine: EchoEngine, submit: Callable[[Submission], Coroutine[Any, Any, Stream]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", submit)
        yield


@asynccontextmanager
async def chatting(folder: Path, renderer: ChatRenderer, keys: Keyring | None = None) -> AsyncIterator[Starlette]:
    """A frontend whose model chats."""
    drawing = Drawing(renderer, LruCache(64 * FEATURE_BYTES))

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        if not re.fullmatch(rb"[0-9]{1,3}", bytes(media.data)):
            raise MediaUndecodable("not drawn")
        return await drawing.process(media, options)

    async with rig(folder, replace(drawing.pipeline, process=process), keys=keys) as made:
        made.service.refusals = RefusalLimits(per_s=0)
        made.service.media_store = await store_over(in_memory())
        made.service.response_records = SealedRecords(await store_over(in_memory()), rigs.KEY)
        with patched(made.engine, talk):
            yield made.app


@asynccontextmanager
async def hearing(folder: Path) -> AsyncIterator[Starlette]:
    """A frontend whose model transcribes."""

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        tensor = Tensor("uint8", (len(media.data),), memoryview(media.data))
        return Feature("audio", {"input_features": tensor}, Layout((0,) * 4))

    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rigs, "CONTRACT", replace(rigs.CONTRACT, max_items={"audio": 1}))
            pipeline = Pipeline(TOKENIZER, None, process, "heard", Key(bytes(32)))
            made = await stack.enter_async_context(rig(folder, pipeline))
        made.service.refusals = RefusalLimits(per_s=0)
        stack.enter_context(patched(made.engine, Hearing().submit))
        yield made.app


@asynccontextmanager
async def alone(app: Starlette) -> AsyncIterator[Starlette]:
    yield app


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, parts_renderer: ChatRenderer) -> Iterator[Served]:
    with served(lambda: chatting(tmp_path_factory.mktemp("chats"), parts_renderer)) as made:
        yield made


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, parts_renderer: ChatRenderer) -> Iterator[Served]:
    keys = Keyring([("acme", KEY)])
    folder = tmp_path_factory.mktemp("keys")
    with served(lambda: chatting(folder, parts_renderer, keys), {"Authorization": f"Bearer {KEY}"}) as made:
        yield made


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(lambda: hearing(tmp_path_factory.mktemp("clips"))) as made:
        yield made


def usable(case: Case[Any]) -> None:
    """Ask for the model that is served and with words: otherwise most answers would be 404, or that there are none."""
    if isinstance(case.body, dict):
        case.body.pop("model", None)
        if case.body.get("prompt") == "":
            case.body["prompt"] = "hello"


def streamed(case: Case[Any]) -> None:
    usable(case)
    if isinstance(case.body, dict):
        case.body["stream"] = True
        case.body.pop("prompt_logprobs", None)


def spoken(case: Case[Any]) -> None:
    """Send a clip: hardly any bytes are one."""
    usable(case)
    body: Any = case.body
    body["file"] = clip(0.1)


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_fits_the_document_is_answered_as_it_says(chats: Served, label: str) -> None:
    chats.examine(label, POSITIVE, count=FEW, change=usable)


@pytest.mark.slow
@pytest.mark.parametrize("label", TYPED)
def test_what_breaks_the_document_is_refused_as_it_says(chats: Served, label: str) -> None:
    chats.examine(label, NEGATIVE, count=FEW, change=usable)


@pytest.mark.parametrize("label", STREAMS)
def test_streams_have_the_events_that_the_document_tells(chats: Served, label: str) -> None:
    chats.examine(label, POSITIVE, count=3 * FEW, change=streamed)
    assert chats.answers[label, 200, EVENTS] > 0


@pytest.mark.parametrize("label", CLIPS)
def test_clips_are_answered_as_the_document_says(clips: Served, label: str) -> None:
    clips.examine(label, POSITIVE, count=3 * FEW, change=spoken)
    assert clips.answers[label, 200, JSON] > 0


@pytest.mark.parametrize("label", CLIPS)
def test_what_breaks_the_form_for_clips_is_refused(clips: Served, label: str) -> None:
    name = TAKEN[label]["content"][FORM]["schema"]["$ref"].rpartition("/")[2]
    schema = clips.document["components"]["schemas"][name]
    breaking = {"integer": "1.5", "number": "hot", "boolean": "maybe"}
    sent = {"temprature": "x"}
    for name, told in schema["properties"].items():
        kinds = [told, *told.get("anyOf", ())]
        for kind in kinds:
            if kind.get("type") in breaking:
                sent[name] = breaking[kind["type"]]
            elif {"enum", "const"} & kind.keys():
                sent[name] = "other"
            elif "maxLength" in kind:
                sent[name] = "x" * (kind["maxLength"] + 1)
    assert len(sent) > 10
    with httpx.Client(base_url=clips.url, timeout=20) as client:
        for name, value in sent.items():
            files = {"file": ("clip.wav", clip(0.1))}
            reply = client.post(label.removeprefix("POST "), data={name: value}, files=files)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), reply.text


@pytest.mark.parametrize("label", OPERATIONS)
def test_with_api_keys_the_document_tells_what_needs_one_S17(secured: Served, label: str) -> None:
    if label == "GET /metrics":
        assert "/metrics" not in secured.document["paths"]
        return
    secured.examine(label, POSITIVE, count=2, headers={"Authorization": f"Bearer {KEY}"}, change=usable)
    assert not secured.answers[label, 401, JSON]
    secured.examine(label, POSITIVE, count=1, headers={"Authorization": ""})
    is_open = label in {"GET /health", "GET /ready"}
    assert bool(secured.answers[label, 401, JSON]) is not is_open
    method, path = label.split()
    assert ("security" in secured.document["paths"][path][method.lower()]) is not is_open


def test_a_frontend_that_does_not_serve_yet_answers_as_the_document_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.store.store._FIRST_LISTING_S", 0.01)
    told = document()
    store = MediaStore(in_memory(), key=rigs.KEY, capacity_bytes=1 << 30, ttl_s=100)  # not read yet
    records, ids = SealedRecords(store, rigs.KEY), {"file_id": f"file-{'0' * 64}", "response_id": f"resp_{'0' * 32}"}
    state = FrontendState(refusals=RefusalLimits(per_s=0), media_store=store, response_records=records)
    upload: dict[str, Any] = {"files": {"file": b"x"}, "data": {"purpose": "vision"}}
    unread = {"/v1/files": upload, "/v1/files/{file_id}": {}, "/v1/files/{file_id}/content": {}}
    with TestClient(create_app(state, Meter())) as client:  # one event loop for all
        for path, operations in told["paths"].items():
            for method, operation in operations.items():
                request = unread[path] if path in unread and method != "get" else {"json": {}}
                reply = client.request(method, path.format(**ids), **request)
                assert reply.status_code == (503 if "503" in operation["responses"] else 200)
                response = operation["responses"][str(reply.status_code)]
                if "$ref" in response:
                    response = told["components"]["responses"][response["$ref"].rpartition("/")[2]]
                    assert "Retry-After" in reply.headers
                if "content" in response and JSON in response["content"]:
                    validator(told, response["content"][JSON]["schema"]).validate(reply.json())


@pytest.mark.slow
@pytest.mark.parametrize("label", OWN)
def test_every_bound_of_the_document_is_where_it_says(chats: Served, label: str) -> None:
    chats.cover(label, change=usable)


def planted(answer: Callable[[], Response]) -> AbstractAsyncContextManager[Starlette]:
    """An application that tells the truth of one route, but for what it answers."""
    operation = takes(TypeAdapter(DetokenizeRequest), {JSON: shape(Detokenized)})

    async def detokenize(_: Request) -> Response:
        """The text of tokens."""
        return answer()

    async def refuse(_: Request, error: Exception) -> Response:
        return Response(status_code=getattr(error, "status_code", 500))

    route = DocumentedRoute("/detokenize", detokenize, methods=["POST"], operation=operation)
    return alone(DocumentedApp([route], secured=False, refuse=refuse))


def _json(status: int, body: object, kind: str = JSON) -> Response:
    return Response(json.dumps(body), status, media_type=kind)


LIES: dict[str, tuple[GenerationMode, Callable[[], Response], str]] = {
    "a field that is not told": (POSITIVE, lambda: _json(200, {"prompt": "", "more": 1}), "Response violates schema"),
    "no Retry-After": (
        POSITIVE,
        lambda: _json(429, error_body("", code="too_many_requests", status=429)),
        "Missing required response headers",
    ),
    "what breaks the schema is taken": (
        NEGATIVE,
        lambda: _json(200, {"prompt": ""}),
        "Schema-violating request accepted",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_application_that_answers_otherwise_is_caught(lie: str) -> None:
    mode, answer, found = LIES[lie]
    with served(lambda: planted(answer)) as made, pytest.raises(BaseExceptionGroup, match=found):
        made.examine("POST /detokenize", mode, count=5)


class Broken(Response):
    """A response that fails in the middle."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ServiceError("in the middle")


def app_of(path: str, response: Response) -> DocumentedApp:
    """An application with one route. Its refusals have status 500."""

    async def endpoint(_: Request) -> Response:
        return response

    async def refuse(_: Request, error: Exception) -> Response:
        return Response(str(error), 500)

    return DocumentedApp([DocumentedRoute(path, endpoint, methods=["POST"])], secured=False, refuse=refuse)


@pytest.mark.parametrize("path", ["/one", "/{name}"])
async def test_a_response_that_fails_after_its_start_has_no_second_one(path: str) -> None:
    sent: list[str] = []

    async def receive() -> Message:
        raise NotImplementedError

    async def send(message: Message) -> None:
        sent.append(message["type"])

    with pytest.raises(ServiceError, match="in the middle"):
        await app_of(path, Broken())({"type": "http", "method": "POST", "path": "/one", "headers": []}, receive, send)
    assert sent == ["http.response.start"]


def test_an_application_begins_and_ends_as_its_server_says() -> None:
    with TestClient(app_of("/{name}", Response("ok"))) as client:
        assert client.post("/one").text == "ok"
        assert client.post("/one/two").status_code == 500


@pytest.mark.parametrize("kind", told_kinds(), ids=lambda kind: kind.__name__)
def test_every_error_is_told_with_its_code_and_headers(kind: type[RequestError | ServiceError]) -> None:
    told = document(secured=True)
    answer = error_response(kind("why"))
    error = told["components"]["responses"][f"Error{answer.status_code}"]
    validator(told, error["content"][JSON]["schema"]).validate(json.loads(bytes(answer.body)))
    assert ("Retry-After" in answer.headers) is ("Retry-After" in error.get("headers", {}))
    assert str(kind.status) in told["paths"]["/v1/chat/completions"]["post"]["responses"]


def test_the_document_in_the_repository_is_that_of_the_code() -> None:
    written = json.loads((ROOT / "docs/openapi.json").read_text())
    assert written == document(secured=True), "write it anew: scripts/openapi"
