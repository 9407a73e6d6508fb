"""S31: a client whose requests fail at will takes no worker from the others.

Three defences: what may leave no token is refused before the engine, a request that runs into its own structured output
is no fault of its worker, and the failures of one tenant eject nobody while others are about. The rules of ejection are
held against a model in `tests/fleet/test_ejection.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from semel.core import Digest, Feature, Submission, Tenant
from semel.engine.vllm.requests.item_cache import ItemCache
from semel.engine.vllm.requests.stream import VllmStream
from semel.errors import Busy, EngineFailed, InvalidRequest, RequestError, SemelError
from semel.fleet.ejection import Attempt
from semel.fleet.fleet import Fleet
from semel.fleet.quarantine import Content, EngineRun
from semel.fleet.retry_policy import FleetHealth, RetryPolicy, is_worker_fault
from semel.fleet.stream import StreamedAnswer
from semel.fleet.worker import RemoteWorker
from tests.fleet.workers import Workers, several
from tests.frontend.rig import Rig
from tests.waiting import until
from tests.worker.pairing import expected, feature, prompt

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
WORKERS = [f"w{number}" for number in range(4)]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
FORMS: Mapping[str, Mapping[str, object]] = {
    "response_format": {"response_format": SCHEMA},
    "structured_outputs": {"structured_outputs": {"regex": "aaab"}},
}
EXCLUDING: tuple[Mapping[str, object], ...] = (
    {"allowed_token_ids": [5]},
    {"bad_words": ["b"]},
    {"repetition_penalty": 1e38},
    {"repetition_penalty": 1e-38},
)


class KnowsNoTenants(FleetHealth):
    """The mutant: three failures in a row are three, whoever has sent them."""

    def begin(self, worker: str, tenant: str = "") -> Attempt:  # noqa: ARG002
        return super().begin(worker)


def mean_out(
    kind: type[FleetHealth], mallory_per_s: float, alice_per_s: float, error: SemelError, seconds: float = 600.0
) -> float:
    """How many of four workers get no requests, on average, while streams of a tenant fail after their first output."""
    now = 0.0
    health = kind(now=lambda: now)
    asked = [(0.0, "mallory", 1 / mallory_per_s)] + ([(0.05, "alice", 1 / alice_per_s)] if alice_per_s else [])
    heapq.heapify(asked)
    turns, out_s = 0, 0.0
    while asked[0][0] < seconds:
        at, tenant, every_s = asked[0]
        out = health.left_out(WORKERS, lambda _: False)
        out_s += len(out) * (at - now)
        now = at
        heapq.heapreplace(asked, (at + every_s, tenant, every_s))
        available = [worker for worker in WORKERS if worker not in out]
        worker = min(available, key=lambda one: (health.load(one), (WORKERS.index(one) - turns) % len(WORKERS)))
        turns += 1
        request = RetryPolicy(health, lambda _: True, Content(tenant, turns), is_whole=False)
        request.begin(EngineRun(worker, 1))
        request.on_output()
        if tenant == "mallory":
            request.on_failure(error, begun=True)
        else:
            request.on_finish()
        request.settle()
    return out_s / seconds


FAILED = EngineFailed("the engine gave up")
REJECTED = InvalidRequest("structured_outputs: no token was left that it allows")


def test_streams_that_a_tenant_has_fail_eject_nobody_while_another_tenant_asks() -> None:
    """Ten a second beside five good ones. The mutant takes half of the fleet."""
    assert mean_out(FleetHealth, 10, 5, FAILED) == 0
    assert mean_out(KnowsNoTenants, 10, 5, FAILED) > 1.5


def test_a_tenant_that_is_alone_has_failing_workers_ejected() -> None:
    """The control: all workers fail all that there is, and at most half of them are out."""
    assert 1.5 < mean_out(FleetHealth, 1, 0, FAILED) <= 2


@pytest.mark.parametrize("kind", [FleetHealth, KnowsNoTenants])
def test_requests_that_run_into_their_own_structured_output_eject_nobody(kind: type[FleetHealth]) -> None:
    """Not even of a tenant that is alone, nor by the rule that knows no tenants."""
    assert not is_worker_fault(REJECTED)
    assert mean_out(kind, 10, 0, REJECTED) == 0
    assert mean_out(kind, 10, 5, REJECTED) == 0


def test_trials_that_a_tenant_has_fail_do_not_double_the_time() -> None:
    """The mutant is out for 300 s in the end; a worker that fails a second tenant's trial too is out for longer."""
    for kind, tenants, longest_s in (
        (FleetHealth, ("mallory",), 10.0),
        (KnowsNoTenants, ("mallory",), 300.0),
        (FleetHealth, ("mallory", "alice"), 300.0),
    ):
        now = 0.0
        health = kind(now=lambda: now)  # noqa: B023
        for tenant in ("mallory", "alice", "mallory"):
            health.fail(health.begin("w0", tenant))
        waits = []
        for number in range(8):
            began = now
            while "w0" in health.left_out(WORKERS, lambda _: False):
                now += 1.0
                health.cancel(health.begin("w1", "alice"))
            waits.append(now - began)
            health.fail(health.begin("w0", tenants[number % len(tenants)]))
        assert max(waits) == longest_s


class TwoTenants(Workers):
    """Real workers and sockets, and requests of tenants."""

    async def send(self, tenant: str, worker: RemoteWorker, **sampling: object) -> tuple[int, ...]:
        async def make(_: Digest) -> Feature:
            return feature(1)

        salt = Tenant(tenant).prefix_salt
        submission = Submission(f"r{next(self.numbers)}", prompt([1]), {}, sampling, cache_salt=salt)
        stream = await self.fleet.submit(worker, submission, make, StreamedAnswer)
        try:
            return tuple([token async for output in stream for token in output.token_ids])
        finally:
            await stream.close()


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[TwoTenants]:
    async with several(tmp_path) as rigs:
        yield TwoTenants(rigs)


async def test_over_sockets_a_tenant_s_rejected_tokens_are_neither_failures_nor_load(two: TwoTenants) -> None:
    """Control: what a worker fails counts as load."""
    worker = two.fleet.workers[0]
    for _ in range(12):
        with pytest.raises(RequestError, match="no token was left"):
            await two.send("mallory", worker, fail="no_token_left")
    await until(lambda: two.fleet.load(worker) == 0)  # a worker says some ms later that a request has ended
    assert two.ejected == []
    assert await two.send("alice", worker) == expected([1])
    with pytest.raises(EngineFailed):
        await two.send("mallory", worker, fail="second_token")
    await until(lambda: two.fleet.load(worker) == 1)


@pytest.mark.parametrize(("has_drafts", "error"), [(False, InvalidRequest), (True, Busy)])
async def test_where_vllm_drafts_a_rejected_token_is_not_the_client_s_fault(
    has_drafts: bool, error: type[SemelError]
) -> None:
    """Under load, vLLM 0.32 with ngram drafts rejects tokens of innocent schemas; bare vLLM answers with 500."""
    part = SimpleNamespace(finish_reason="error", token_ids=[0], stop_reason=None)
    result = SimpleNamespace(finished=True, outputs=[part])
    collector: Any = SimpleNamespace(get_nowait=lambda: result)
    stream = VllmStream(None, collector, cast("ItemCache", None), ())
    stream.form, stream.has_drafts = "response_format", has_drafts
    with pytest.raises(error, match=r"response_format: .*no token"):
        _ = [output async for output in stream]
    assert not is_worker_fault(error("x"))


async def test_over_sockets_failures_of_one_tenant_eject_nobody_and_those_of_two_do(two: TwoTenants) -> None:
    worker, other = two.fleet.workers
    await two.send("alice", other)
    for _ in range(12):
        with pytest.raises(EngineFailed):
            await two.send("mallory", worker, fail="second_token")
    assert two.ejected == []
    two.rig_of(worker).engine.fault = "second_token"
    with pytest.raises(EngineFailed):
        await two.send("alice", worker)
    assert two.ejected == [worker]


async def test_mutant_over_sockets_without_tenants_half_of_the_fleet_is_out(two: TwoTenants) -> None:
    two.fleet = Fleet(two.fleet.workers, health=KnowsNoTenants(now=lambda: two.now))
    worker, other = two.fleet.workers
    await two.send("alice", other)
    for _ in range(3):
        with pytest.raises(EngineFailed):
            await two.send("mallory", worker, fail="second_token")
    assert two.ejected == [worker]


def question(path: str, **fields: object) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "hello"}], **fields}
    if path == COMPLETIONS:
        return {"prompt": "hello", **fields}
    return {"token_ids": [1, 2], "sampling_params": fields}


@pytest.mark.parametrize("excluding", EXCLUDING, ids=str)
@pytest.mark.parametrize(
    ("path", "form"),
    [*((path, form) for path in (CHAT, COMPLETIONS) for form in FORMS), (GENERATE, "structured_outputs")],
)
async def test_what_may_leave_no_token_is_400_before_the_engine_and_names_both_fields(
    app: Rig, path: str, form: str, excluding: Mapping[str, object]
) -> None:
    """Control: each of the two alone is answered."""
    (name,) = excluding
    reply = await app.post(path, question(path, **FORMS[form], **excluding))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "invalid_request"), reply.text
    assert error["param"] == (f"sampling_params.{name}" if path == GENERATE else name)
    assert f"{name} and {form}" in error["message"]
    assert app.engine.submissions == 0
    for fields in (FORMS[form], excluding):
        await app.ok(path, question(path, **fields))


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 4}, {"logit_bias": {"5": -100}}, {"repetition_penalty": 1.3}, {"bad_words": []}], ids=str
)
@pytest.mark.parametrize("form", FORMS)
async def test_what_leaves_a_token_is_answered(app: Rig, form: str, fields: Mapping[str, object]) -> None:
    """vLLM gives way where `min_tokens` would exclude the last token, and limits a bias to 100."""
    await app.ok(CHAT, question(CHAT, **FORMS[form], **fields))


async def test_text_as_the_response_format_excludes_nothing(app: Rig) -> None:
    await app.ok(CHAT, question(CHAT, response_format={"type": "text"}, bad_words=["b"]))
