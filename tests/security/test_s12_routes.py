"""S12 on every route: a tenant can neither use, see nor time what another has sent (CVE-2025-46570).

Each route has its probes in a table. A probe is a request of umbra, with all that it may have learnt of acme's. It is
asked in a world where acme was busy with the same image, and in one where acme never was: the answers are equal byte
for byte, and so is the work that is done for them. A route that is not in the table fails the first test. The control
is a frontend that shares what it holds: every probe that could profit from it is shown to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel.cache import LruCache
from semel.frontend.routes.render import SAFETENSORS
from semel.frontend.routes.unsupported import UNSUPPORTED
from semel.render import ChatRenderer, Pipeline
from tests.frontend.rig import rig
from tests.frontend.test_intents import agents_body
from tests.operations import counting_operations
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.security.test_s17_authentication import routes_of
from tests.security.worlds import (
    ACME,
    CHAT,
    CLIP,
    CLIPS,
    FILE_FORM,
    GENERATE,
    KEYS,
    NAME,
    RENDER,
    UMBRA,
    Loot,
    View,
    body,
    busy,
    chatting,
    hearing,
    share_everything,
    view,
    with_part,
    with_parts,
)


@dataclass(frozen=True)
class Probe:
    """A request of umbra, made of what it knows of acme."""

    name: str
    request: Callable[[Loot], Mapping[str, Any]]
    profits: bool = True
    """Whether it tells acme's world from the other if tenants share what is held."""

    stays: bool = True
    """Whether anything of it stays where acme never was. Probes of which nothing does share their worlds."""


def _file(content: bytes) -> Mapping[str, Any]:
    return {"content": content, "headers": {"content-type": SAFETENSORS}}


def _stolen(loot: Loot) -> dict[str, Any]:
    return {**loot.rendered, "features": loot.answer["features"]}


def _untagged(loot: Loot) -> dict[str, Any]:
    return {**loot.rendered, "features": {**loot.rendered["features"], "mm_tags": None}}


def _agents(path: str, _: Loot, **fields: str) -> Mapping[str, Any]:
    return {"json": {**agents_body(path, 1), **fields}}


def _foreign_file(path: str, loot: Loot) -> Mapping[str, Any]:
    """A request that names a file, as the API of a path has it."""
    request = agents_body(path, 1)
    if path.startswith("/v1/responses"):
        request["input"][0]["content"][0] = {"type": "input_image", "file_id": loot.file_id}
    else:
        source = {"type": "file", "file_id": loot.file_id}
        request["messages"][0]["content"][0] = {"type": "image", "source": source}
    return {"json": request}


def _named_file(field: str, of: Callable[[Loot], str], loot: Loot) -> Mapping[str, Any]:
    return {"json": with_part({"type": field, field: {"file_id": of(loot)}})}


def _name_alone(field: str, value: object, _: Loot) -> Mapping[str, Any]:
    return {"json": with_part({"type": field, field: value, "uuid": NAME})}


def _references() -> tuple[Probe, ...]:
    """Every way to name what acme has sent or uploaded."""
    urls = ("image_url", "audio_url", "video_url")
    secrets: Mapping[str, Callable[[Loot], str]] = {
        "its file": lambda loot: loot.file_id,
        "the id of its image": lambda loot: loot.media_id,
    }
    stripped = [*((field, None) for field in (*urls, "input_audio")), ("image_url", {"url": ""})]
    return (
        *(
            Probe(f"{name} in {field}", partial(_named_file, field, of), stays=False)
            for name, of in secrets.items()
            for field in ("file", *urls)
        ),
        *(
            Probe(
                f"its uuid in {field}, which is {value}",
                partial(_name_alone, field, value),
                profits=field == "image_url",
                stays=False,
            )
            for field, value in stripped
        ),
        Probe(
            "its uuid with the id of its image",
            lambda loot: {"json": with_part({"type": "file", "file": {"file_id": loot.media_id}, "uuid": NAME})},
            stays=False,
        ),
    )


POOLING = (
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)

HELLO: Mapping[str, Any] = {"json": {"prompt": "hello"}}
CLIP_FORM: Mapping[str, Any] = {"files": {"file": ("clip.wav", CLIP)}, "data": {"language": "en"}}

PROBES: Mapping[str, tuple[Probe, ...]] = {
    f"POST {CHAT}": (
        Probe("the same image", lambda _: {"json": body(1)}),
        Probe("streamed", lambda _: {"json": body(1, stream=True)}),
        Probe("its digest as a uuid", lambda loot: {"json": with_parts({"uuid": loot.digest})}),
        Probe(
            "its digest as a uuid, and no image",
            lambda loot: {"json": with_parts({"uuid": loot.digest, "image_url": None})},
            profits=False,
        ),
        *_references(),
        Probe("its uuid with the same image", lambda _: {"json": with_parts({"uuid": NAME})}),
        Probe("the ids of what it sent", lambda _: {"json": body(1, return_media_ids=True)}),
        Probe("acme as a salt", lambda _: {"json": body(1, cache_salt="acme")}),
        Probe("acme's own salt of prefixes", lambda _: {"json": body(1, cache_salt="\0acme\n")}),
    ),
    "POST /v1/completions": (
        Probe("the same text", lambda _: HELLO),
        Probe("acme as a salt", lambda _: {"json": {"prompt": "hello", "cache_salt": "\0acme\n"}}, profits=False),
    ),
    **{
        f"POST {path}": (
            Probe("the same image", partial(_agents, path)),
            Probe("acme as a salt", partial(_agents, path, cache_salt="\0acme\n")),
            Probe("its file", partial(_foreign_file, path)),
            *(
                (
                    Probe(
                        "its response", lambda loot: {"json": {"input": "x", "previous_response_id": loot.response_id}}
                    ),
                )
                if path.startswith("/v1/responses")
                else ()
            ),
        )
        for path in ("/v1/responses", "/v1/messages", "/v1/responses/input_tokens", "/v1/messages/count_tokens")
    },
    f"POST {GENERATE}": (
        Probe("its digest and its tag", lambda loot: {"json": loot.rendered}),
        Probe("its digest and its tag, streamed", lambda loot: {"json": {**loot.rendered, "stream": True}}),
        Probe("its digest without a tag", lambda loot: {"json": _untagged(loot)}),
        Probe("its digest under acme's salt", lambda loot: {"json": {**loot.rendered, "cache_salt": "\0acme\n"}}),
        Probe("the digest of what it sent", lambda loot: {"json": _stolen(loot)}),
        Probe("its file and its seals", lambda loot: _file(loot.file)),
        Probe("its file", lambda loot: _file(loot.unsealed)),
        Probe("its tensors", lambda loot: {"json": loot.packed}),
    ),
    f"POST {RENDER}": (
        Probe("the same image", lambda _: {"json": body(1)}),
        *_references(),
        Probe("its tensors", lambda _: {"json": body(1), "headers": {"accept": SAFETENSORS}}, profits=False),
    ),
    "POST /v1/completions/render": (Probe("the same text", lambda _: HELLO, profits=False),),
    "POST /tokenize": (
        Probe("the same image", lambda _: {"json": body(1)}),
        Probe("the same text", lambda _: HELLO, profits=False),
        *_references(),
    ),
    "POST /detokenize": (
        Probe("its prompt", lambda loot: {"json": {"tokens": loot.rendered["token_ids"]}}, profits=False),
    ),
    **{f"POST {path}": (Probe("the same clip", lambda _: CLIP_FORM),) for path in CLIPS},
    "POST /v1/files": (Probe("the same file", lambda _: FILE_FORM, profits=False),),
    "GET /v1/files": (
        Probe("as it is", lambda _: {}),
        Probe("after its file", lambda loot: {"params": {"after": loot.file_id}}),
    ),
    **{
        f"{method} {path}": (Probe("its file", lambda loot: {"path": {"file_id": loot.file_id}}),)
        for method, path in (
            ("GET", "/v1/files/{file_id}"),
            ("DELETE", "/v1/files/{file_id}"),
            ("GET", "/v1/files/{file_id}/content"),
        )
    },
    **{
        f"{method} {path}": (Probe("its response", lambda loot: {"path": {"response_id": loot.response_id}}),)
        for method, path in (
            ("GET", "/v1/responses/{response_id}"),
            ("DELETE", "/v1/responses/{response_id}"),
            ("GET", "/v1/responses/{response_id}/input_items"),
        )
    },
    **{
        f"GET {path}": (Probe("as it is", lambda _: {}, profits=False, stays=False),)
        for path in ("/health", "/ping", "/ready", "/metrics", "/version", "/v1/models", "/openapi.json")
    },
    **{  # of a model that chats: refused; what models that pool answer is compared in tests/frontend/test_pooling.py
        f"POST {path}": (Probe("the same image", lambda _: {"json": body(1)}, profits=False, stays=False),)
        for path in POOLING
    },
    "POST /ping": (Probe("as it is", lambda _: {}, profits=False),),
    "POST /invocations": (
        Probe("the same image", lambda _: {"json": body(1)}),
        Probe("the same text", lambda _: HELLO, profits=False),
        *_references(),
    ),
    **{
        f"{method} {path}": (Probe("as it is", lambda _: {}, profits=False),)
        for path in UNSUPPORTED
        for method in ("GET", "POST", "DELETE")
    },
}
"""By route: all that umbra could try there."""

Case = tuple[str, Probe]


def _cases() -> Mapping[str, list[Case]]:
    """Probes by what they share their two worlds with: those of which nothing stays with each other."""
    cases: dict[str, list[Case]] = {}
    for route, probes in PROBES.items():
        for probe in probes:
            if route.partition(" ")[2] not in UNSUPPORTED:
                name = f"{route} {probe.name}" if probe.stays else "nothing stays"
                cases.setdefault(name, []).append((route, probe))
    return cases


CASES = _cases()
PROFITS = {
    name: profiting for name, cases in CASES.items() if (profiting := [case for case in cases if case[1].profits])
}


async def test_every_route_has_its_probes_in_the_table(tmp_path: Path, parts_renderer: ChatRenderer) -> None:
    async with chatting(tmp_path / "w", parts_renderer) as world:
        routes = {f"{method} {path}" for method, path in routes_of(world.app.app)}
    assert routes == PROBES.keys()


async def views(
    tmp_path: Path, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, cases: Sequence[Case]
) -> AsyncIterator[tuple[str, View, View]]:
    """By probe: what umbra can tell where acme was busy, and where it was not."""
    folders = (tmp_path / "a", tmp_path / "b")
    async with AsyncExitStack() as stack:
        if cases[0][0].partition(" ")[2] in CLIPS:
            with_acme, without = [await stack.enter_async_context(hearing(one, monkeypatch)) for one in folders]
            for its_path in CLIPS * 2:
                assert (await with_acme.ask(ACME, "POST", its_path, **CLIP_FORM)).status_code == 200
            loot: Any = None
        else:
            with_acme, without = [await stack.enter_async_context(chatting(one, renderer)) for one in folders]
            loot = await busy(with_acme, ACME)
        for route, probe in cases:
            method, _, path = route.partition(" ")
            request = probe.request(loot)
            one, other = [await view(world, monkeypatch, method, path, dict(request)) for world in (with_acme, without)]
            yield f"{route} {probe.name}", one, other


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
async def test_nobody_can_tell_whether_another_tenant_was_there(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, cases: Sequence[Case]
) -> None:
    async for name, with_acme, without in views(tmp_path, parts_renderer, monkeypatch, cases):
        assert with_acme == without, name
        assert not with_acme.shares_prefix, name


@pytest.mark.slow
@pytest.mark.parametrize("cases", PROFITS.values(), ids=PROFITS)
async def test_a_naive_frontend_tells_what_another_tenant_has_sent(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, cases: Sequence[Case]
) -> None:
    share_everything(monkeypatch)
    async for name, with_acme, without in views(tmp_path, parts_renderer, monkeypatch, cases):
        assert with_acme != without, name


async def test_a_foreign_digest_is_not_even_looked_up(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known or unknown, held or not: what is not the tenant's own costs one hash, and its answer is the same."""
    async with chatting(tmp_path / "w", parts_renderer) as world:
        loot = await busy(world, ACME)
        known = await view(world, monkeypatch, "POST", GENERATE, {"json": loot.rendered})
        features = {**loot.rendered["features"], "mm_hashes": {"image": ["0" * 64]}}
        request = {"json": {**loot.rendered, "features": features}}
        unknown = await view(world, monkeypatch, "POST", GENERATE, request)
    assert known.looked_up == unknown.looked_up == 0
    assert known.text.replace(loot.digest, "0" * 64) == unknown.text
    assert (known.status, known.headers, known.work) == (unknown.status, unknown.headers, unknown.work)


async def check_no_clock_tells(
    tmp_path: Path, renderer: ChatRenderer, path: str, *, tolerance: float = 0, pairs: int = 3
) -> None:
    """What umbra's request costs for an image that acme has sent, and for one that nobody has.

    The clock counts the bytecodes of all that this process does until the answer: it is exact where wall time is not,
    and sees what takes a microsecond. Without a tolerance, it is that of the request alone: neither the link's and the
    worker's nor a heartbeat. The work of C functions is not in it, nor is that of other processes, whose orders are
    compared one by one (`View.work`).
    """
    drawing = Drawing(renderer, LruCache(256 * FEATURE_BYTES))
    async with rig(tmp_path, drawing.pipeline, engine_bytes=256 * FEATURE_BYTES, keys=KEYS) as app:

        async def cost(key: str, number: int) -> int:
            with counting_operations(own=not tolerance) as counted:
                reply = await app.client.post(path, json=body(number), headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200, reply.text
            return counted.operations

        sent = range(20, 20 + pairs)  # each has a twin, of which everything is as long: 30 more
        for number in sent:
            await cost(ACME, number)
        await cost(UMBRA, 99)
        known, unknown = list[int](), list[int]()
        for number in sent:  # each first as often as the other
            order = [(known, number), (unknown, 30 + number)]
            for costs, one in order if number % 2 else order[::-1]:
                costs.append(await cost(UMBRA, one))
    # What others do meanwhile only adds to a cost: the least of each is the request's own.
    assert abs(min(unknown) / min(known) - 1) <= tolerance, (known, unknown)


EXACT = [RENDER, "/tokenize"]
"""Nothing of these passes a socket: two requests that are alike take the same steps, one by one."""

CHAT_TOLERANCE = 0.05
"""Frames come in other batches each time: over 5% of one chat's work, less of the least of five. A hit saves 14%."""


@pytest.mark.parametrize("path", EXACT)
async def test_not_one_step_of_an_inspection_tells_what_another_tenant_has_sent(
    tmp_path: Path, parts_renderer: ChatRenderer, path: str
) -> None:
    await check_no_clock_tells(tmp_path, parts_renderer, path)


async def test_the_steps_of_a_chat_do_not_tell_what_another_tenant_has_sent(
    tmp_path: Path, parts_renderer: ChatRenderer
) -> None:
    await check_no_clock_tells(tmp_path, parts_renderer, CHAT, tolerance=CHAT_TOLERANCE, pairs=5)


@pytest.mark.slow
@pytest.mark.parametrize("path", [*EXACT, CHAT])
async def test_a_mutant_that_shares_what_tenants_send_is_found_by_its_steps(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    share_everything(monkeypatch)
    with pytest.raises(AssertionError):
        await check_no_clock_tells(tmp_path, parts_renderer, path, tolerance=CHAT_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXACT)
async def test_a_mutant_that_saves_microseconds_for_what_another_tenant_sent_is_found_by_its_steps(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """What no wall clock with a tolerance of milliseconds can tell: it looks at new bytes a little longer."""
    identify, seen = Pipeline._identify, set[bytes]()

    def mutant(self: Pipeline, media: Any, *rest: Any) -> Any:
        for one in media:
            if one.data not in seen:
                seen.add(one.data)
                sum(range(100))
                for _ in range(20):
                    pass
        return identify(self, media, *rest)

    monkeypatch.setattr(Pipeline, "_identify", mutant)
    with pytest.raises(AssertionError):
        await check_no_clock_tells(tmp_path, parts_renderer, path)
