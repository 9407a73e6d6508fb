"""What a request's answer is held to: schemas, regular expressions, grammars, and what they may cost (threats S20).

vLLM turns them into grammars in the process that asks it to, and compiles them in its engine core, in the order in
which they come and for as long as it takes. Here each one is held against its size first, and compiled on trial beside
the event loop (`grammar_process`), within seconds of a CPU and bytes of memory; one at a time for each tenant, so that
nobody's grammars wait behind many of another. What passes goes on to vLLM's own checks, in a thread, and to the engine.
What became of a grammar is remembered by its content, so a repeat costs nothing. The words are ours throughout (S7).
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from semel.core import Submission, hash_parts, tenant_name
from semel.core.lru import LruMap
from semel.engine.vllm.compat import skip_grammar_checks
from semel.engine.vllm.grammar_child import Outcome, Setup
from semel.engine.vllm.grammar_limits import GrammarLimits
from semel.engine.vllm.grammar_process import GrammarProcess
from semel.errors import Busy, InvalidRequest, NotReady
from semel.media.fetch.keyed_limit import KeyedLimit
from semel.telemetry.meter import Sample
from semel.telemetry.metrics import GRAMMARS, GRAMMARS_WAITING

__all__ = ["Grammars", "client_outputs", "constrained_field"]

_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_WALL_FACTOR: Final = 3
"""Seconds in all for each of a CPU: the engine may be using the rest of the machine."""

_MEMORY_BYTES: Final = 2 << 30
_COMPILED_BYTES: Final = 64 << 20
_MEMORY_ENTRIES: Final = 4_096
_ENTRY_BYTES: Final = 512
_MAX_WAITING: Final = 64
"""Grammars of one tenant."""

_BACKEND: Final = "xgrammar"
_REFUSED_AS: Final = {Outcome.TOO_LARGE: "too_large", Outcome.TOO_SLOW: "too_slow"}
_FORMATS: Final = ("json_schema", "structural_tag", "json_object")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What became of a grammar."""

    refusal: str | None
    outputs: Any
    """vLLM's `StructuredOutputsParams` after its own checks, for requests to copy."""

    nbytes: int


class Grammars:
    """The grammars of one engine."""

    def __init__(self, config: Any, tokenizer: Any, limits: GrammarLimits) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._limits = limits
        chosen = config.structured_outputs_config.backend
        self._backend = _BACKEND if chosen == "auto" else chosen
        """The one that the engine core keeps: with auto, the one that it is warmed with."""

        self._judged: LruMap[bytes, _Judged] = LruMap(
            limits.remembered_bytes, lambda judged: judged.nbytes, max_entries=_MEMORY_ENTRIES
        )
        self._tenants: KeyedLimit[str] = KeyedLimit(1)
        self._room = asyncio.Semaphore(limits.at_once)
        self._flights: defaultdict[str, dict[bytes, asyncio.Task[_Judged]]] = defaultdict(dict)
        self._is_tried = self._backend == _BACKEND and tokenizer is not None
        """Whether grammars are compiled on trial: the way in which other backends compile is not known here."""

        self._starting: asyncio.Task[GrammarProcess | None] | None = None
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """Start the process that compiles on trial, before it is needed; nobody waits for it here."""
        if self._is_tried:
            self._process()

    async def vouch(self, outputs: Any) -> None:
        """Remember a grammar of the operator's as one that compiles, without a trial."""
        checked = await asyncio.to_thread(self._checked, outputs)
        if checked is not None:
            self._judged.put(_content(outputs), _Judged(None, checked, _ENTRY_BYTES))

    async def close(self) -> None:
        """End that process."""
        starting, self._starting = self._starting, None
        for flight in [flight for flights in self._flights.values() for flight in flights.values()]:
            flight.cancel()
        if starting is not None:
            starting.cancel()
            (started,) = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(started, GrammarProcess):
                await started.close()

    def samples(self) -> Iterator[Sample]:
        """What there is to see of it."""
        for outcome in ("remembered", "compiled", "refused", "too_large", "too_slow", "busy"):
            yield GRAMMARS, self._counts[outcome], (outcome,)
        yield GRAMMARS_WAITING, sum(map(len, self._flights.values())), ()

    def check_sizes(self, submission: Submission, outputs: Any) -> None:
        """Refuse what is too long to be compiled; tools that are not compiled do not count."""
        if outputs is None:
            return
        field = constrained_field(submission)
        text = _text_of(outputs, field)
        for name, part in _parts(submission, outputs, field, text):
            self._check_size(name, part, self._limits.max_schema_bytes, "one schema (--max-schema-bytes)")
        limit = self._limits.max_request_bytes
        self._check_size(field, text, limit, "one request (--max-request-schema-bytes)")

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
        content = _content(outputs)
        if (judged := self._judged.get(content)) is not None:
            self._counts["remembered"] += 1
        else:
            judged = await self._flight(tenant_name(submission.cache_salt), content, outputs)
        if judged.refusal is not None:
            raise InvalidRequest(f"{field}: {judged.refusal}")
        params.structured_outputs = copy.copy(judged.outputs)
        skip_grammar_checks(params)  # or vLLM would convert it again, twice, in the event loop

    async def _flight(self, tenant: str, content: bytes, outputs: Any) -> _Judged:
        """What becomes of a grammar; requests of a tenant that have the same one wait for the same."""
        flights = self._flights[tenant]
        if (flight := flights.get(content)) is None:
            if len(flights) >= _MAX_WAITING:
                self._counts["busy"] += 1
                raise Busy(f"{_MAX_WAITING} schemas or grammars wait to be compiled already: send it again later")
            flight = flights[content] = asyncio.create_task(self._judge(tenant, content, outputs))

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

    async def _judge(self, tenant: str, content: bytes, outputs: Any) -> _Judged:
        with await self._tenants.take(tenant):
            async with self._room:
                outcome = await self._outcome(outputs)
                checked = await asyncio.to_thread(self._checked, outputs) if outcome is Outcome.COMPILED else None
        if checked is not None:
            judged = _Judged(None, checked, _ENTRY_BYTES + len(_text_of(checked)))
        else:
            judged = _Judged(self._refusal(outcome, outputs), None, _ENTRY_BYTES)
        self._counts["compiled" if checked is not None else _REFUSED_AS.get(outcome, "refused")] += 1
        self._judged.put(content, judged)
        return judged

    async def _outcome(self, outputs: Any) -> Outcome:
        """What becomes of it on trial; without one, all goes well."""
        if not self._is_tried or (process := await asyncio.shield(self._process())) is None:
            return Outcome.COMPILED
        return await process.compile(*_compiled(outputs))

    def _refusal(self, outcome: Outcome, outputs: Any) -> str:
        match outcome:
            case Outcome.TOO_SLOW:
                return (
                    f"it takes more than {self._limits.compile_s:g} s to compile (--max-schema-compile-s): make it "
                    "simpler, with lower bounds on lengths, items, properties and repetitions"
                )
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
        """The process, or its start; another one if it is lost."""
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(self._start())
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
        )

    def _checked(self, outputs: Any) -> Any | None:
        """The parameters after vLLM's own checks; None if it refuses them. In a thread: it converts them once more."""
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


def constrained_field(submission: Submission) -> str | None:
    """The field of the request that its answer is held to; None if there is nothing that could be compiled."""
    parsing = submission.parsing
    if parsing is not None and (parsing.response_format or {}).get("type") in _FORMATS:
        return "response_format"
    outputs = submission.sampling.get("structured_outputs")
    if isinstance(outputs, Mapping):
        kind = next((kind for kind in _KINDS if outputs.get(kind) is not None), "")
        of_both = parsing is None and kind in ("json", "json_object", "structural_tag")
        return f"response_format or structured_outputs.{kind}" if of_both else f"structured_outputs.{kind}"
    return "tools" if parsing is not None and parsing.tools else None


def client_outputs(submission: Submission) -> Any:
    """What the client itself holds the answer to, in the shape of vLLM's `StructuredOutputsParams`; None if nothing."""
    form = (submission.parsing.response_format if submission.parsing is not None else None) or {}
    named: dict[str, Any] = dict.fromkeys(_KINDS)
    match form.get("type"):
        case "json_schema":
            named["json"] = (form.get("json_schema") or {}).get("schema")
        case "structural_tag":
            named["structural_tag"] = _json(form)
        case _ if isinstance(outputs := submission.sampling.get("structured_outputs"), Mapping):
            named |= {kind: outputs[kind] for kind in _KINDS if kind in outputs}
        case _:
            return None
    return SimpleNamespace(**named)


def _parts(submission: Submission, outputs: Any, field: str | None, text: str) -> Iterator[tuple[str, str]]:
    """Each schema by itself, with the name of where it stands."""
    if field == "tools":
        parsing = submission.parsing
        assert parsing is not None
        for index, tool in enumerate(parsing.tools or ()):
            if _is_compiled(tool, parsing.tool_choice):
                yield f"tools[{index}]", _json(tool["function"].get("parameters"))
    elif outputs.structural_tag is None:
        yield field or "", text
    else:
        for schema in _schemas_in(outputs.structural_tag, field):
            yield f"{field}: a schema", _json(schema)


def _is_compiled(tool: Mapping[str, Any], choice: str | Mapping[str, Any]) -> bool:
    if isinstance(choice, Mapping):
        return bool(choice["function"]["name"] == tool["function"]["name"])
    return choice == "required" or bool(tool["function"].get("strict"))


def _schemas_in(tag: str, field: str | None) -> Iterator[Any]:
    try:
        nodes = [json.loads(tag)]
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field}: the structural tag is not JSON") from None
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            for name in ("schema", "json_schema"):
                if name in node:
                    yield node[name]
            nodes += [value for name, value in node.items() if name not in ("schema", "json_schema")]
        elif isinstance(node, list):
            nodes += node


def _text_of(outputs: Any, field: str | None = None) -> str:
    """What is compiled, as a text; its size is what counts."""
    for name in ("json", "regex", "choice", "grammar", "structural_tag"):
        if (value := getattr(outputs, name)) is not None:
            try:
                return value if isinstance(value, str) else _json(value)
            except (RecursionError, TypeError, ValueError):
                raise InvalidRequest(f"{field}: it is not JSON") from None
    return ""


def _compiled(outputs: Any) -> tuple[str, str]:
    """What is compiled, and as what."""
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    if outputs.json is not None:
        return "json", outputs.json if isinstance(outputs.json, str) else json.dumps(outputs.json)
    if outputs.regex is not None:
        return "regex", outputs.regex
    if outputs.choice is not None:
        return "grammar", choice_as_grammar(outputs.choice)
    if outputs.grammar is not None:
        return "lark" if grammar_is_likely_lark(outputs.grammar) else "grammar", outputs.grammar
    if outputs.structural_tag is not None:
        return "structural_tag", outputs.structural_tag
    return "json", '{"type": "object"}'


def _content(outputs: Any) -> bytes:
    """Equal for equal constraints."""
    kind = next((kind for kind in _KINDS if getattr(outputs, kind) is not None), "")
    options = (outputs.disable_any_whitespace, outputs.disable_additional_properties, outputs.whitespace_pattern)
    return hash_parts([kind.encode(), _text_of(outputs).encode(), repr(options).encode()]).digest()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
