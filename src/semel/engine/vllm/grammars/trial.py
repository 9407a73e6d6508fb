"""Trial compilation of schemas, regular expressions and grammars, within limits (threats S20).

vLLM turns them into grammars in the process that asks it to, and compiles them in its engine core, in the order in
which they come and for as long as it takes. Here each one is held against its size first, and compiled on trial next to
the event loop (`grammar_process`), within seconds of a CPU and bytes of memory; one at a time for each tenant, so that
nobody's grammars wait behind many of another. What passes goes on to vLLM's own checks, in a thread. Then the engine
compiles it, still one at a time for each tenant: for a request of one token that nobody waits for (`compile`), so that
it is in vLLM's cache of compiled grammars when the client's own request comes. A verdict is remembered by tenant and
content, so a repeat costs nothing and no tenant learns which grammars another one uses. What says nothing about the
content, such as a trial that was killed or got too little CPU time, is answered with 503 and not remembered (S27). The
words are ours throughout (S7).
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from semel.core import Submission, tenant_name
from semel.core.lru import LruMap
from semel.engine.vllm.compat.internals import skip_grammar_checks
from semel.engine.vllm.grammars.child import Outcome, Setup
from semel.engine.vllm.grammars.content import (
    client_outputs,
    compiled_text,
    constrained_field,
    constraint_key,
    constraint_text,
    find_schemas,
    free_kind,
)
from semel.engine.vllm.grammars.limits import MAX_CALL_S, TOO_EXPENSIVE, GrammarLimits
from semel.engine.vllm.grammars.process import GrammarProcess
from semel.errors import Busy, EngineFailed, InvalidRequest, NotReady
from semel.fairness.limits import KeyedLimit
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["Grammars"]

_WALL_FACTOR: Final = 8
"""Seconds in all for each of a CPU: the engine may be using the rest of the machine, and this is no verdict."""

_MEMORY_BYTES: Final = 2 << 30
_COMPILED_BYTES: Final = 64 << 20
_MEMORY_ENTRIES: Final = 4_096
_ENTRY_BYTES: Final = 512
_MAX_WAITING: Final = 64
"""Grammars of one tenant."""

_SEVERAL: Final = 2
_BACKEND: Final = "xgrammar"
_FAILURES: Final = 2
_FAILURE_S: Final = 60.0
"""Seconds for which a grammar is not tried again for a tenant after so many failed trials of it."""

_FAILED: Final = (
    "the schema or grammar could not be tried: its trial was ended from outside, or got too little CPU time. Nothing "
    "is wrong with it: send the request again"
)
_FAILURE_REASONS: Final = {
    Outcome.DIED: "was killed (see the system's log if memory ran out)",
    Outcome.LATE: "got too little CPU time",
}
_REFUSED_AS: Final = {
    Outcome.TOO_LARGE: "too_large",
    Outcome.TOO_SLOW: "too_slow",
    Outcome.EXPENSIVE: "expensive",
}

logger = logging.getLogger(__name__)

_Key = tuple[str, bytes]
"""A tenant's name, and the content of a grammar."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """A verdict on a grammar."""

    refusal: str | None
    outputs: Any
    """vLLM's `StructuredOutputsParams` after its own checks, for requests to copy."""

    nbytes: int
    compiled_bytes: int = 0
    """At most, as far as that is known."""


class Grammars:
    """The grammars of one engine."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        limits: GrammarLimits,
        compile: Callable[[Any, str | None], Awaitable[None]] | None = None,  # noqa: A002
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._limits = limits
        chosen = config.structured_outputs_config.backend
        self._backend = _BACKEND if chosen == "auto" else chosen
        """The one that the engine core keeps: with auto, the one that it is warmed with."""

        self._compile = compile if self._backend == _BACKEND else None
        """Lets the engine compile a grammar under a salt, and returns when it has; None if its backend keeps none."""

        self._clock = clock
        self._failed: LruMap[_Key, tuple[int, float]] = LruMap(_MEMORY_ENTRIES)
        """Number of trials of a grammar that failed in a row, and the time of the last one."""

        self._judged: LruMap[_Key, _Judged] = LruMap(
            limits.remembered_bytes, lambda judged: judged.nbytes, max_entries=_MEMORY_ENTRIES
        )
        self._in_engine: LruMap[_Key, int] = LruMap(
            limits.engine_cache_bytes, lambda nbytes: nbytes, max_entries=_MEMORY_ENTRIES
        )
        """Grammars that the engine has in its own cache of compiled ones, and their bytes."""

        self._tenants: KeyedLimit[str] = KeyedLimit(1)
        self._room = asyncio.Semaphore(limits.at_once)
        self._flights: defaultdict[str, dict[bytes, asyncio.Task[_Judged]]] = defaultdict(dict)
        self._is_tried = self._backend == _BACKEND and tokenizer is not None
        """True if grammars are compiled on trial: the way in which other backends compile is not known here."""

        self._starting: asyncio.Task[GrammarProcess | None] | None = None
        self._spare: asyncio.Task[GrammarProcess | None] | None = None
        self._keeps_spare = False
        self._counts: Counter[str] = Counter()
        self._seen: set[str] = set()
        """The first two tenants that have sent a request."""

    def see(self, submission: Submission) -> None:
        """Note the tenant of a client's request."""
        if len(self._seen) < _SEVERAL:
            self._seen.add(tenant_name(submission.cache_salt))

    def start(self) -> None:
        """Start the process that compiles on trial, before it is needed; nobody waits for it here.

        From the first trial on there is a second one, loaded, that takes over when the first is lost.
        """
        self._keeps_spare = True
        if self._is_tried:
            self._process()

    async def preapprove(self, outputs: Any) -> None:
        """Remember a grammar of the operator's as one that compiles, without a trial."""
        checked = await asyncio.to_thread(self._checked, outputs)
        if checked is not None:
            key = "", constraint_key(outputs)
            self._judged.put(key, _Judged(None, checked, _ENTRY_BYTES))
            self._in_engine.put(key, _ENTRY_BYTES)

    async def close(self) -> None:
        """End that process, and its spare."""
        processes = [process for process in (self._starting, self._spare) if process is not None]
        self._starting = self._spare = None
        for flight in [flight for flights in self._flights.values() for flight in flights.values()]:
            flight.cancel()
        for starting in processes:
            starting.cancel()
        for started in await asyncio.gather(*processes, return_exceptions=True):
            if isinstance(started, GrammarProcess):
                await started.close()

    def samples(self) -> Iterator[Sample]:
        """Yield samples of its metrics."""
        for outcome in ("remembered", "compiled", "refused", "too_large", "too_slow", "expensive", "failed", "busy"):
            yield metrics.GRAMMARS, self._counts[outcome], (outcome,)
        yield metrics.GRAMMARS_WAITING, sum(map(len, self._flights.values())), ()

    def check_sizes(self, submission: Submission, outputs: Any) -> None:
        """Refuse what is too long to be compiled; tools that are not compiled do not count."""
        if outputs is None:
            return
        field = constrained_field(submission)
        text = constraint_text(outputs, field)
        for name, part in find_schemas(submission, outputs, field, text):
            self._check_size(name, part, self._limits.max_schema_bytes, "one schema (--max-schema-bytes)")
        limit = self._limits.max_request_bytes
        self._check_size(field, text, limit, "one request (--max-request-schema-bytes)")

    def _check_kind(self, submission: Submission) -> None:
        """Refuse regular expressions and grammars where tenants share the engine, unless the operator allows them."""
        kinds = self._limits.kinds
        if kinds == "all" or (kinds == "auto" and len(self._seen) < _SEVERAL):
            return
        if (kind := free_kind(client_outputs(submission))) is not None:
            self._counts["refused"] += 1
            named = "regular expressions" if kind == "regex" else "grammars"
            raise InvalidRequest(
                f"{constrained_field(submission)}: this server takes no {named}: send a JSON schema or a choice, or "
                "ask its operator for --structured-outputs-kinds all"
            )

    def _check_size(self, field: str | None, text: str, limit: int, of_what: str) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(f"{field}: it is not valid Unicode") from None
        if size > limit:
            self._counts["too_large"] += 1
            raise InvalidRequest(
                f"{field}: {size:,} bytes to be compiled; the limit is {limit:,} for {of_what}: send less"
            )

    async def admit(self, submission: Submission, params: Any) -> None:
        """Make sure that the engine can compile what the parameters have, or refuse it."""
        if (outputs := params.structured_outputs) is None:
            return
        field = constrained_field(submission)
        self._check_kind(submission)
        key = tenant_name(submission.cache_salt), constraint_key(outputs)
        judged = self._judged.get(key)
        if judged is not None and (judged.refusal is not None or self._is_in_engine(key)):
            self._counts["remembered"] += 1
        else:
            judged = await self._flight(key, outputs, submission.cache_salt)
        if judged.refusal is not None:
            raise InvalidRequest(f"{field}: {judged.refusal}")
        params.structured_outputs = copy.copy(judged.outputs)
        skip_grammar_checks(params)  # or vLLM would convert it again, twice, in the event loop

    async def _flight(self, key: _Key, outputs: Any, cache_salt: str | None) -> _Judged:
        """Judge a grammar; requests of a tenant that have the same one wait for the same."""
        tenant, content = key
        flights = self._flights[tenant]
        if (flight := flights.get(content)) is None:
            if len(flights) >= _MAX_WAITING:
                self._counts["busy"] += 1
                raise Busy(f"{_MAX_WAITING} schemas or grammars wait to be compiled already: send it again later")
            flight = flights[content] = asyncio.create_task(self._judge(key, outputs, cache_salt))

            def land(_: object) -> None:
                flights.pop(content, None)
                if not flights and self._flights.get(tenant) is flights:
                    del self._flights[tenant]

            flight.add_done_callback(land)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await asyncio.shield(flight)
        except TimeoutError:
            self._counts["busy"] += 1
            raise Busy(
                f"the schema or grammar was not compiled within {self._limits.wait_s:g} s, behind others: "
                "send it again later"
            ) from None

    async def _judge(self, key: _Key, outputs: Any, cache_salt: str | None) -> _Judged:
        """Judge a grammar: on trial, and in the engine, one after the other for each tenant."""
        with await self._tenants.permit(key[0]):
            async with self._room:
                if (judged := self._judged.get(key)) is None:
                    judged = await self._try(key, outputs)
                    self._judged.put(key, judged)
                if judged.refusal is None and self._compile is not None:
                    judged = await self._compiled(judged, cache_salt)
                    self._judged.put(key, judged)
                    self._in_engine.put(key, _ENTRY_BYTES + judged.compiled_bytes)
        return judged

    async def _compiled(self, judged: _Judged, cache_salt: str | None) -> _Judged:
        """Let the engine compile a grammar that passed its trial; it may still refuse it."""
        assert self._compile is not None
        try:
            await self._compile(copy.copy(judged.outputs), cache_salt)
        except InvalidRequest:
            refusal = TOO_EXPENSIVE
        except EngineFailed:
            refusal = "the engine cannot compile it: write it in another way"
        else:
            return judged
        self._counts["refused"] += 1
        return _Judged(refusal, None, _ENTRY_BYTES)

    async def _try(self, key: _Key, outputs: Any) -> _Judged:
        """Try a grammar in a process of its own, and in vLLM's checks; without a trial, all goes well."""
        outcome, compiled_bytes = Outcome.COMPILED, 0
        if self._is_tried and (process := await asyncio.shield(self._process())) is not None:
            self._check_failures(key)
            outcome, compiled_bytes = await process.compile(*compiled_text(outputs))
        if not outcome.is_verdict:
            self._fail(key, outcome)
        checked = await asyncio.to_thread(self._checked, outputs) if outcome is Outcome.COMPILED else None
        self._counts["compiled" if checked is not None else _REFUSED_AS.get(outcome, "refused")] += 1
        if checked is None:
            return _Judged(self._refusal(outcome, outputs), None, _ENTRY_BYTES)
        return _Judged(None, checked, _ENTRY_BYTES + len(constraint_text(checked)), compiled_bytes)

    def _check_failures(self, key: _Key) -> None:
        """Refuse to try a grammar that failed several times just now."""
        failures, since = self._failed.get(key) or (0, 0.0)
        if failures >= _FAILURES and self._clock() - since < _FAILURE_S:
            raise NotReady(_FAILED)

    def _fail(self, key: _Key, outcome: Outcome) -> NoReturn:
        """Note a trial that says nothing about its grammar."""
        failures, since = self._failed.get(key) or (0, 0.0)
        now = self._clock()
        self._failed.put(key, (failures + 1 if now - since < _FAILURE_S else 1, now))
        self._counts["failed"] += 1
        logger.warning("the trial of a grammar failed: its process %s", _FAILURE_REASONS[outcome])
        raise NotReady(_FAILED)

    def _is_in_engine(self, key: _Key) -> bool:
        """Return whether the engine has it compiled, or compiles it in ways that are not known here."""
        return self._compile is None or self._in_engine.get(key) is not None

    def _refusal(self, outcome: Outcome, outputs: Any) -> str:
        match outcome:
            case Outcome.TOO_SLOW:
                return (
                    f"it takes more than {self._limits.compile_s:g} s to compile (--max-schema-compile-s): make it "
                    "simpler, with lower bounds on lengths, items, properties and repetitions"
                )
            case Outcome.EXPENSIVE:
                return TOO_EXPENSIVE
            case Outcome.TOO_LARGE:
                return f"compiled it takes more than {_COMPILED_BYTES >> 20} MiB: make it simpler"
            case Outcome.COMPILED if outputs.json is not None:  # so it was vLLM that refused it
                return (
                    f"the engine's grammar backend ({self._backend}) does not enforce all of it: leave out features "
                    "such as multipleOf, uniqueItems, contains, patternProperties beside properties, several allOf"
                )
            case _:
                return "no grammar can be made of it: check its syntax"

    def _process(self) -> asyncio.Task[GrammarProcess | None]:
        """Return the process, or its start; if it is lost the spare, or another one."""
        if self._starting is None or _is_over(self._starting):
            self._starting, self._spare = self._spare, None
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(self._start())
        elif self._keeps_spare and self._starting.done() and (self._spare is None or _is_over(self._spare)):
            self._spare = asyncio.create_task(self._start())
        return self._starting

    async def _start(self) -> GrammarProcess | None:
        if (setup := await asyncio.to_thread(self._setup)) is None:
            self._is_tried = False
            return None
        try:
            return await GrammarProcess.start(setup)
        except NotReady:
            logger.exception("the process that compiles grammars cannot be started")
            raise

    def _setup(self) -> Setup | None:
        import xgrammar
        from vllm import envs

        model = self._config.model_config
        try:
            tokenizer = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=model.get_vocab_size())
        except Exception as error:  # noqa: BLE001 - foreign code, over a tokenizer of any kind
            logger.warning("grammars are not compiled on trial: xgrammar cannot read the tokenizer (%r)", error)
            return None
        return Setup(
            tokenizer.serialize_json(),
            not self._config.structured_outputs_config.disable_any_whitespace,
            self._limits.compile_s,
            self._limits.compile_s * _WALL_FACTOR,
            _MEMORY_BYTES,
            _COMPILED_BYTES,
            envs.VLLM_XGRAMMAR_CACHE_MB << 20,
            self._limits.compile_s,
            MAX_CALL_S,
        )

    def _checked(self, outputs: Any) -> Any | None:
        """Run vLLM's own checks; None if it refuses the parameters. In a thread: it converts them once more."""
        from vllm.sampling_params import SamplingParams

        copied = copy.copy(outputs)
        if copied.json is not None and not isinstance(copied.json, str):
            copied.json = json.dumps(copied.json)  # as vLLM itself writes it; a text is not copied deep each time
        probe, config = SamplingParams(structured_outputs=copied), self._config
        try:
            probe._validate_structured_outputs(config.model_config, config.structured_outputs_config, self._tokenizer)
        except Exception as error:  # noqa: BLE001 - foreign code, over what a client sent, may raise anything
            logger.info("vLLM refused a grammar: %r", error)
            return None
        if copied._backend != self._backend:
            logger.info("a grammar is for the backend %s, the engine's is %s", copied._backend, self._backend)
            return None
        return copied


def _is_over(starting: asyncio.Task[GrammarProcess | None]) -> bool:
    if not starting.done():
        return False
    if starting.cancelled() or starting.exception() is not None:
        return True
    started = starting.result()
    return started is not None and started.is_lost
