"""S27: the trial follows a grammar as the engine would, and refuses what is expensive to follow.

Everything is real but the engine core, as in S20. The wrong implementations were: a trial that only compiles, which
takes all of `EXPENSIVE`; a walk that takes any token, which learns nothing of JSON: it stays in white space, or closes
the string at once; a trial that was killed, or had too little of the CPU, remembered as the schema's fault, for all
tenants and for ever; a trial that compiles without a cache, where the engine has one; a closed pipe answered with 500.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from semel.core import Tenant, tenant_name
from semel.engine.vllm.engine import VllmEngine
from semel.engine.vllm.grammars.child import PING, Outcome
from semel.engine.vllm.grammars.limits import GrammarLimits
from semel.engine.vllm.grammars.process import GrammarProcess
from semel.engine.vllm.grammars.walk import Vocabulary, walk
from semel.errors import InvalidRequest, NotReady
from tests.engine.sink import Sink
from tests.security.test_s20_grammars import ACME, GLOBEX, children, counts, dear_schema, submission
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]

REGEX = "(a{0,30}){0,30}(a|aa){0,200}"

EXPENSIVE: Mapping[str, tuple[str, str]] = {
    "regex": ("regex", REGEX),
    "e e e": ("grammar", 'root ::= e\ne ::= e e e | e e | "a" | "aa"'),
    "root root": ("grammar", 'root ::= root root | "a"'),
    "a cheap first character": ("regex", f"x{REGEX}"),
    "a branch": ("regex", f"(bc){{600}}|x{REGEX}"),
    "a class": ("regex", REGEX.replace("a", "[a-z ]")),
    "an alternative that ends": ("regex", f"{REGEX}|y0"),
    "words": ("regex", "([A-Za-z]+ ?){1,50}"),
}

HIDDEN: Mapping[str, tuple[str, str]] = {
    "a cheap prefix": ("regex", f"x{{600}}{REGEX}"),
    "a branch that is not taken": ("regex", f"[b-z]{{900}}|aaaab{REGEX}"),
}
"""What no walk of 512 tokens comes to: the engine core has to hold it (`grammar_lane`)."""

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
ORDINARY: tuple[tuple[str, Any], ...] = (
    ("json", {"type": "object", "properties": {"name": _TEXT, "age": {"type": "integer"}}, "required": ["name"]}),
    ("json", {"type": "object"}),
    ("json", {"type": "array", "items": _TEXT}),
    ("json", {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 10}),
    ("json", {"type": "string", "maxLength": 50}),
    ("json", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}),
    ("json", {"type": "string", "format": "date-time"}),
    ("json", {"type": "string", "format": "email"}),
    ("json", {"type": "integer", "minimum": 0, "maximum": 1000}),
    ("json", {"enum": ["red", "green", "blue"]}),
    ("json", {"anyOf": [_TEXT, _NUMBER, {"type": "null"}]}),
    ("json", {"type": "object", "additionalProperties": _NUMBER}),
    ("json", {"type": "object", "properties": {f"f{i}": _TEXT for i in range(30)}}),
    ("json", {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"items": _TEXT}}}}}),
    ("json", {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
    ("json", {"type": "array", "items": {"type": "object", "properties": {"x": _NUMBER, "y": _NUMBER}}}),
    ("json", {"type": "object", "properties": {"bbox": {"type": "array", "items": _NUMBER, "maxItems": 4}}}),
    ("regex", "[0-9]{3}-[0-9]{4}"),
    ("regex", "(yes|no|maybe)"),
    ("regex", "([A-Za-z]+ ){0,49}[A-Za-z]+"),
    ("regex", r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[a-z]{2,6}"),
    ("regex", r"([^,\n]{1,40},){0,20}[^,\n]{1,40}"),
    ("regex", ".{0,100}"),
    ("grammar", 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"'),
    ("grammar", 'root ::= "SELECT " col " FROM " col\ncol ::= [a-z]+'),
)


@pytest.fixture(scope="module")
def sink(tiny: Callable[[str], Path]) -> Sink:
    return Sink.of(tiny("qwen2-vl"))


@pytest.fixture(scope="module")
async def engine(sink: Sink) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine.embed(sink)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
async def process(engine: VllmEngine) -> GrammarProcess:
    return await process_of(engine)


@pytest.mark.parametrize("name", EXPENSIVE)
async def test_what_is_expensive_to_follow_is_refused_on_trial_S27(process: GrammarProcess, name: str) -> None:
    outcome, _ = await process.compile(*EXPENSIVE[name])
    assert outcome is Outcome.EXPENSIVE


async def test_mutant_a_walk_without_limits_goes_on_for_as_long_as_it_is_let_S27(engine: VllmEngine) -> None:
    import msgspec

    setup = await asyncio.to_thread(engine.grammars._setup)
    assert setup is not None
    mutant = await GrammarProcess.start(msgspec.structs.replace(setup, walk_s=1e6, call_s=1e6, wall_s=2.0))
    try:
        outcome, _ = await mutant.compile(*EXPENSIVE["regex"])
        assert outcome is Outcome.LATE, "it goes on for as long as it is let"
    finally:
        await mutant.close()


async def test_25_ordinary_schemas_expressions_and_grammars_are_taken_S27(process: GrammarProcess) -> None:
    assert len(ORDINARY) == 25
    for kind, content in ORDINARY:
        outcome, _ = await process.compile(kind, content if isinstance(content, str) else json.dumps(content))
        assert outcome is Outcome.COMPILED, f"{kind} {content}"


async def test_what_hides_behind_600_tokens_passes_the_trial_S27(process: GrammarProcess) -> None:
    """So that it is known what the engine core has to hold."""
    for job in HIDDEN.values():
        assert (await process.compile(*job))[0] is Outcome.COMPILED


async def test_the_refusal_says_how_to_write_it_and_is_remembered_S27(engine: VllmEngine) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^structured_outputs.regex: .* so that a text has one reading"):
            await engine.submit(submission(ACME, regex="([A-Za-z]+ ?){1,50}"))


def test_a_walk_takes_no_white_space_and_no_quote_where_something_else_is_allowed_S27() -> None:
    taken = walked([b"a", b"b", b'"', b"\n ", b'"a', b" ", b"</s>"])
    assert set(taken) == {b"a", b"b"}


def test_mutant_a_walk_that_takes_any_token_stays_in_white_space_S27(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = Vocabulary.from_tokens([b"x"] * 32, [])
    monkeypatch.setattr(Vocabulary, "from_tokens", lambda *_: everything)
    assert b" " in walked([b"a", b" ", b'"'])


def test_a_walk_that_has_nothing_but_white_space_takes_it_and_never_a_stop_token_S27() -> None:
    assert set(walked([b" ", b"</s>"])) == {b" "}


def walked(vocabulary: list[bytes]) -> list[bytes]:
    """Take a random walk where all tokens are allowed; those that it took."""
    import torch

    taken: list[bytes] = []

    class Matcher:
        def is_terminated(self) -> bool:
            return False

        def reset(self) -> None:
            """There is nothing to forget."""

        def fill_next_token_bitmask(self, mask: Any, _: int) -> None:
            mask[0, 0] = (1 << len(vocabulary)) - 1

        def accept_token(self, token: int) -> bool:
            taken.append(vocabulary[token])
            return True

    mask = torch.zeros((1, 1), dtype=torch.int32)
    stops = [index for index, token in enumerate(vocabulary) if token.endswith(b"</s>")]
    words = Vocabulary.from_tokens(vocabulary, stops)
    assert words.lively.dtype == np.uint32
    assert walk(Matcher(), mask, words, tokens=64, stays=False, max_call_s=1.0)
    return taken


FREE: tuple[Mapping[str, Any], ...] = (
    {"regex": "[a-c]{3}"},
    {"grammar": 'root ::= "a"'},
    {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-c]{3}"}})},
)
SCHEMAS: tuple[Mapping[str, Any], ...] = (
    {"json": {"type": "string", "pattern": "^[a-c]{3}$"}},
    {"json_object": True},
    {"choice": ["a", "b"]},
    {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}})},
)


async def test_regular_expressions_and_grammars_need_the_operator_s_word_from_the_second_tenant_on_S27(
    engine: VllmEngine,
) -> None:
    try:
        for tenant, free in ((ACME, True), (ACME, True), (GLOBEX, False), (ACME, False)):
            for outputs in FREE:
                with nullcontext() if free else pytest.raises(InvalidRequest, match="--structured-outputs-kinds all"):
                    await engine.prepare(submission(tenant, **outputs))
            for outputs in SCHEMAS:
                await engine.prepare(submission(tenant, **outputs))
    finally:
        engine.grammars._seen.clear()


@pytest.mark.parametrize("kinds", ["all", "schemas"])
async def test_the_operator_s_word_holds_for_any_number_of_tenants_S27(engine: VllmEngine, kinds: str) -> None:
    before = engine.grammars._limits
    engine.grammars._limits = GrammarLimits(kinds=kinds)  # type: ignore[arg-type]
    try:
        for tenant in (ACME, GLOBEX):
            for outputs in FREE:
                with nullcontext() if kinds == "all" else pytest.raises(InvalidRequest):
                    await engine.prepare(submission(tenant, **outputs))
            for outputs in SCHEMAS:
                await engine.prepare(submission(tenant, **outputs))
    finally:
        engine.grammars._limits = before
        engine.grammars._seen.clear()


# A verdict is about the content of a grammar, and is the tenant's own.

FAILS_WITH_CACHE = {"type": "string", "pattern": "^(a|aa){0,200}$"}
"""Compiles in xgrammar 0.2.8 without a cache, and fails with one."""


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
    compile_really = process.compile
    monkeypatch.setattr(engine.grammars, "_clock", lambda: now)

    async def compile_late(kind: str, text: str) -> tuple[Outcome, int]:
        if kind == PING:  # whether it lives is asked now and then
            return await compile_really(kind, text)
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
        engine._caches._prefix_era = "0123456789abcdef"  # as after a reset with requests in flight
        with pytest.raises(InvalidRequest):
            await engine.submit(submission(GLOBEX, regex="abc"))
        assert core.tenants == ("acme", "globex"), "the cost of the first fill is its tenant's"
    finally:
        await engine.close()


def test_the_name_of_a_tenant_can_be_read_from_a_salt_of_any_era_S27(engine: VllmEngine) -> None:
    before = engine._caches._prefix_era
    try:
        for era in (None, "0123456789abcdef"):
            engine._caches._prefix_era = era
            salts = [Tenant("acme").prefix_salt, Tenant("acme", "mine/\0globex\n").prefix_salt]
            assert [tenant_name(engine._caches.salt(salt)) for salt in salts] == ["acme", "acme"]
            assert tenant_name(engine._caches.salt("x/\0acme\n")) == tenant_name(engine._caches.salt(None)) == ""
    finally:
        engine._caches._prefix_era = before


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
