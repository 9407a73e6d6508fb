"""S27: a verdict on a grammar is about its content, and is the tenant's own.

Everything is real but the engine core, as in S20. The wrong implementations were: a trial that was killed, or that had
too little of the CPU, was remembered as the schema's fault, for all tenants and for ever; the trial compiled without a
cache, the engine with one, and xgrammar fails on some schemas only then; a closed pipe was a 500.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.core import Tenant, tenant_name
from semel.engine.vllm.engine import VllmEngine
from semel.engine.vllm.grammars.child import Outcome
from semel.engine.vllm.grammars.process import GrammarProcess
from semel.errors import InvalidRequest, NotReady
from tests.engine.sink import Sink
from tests.security.test_s20_grammars import ACME, GLOBEX, children, counts, dear_schema, submission
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]

FAILS_WITH_CACHE = {"type": "string", "pattern": "^(a|aa){0,200}$"}
"""Compiles in xgrammar 0.2.8 without a cache, and fails with one."""


@pytest.fixture(scope="module")
def sink(tiny: Callable[[str], Path]) -> Sink:
    return Sink.of(tiny("qwen2-vl"))


@pytest.fixture(scope="module")
async def engine(sink: Sink) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine.embed(sink)
    try:
        await process_of(engine)
        yield engine
    finally:
        await engine.close()


async def process_of(engine: VllmEngine) -> GrammarProcess:
    process = await engine.grammars._process()
    assert process is not None
    return process


async def killed(engine: VllmEngine, tenant: str | None, number: int) -> None:
    """Try a schema, and kill its trial as the system does when memory runs out."""
    process = await process_of(engine)
    under_way = asyncio.create_task(engine.submit(submission(tenant, json=dear_schema(800 + number))))
    await until(lambda: children(process.pid) != [], within_s=10)
    os.kill(int(children(process.pid)[0]), signal.SIGKILL)
    await under_way


async def test_a_trial_that_was_killed_is_503_and_the_schema_is_tried_again_S27(engine: VllmEngine) -> None:
    before = counts(engine.grammars)
    with pytest.raises(NotReady, match="Nothing is wrong with it: send the request again"):
        await killed(engine, ACME, 0)
    assert counts(engine.grammars)["failed"] == before["failed"] + 1
    with pytest.raises(InvalidRequest, match="takes more than 2 s"):  # it was tried, to its end
        await engine.submit(submission(ACME, json=dear_schema(800)))


async def test_after_two_failures_it_is_not_tried_for_a_minute_and_only_for_that_tenant_S27(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, tried, now = await process_of(engine), [], 1_000.0
    monkeypatch.setattr(engine.grammars, "_clock", lambda: now)

    async def compile_late(kind: str, text: str) -> tuple[Outcome, int]:
        tried.append(text)
        return Outcome.LATE, 0

    monkeypatch.setattr(process, "compile", compile_late)
    for _ in range(5):
        with pytest.raises(NotReady):
            await engine.submit(submission(ACME, regex="late"))
    assert len(tried) == 2
    with pytest.raises(NotReady):
        await engine.submit(submission(GLOBEX, regex="late"))
    assert len(tried) == 3
    now += 61
    with pytest.raises(NotReady):
        await engine.submit(submission(ACME, regex="late"))
    assert len(tried) == 4
    monkeypatch.undo()
    await engine.submit(submission(GLOBEX, regex="late"))


async def test_refusals_are_a_tenant_s_own_S27(engine: VllmEngine) -> None:
    for tenant in (ACME, GLOBEX):
        before = counts(engine.grammars)
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await engine.submit(submission(tenant, regex="(refused"))
        after = counts(engine.grammars)
        assert after["refused"] == before["refused"] + 1, "each tenant's was tried once"
        assert after["remembered"] == before["remembered"] + 1


async def test_a_schema_that_only_a_compiler_with_a_cache_fails_on_is_refused_on_trial_S27(
    engine: VllmEngine, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "compile", lambda _: pytest.fail("it reached the engine"))
    with pytest.raises(InvalidRequest, match="no grammar can be made of it"):
        await engine.submit(submission(ACME, json=FAILS_WITH_CACHE))


class RefusingCore(Sink):
    """A sink whose engine core cannot compile some grammars, as vLLM reports it."""

    tries = 0
    tenants: tuple[str, ...] = ()

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        collector = await super().add_request(request_id, prompt, params, **options)
        if request_id.startswith("grammar-"):
            self.tenants += (tenant_name(prompt["cache_salt"]),)
            self.tries += 1
            failed = SimpleNamespace(finish_reason="error", stop_reason=None, token_ids=[])
            collector.get_nowait = lambda: SimpleNamespace(finished=True, outputs=[failed], prompt_token_ids=[0])
        return collector


async def test_what_the_engine_refuses_after_the_trial_is_a_remembered_400_for_that_tenant_S27(
    tiny: Callable[[str], Path],
) -> None:
    core = RefusingCore.of(tiny("qwen2-vl"))
    engine = VllmEngine.embed(core)
    try:
        for _ in range(3):
            with pytest.raises(InvalidRequest, match=r"structured_outputs.regex: the engine cannot compile it"):
                await engine.submit(submission(ACME, regex="abc"))
        assert core.tries == 1
        engine._prefix_era = "0123456789abcdef"  # as after a reset with requests in flight
        with pytest.raises(InvalidRequest):
            await engine.submit(submission(GLOBEX, regex="abc"))
        assert core.tenants == ("acme", "globex"), "the cost of the first fill is its tenant's"
    finally:
        await engine.close()


def test_the_name_of_a_tenant_can_be_read_from_a_salt_of_any_era_S27(engine: VllmEngine) -> None:
    before = engine._prefix_era
    try:
        for era in (None, "0123456789abcdef"):
            engine._prefix_era = era
            salts = [Tenant("acme").prefix_salt, Tenant("acme", "mine/\0globex\n").prefix_salt]
            assert [tenant_name(engine._salt(salt)) for salt in salts] == ["acme", "acme"]
            assert tenant_name(engine._salt("x/\0acme\n")) == tenant_name(engine._salt(None)) == ""
    finally:
        engine._prefix_era = before


async def test_a_closed_pipe_is_503_also_where_the_loop_raises_for_it_S27(engine: VllmEngine) -> None:
    process = await process_of(engine)

    def raise_closed(_: bytes) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process._writer, "write", raise_closed)
        with pytest.raises(NotReady):
            await engine.submit(submission(ACME, regex="closed pipe"))
    await engine.submit(submission(ACME, regex="closed pipe"))


async def test_a_stopped_process_is_noticed_and_the_spare_takes_over_at_once_S27(engine: VllmEngine) -> None:
    grammars = engine.grammars
    first = await process_of(engine)
    grammars.start()
    await engine.submit(submission(ACME, regex="before"))
    assert grammars._spare is not None
    spare = await grammars._spare
    assert spare is not None
    os.kill(first.pid, signal.SIGSTOP)
    await until(lambda: first.is_lost, within_s=30)
    async with asyncio.timeout(10):
        await engine.submit(submission(ACME, regex="after"))
    assert (await process_of(engine)).pid == spare.pid
    grammars._keeps_spare = False


async def test_a_trial_runs_in_the_sandbox_and_knows_no_secret_of_the_worker_s_S27(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await process_of(engine)
    under_way = asyncio.create_task(engine.submit(submission(ACME, json=dear_schema(900))))
    await until(lambda: children(process.pid) != [], within_s=10)
    trial = Path("/proc") / children(process.pid)[0]
    await until(lambda: "Seccomp:\t2" in (trial / "status").read_text(), within_s=10)
    assert "NoNewPrivs:\t1" in (trial / "status").read_text()
    under_way.cancel()
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    setup = await asyncio.to_thread(engine.grammars._setup)
    assert setup is not None
    another = await GrammarProcess.start(setup)
    try:
        environment = Path(f"/proc/{another.pid}/environ").read_bytes()  # noqa: ASYNC240 - no disk is asked
        assert b"secret" not in environment
    finally:
        await another.close()
