"""An agent that looks at a screen in every turn, and sends its whole conversation each time.

Four conversations grow side by side: with data URLs at bare vLLM, with data URLs at semel, at semel through
`semel.openai`, which sends a screen once and names it afterwards, and on Responses at a frontend of semel's that stores
them: there a turn is a new screen and `previous_response_id`, and the client any. The time to the first token then
grows with every screen of the history; the slope says by how much. An answer has one token, so its latency is that
time.

The floor is vLLM's engine in process (`floor`), which gets the same prompts rendered: no server can be faster. It has
an engine of its own, so it runs after vLLM's server has ended, in turns with semel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, Protocol

from semel.errors import ConfigError, ServiceError
from semel.lab.bench.serving.alternate import Pair, take_turns
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT, RESPONSES, Client
from semel.lab.bench.serving.figures import Row, compared, counted, grown
from semel.lab.bench.serving.floor import Floor
from semel.lab.bench.serving.images import chat, image_part, text_part
from semel.lab.bench.serving.procfs import cpu_s
from semel.lab.bench.serving.screens import Screens
from semel.lab.bench.serving.servers import Launch, Server, storing_frontend
from semel.lab.bench.serving.statistics import slope_of
from semel.lab.bench.serving.work import Work, work_of

__all__ = [
    "Look",
    "Talk",
    "agent",
    "agent_next_to_engine",
    "agent_rows",
    "by_reference",
    "compare_with_engine",
    "continued",
    "inline",
    "turns_that_fit",
]

_QUESTION: Final = "What do you do next?"
_ANSWER: Final = "I click on the second window."
_WARMING: Final = 2
_LAST: Final = 10
_JSON: Final = {"Content-Type": "application/json"}


class Talk:
    """A conversation that grows by a screen with every turn."""

    def __init__(self, screens: Screens, options: Mapping[str, object]) -> None:
        self._screens = screens
        self._fields: dict[str, Any] = {"mm_processor_kwargs": dict(options)} if options else {}
        self._messages: list[Any] = []

    def next(self) -> bytes:
        """Return the request of the next turn: all messages so far, and a new screen."""
        if self._messages:
            self._messages.append(_ANSWER)
        self._messages.append([image_part(self._screens.draw(), "png"), text_part(_QUESTION)])
        return chat(*self._messages, **self._fields)


@dataclass(frozen=True, slots=True)
class Look:
    """One turn."""

    latency_ms: float
    sent_bytes: int
    prompt_tokens: int
    client_ms: float = 0.0
    """What the client itself took, before it sent the request and after it had the answer."""

    work: Work | None = None
    cpu_ms: float | None = None
    """The CPU time of all processes of the server, which other load on the machine hardly changes."""


class _Asks(Protocol):
    """A way of asking."""

    async def __call__(self, body: bytes) -> Look:
        """Send a request, and measure it."""


def inline(client: Client) -> _Asks:
    """Sends requests as they are."""

    async def ask(body: bytes) -> Look:
        answer = await client.must(CHAT, body)
        return Look(answer.seconds * 1e3, len(body), _prompt_tokens(answer.body))

    return ask


def by_reference(client: Client) -> _Asks:
    """Sends requests as an agent does that has `semel.openai.async_client()`; what that sends goes through `client`."""
    try:
        import httpx

        from semel.openai import async_client
    except ImportError:
        raise ConfigError("the scenario agent needs httpx: `pip install semel[client]`") from None

    class Wire(httpx.AsyncBaseTransport):
        sent_bytes = 0
        seconds = 0.0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            content = await request.aread()
            answer = await client.ask(CHAT, content)
            self.sent_bytes += len(content)
            self.seconds += answer.seconds
            return httpx.Response(answer.status, headers=_JSON, content=answer.body)

    wire = Wire()
    http = async_client(transport=wire)

    async def ask(body: bytes) -> Look:
        sent_bytes, seconds, began = wire.sent_bytes, wire.seconds, perf_counter()
        response = await http.post(f"{client.url}{CHAT}", content=body, headers=_JSON)
        took_s, waited_s = perf_counter() - began, wire.seconds - seconds
        if response.status_code != 200:
            raise ServiceError(f"{client.url}{CHAT} answers {response.status_code}: {response.content[:500]!r}")
        tokens = _prompt_tokens(response.content)
        return Look(waited_s * 1e3, wire.sent_bytes - sent_bytes, tokens, (took_s - waited_s) * 1e3)

    return ask


def continued(client: Client) -> _Asks:
    """Sends of each request only the last message, and the id of the response before."""
    previous: str | None = None

    async def ask(body: bytes) -> Look:
        nonlocal previous
        chat = json.loads(body)
        image, text = chat["messages"][-1]["content"]
        content = [
            {"type": "input_image", "image_url": image["image_url"]["url"]},
            {"type": "input_text", "text": text["text"]},
        ]
        fields = {"input": [{"role": "user", "content": content}], "previous_response_id": previous}
        options = {"mm_processor_kwargs": chat["mm_processor_kwargs"]} if "mm_processor_kwargs" in chat else {}
        request = json.dumps({**fields, **options, "temperature": 0.0, "max_output_tokens": 1}).encode()
        answer = await client.must(RESPONSES, request)
        read = json.loads(answer.body)
        previous = read["id"]
        return Look(answer.seconds * 1e3, len(request), int(read["usage"]["input_tokens"]))

    return ask


def _prompt_tokens(answer: bytes) -> int:
    return int(json.loads(answer)["usage"]["prompt_tokens"])


def turns_that_fit(max_tokens: int, first: int, second: int) -> int:
    """Count the turns that fit a context, of which the first two had so many tokens; one more is the answer's."""
    return 1 + max(0, max_tokens - 1 - first) // (second - first)


async def agent(bench: Bench) -> list[Row]:
    """Hold all conversations, turn by turn. vLLM with the door takes no references, servers elsewhere store nothing."""
    async with AsyncExitStack() as stack:
        storing = None
        if bench.launch is not None and not bench.sides.semel.has_door:
            bench.tell("starting a frontend that stores responses", 0, 1)
            storing = await _storing(bench.launch, bench.sides.semel.server, stack)
        return await _agent(bench, storing)


async def _storing(launch: Launch, semel: Server, stack: AsyncExitStack) -> Side:
    """Start a frontend that stores responses; of its side are also the processes of semel's server, with the worker."""
    server = await stack.enter_async_context(storing_frontend(launch))
    client = await stack.enter_async_context(Client(server.url))
    return Side(replace(semel, urls=server.urls, roots=(*semel.roots, *server.roots)), client)


async def _agent(bench: Bench, storing: Side | None) -> list[Row]:
    turns = await _turns(bench)
    semel, vllm = bench.sides.semel, bench.sides.vllm
    asks = {"vllm": inline(vllm.client), "inline": inline(semel.client)}
    if not semel.has_door:
        asks["reference"] = by_reference(semel.client)
    if storing is not None:
        asks["continued"] = continued(storing.client)
        await asks["continued"](_talk(bench, 8).next())  # its caches are cold; the conversation begins anew
        asks["continued"] = continued(storing.client)
    talks = {name: _talk(bench, number + 4 * semel.has_door) for number, name in enumerate(asks)}
    ways = list(asks)[1:]

    async def look(side: Side, turn: int) -> dict[str, Look]:
        names = ["vllm"] if side is vllm else ways if turn % 4 < 2 else ways[::-1]
        sides = {name: storing if name == "continued" and storing is not None else side for name in names}
        return {name: await _counted(asks[name], talks[name].next(), bench, sides[name]) for name in names}

    looks = await bench.turns("an agent's turns", look, turns=turns, warming=0)
    return agent_rows(
        [look["vllm"] for look in looks.vllm],
        [look["inline"] for look in looks.semel],
        [look["reference"] for look in looks.semel if "reference" in look],
        [look["continued"] for look in looks.semel if "continued" in look],
    )


async def _turns(bench: Bench) -> int:
    """Return the number of turns that the model's context has room for. Asking also warms up both sides."""
    counts: dict[str, list[int]] = {}
    for name in ("semel", "vllm"):
        side: Side = getattr(bench.sides, name)
        talk, ask = _talk(bench, 9), inline(side.client)
        counts[name] = [(await ask(talk.next())).prompt_tokens for _ in range(_WARMING)]
    if counts["semel"] != counts["vllm"]:
        raise ServiceError(f"the servers make different prompts of a conversation: {counts} tokens")
    models = json.loads(await bench.sides.vllm.client.read("/v1/models"))
    room = turns_that_fit(int(models["data"][0]["max_model_len"]), *counts["vllm"])
    return min(bench.effort.agent_turns, room)


def _talk(bench: Bench, number: int) -> Talk:
    options = {} if bench.launch is None else bench.launch.screen_options
    return Talk(Screens(bench.images.seed * 16 + number), options)


async def _counted(ask: _Asks, body: bytes, bench: Bench, side: Side) -> Look:
    before = await work_of(bench, side)
    pids = side.server.pids()
    spent_s = cpu_s(pids)
    look = await ask(body)
    spent_ms = (cpu_s(pids) - spent_s) * 1e3 if pids else None
    return replace(look, work=(await work_of(bench, side)).since(before), cpu_ms=spent_ms)


def agent_rows(
    vllm: Sequence[Look], inline: Sequence[Look], reference: Sequence[Look] = (), continued: Sequence[Look] = ()
) -> list[Row]:
    """Return the figures of conversations with equally many turns."""
    turns = len(vllm)
    whole = f"{turns} turns"
    theirs = _latencies(vllm)
    named = {"data URLs": inline, "by reference": reference, "previous_response_id": continued}
    ways = [(name, looks) for name, looks in named.items() if looks]
    rows = [
        grown(f"agent: per image of history, {name}", "ms", Pair(_latencies(looks), theirs)) for name, looks in ways
    ]
    if reference:
        own = slope_of([look.client_ms for look in reference])
        rows.append(Row("agent: per image of history, by reference, the client's own work", "ms", own))
    for name, looks in ways:
        last = Pair(_latencies(looks)[-_LAST:], theirs[-_LAST:])
        rows += _processor_rows(name, looks, vllm)
        rows.append(compared(f"agent: the last turns, {name}", "ms", last))
        rows.append(counted(f"agent: bytes sent, {name}", "bytes", _sent(looks), _sent(vllm)))
    their_work = _sum_of(vllm)
    missed = 0.0
    for name, looks in ways:
        done = _sum_of(looks)
        for what in ("decoded", "preprocessed", "encoded"):
            if (count := getattr(done, what)) is not None:
                rows.append(counted(f"agent: {whole}, {name}, {what}", "images", count, getattr(their_work, what)))
                missed += abs(count - turns)
    return [*rows, counted("agent: images not decoded, preprocessed and encoded once", "images", missed)]


def _processor_rows(name: str, mine: Sequence[Look], theirs: Sequence[Look]) -> list[Row]:
    """Slopes of the CPU time, if it is known of every turn."""
    series = Pair(*([one.cpu_ms for one in looks if one.cpu_ms is not None] for looks in (mine, theirs)))
    if not len(mine) == len(theirs) == len(series.semel) == len(series.vllm):
        return []
    return [replace(grown(f"agent: per image of history, {name}, CPU time", "ms", series), turns=None)]


def _latencies(looks: Sequence[Look]) -> list[float]:
    return [look.latency_ms for look in looks]


def _sent(looks: Sequence[Look]) -> int:
    return sum(look.sent_bytes for look in looks)


def _sum_of(looks: Sequence[Look]) -> Work:
    work = [look.work for look in looks if look.work is not None]
    encoded = [one.encoded for one in work if one.encoded is not None]
    return Work(
        sum(one.decoded for one in work),
        sum(one.preprocessed for one in work),
        sum(encoded) if encoded and len(encoded) == len(work) else None,
    )


async def agent_next_to_engine(bench: Bench, client: Client, floor: Floor) -> list[Row]:
    """Hold a conversation with semel by reference, through `client`, and one with the engine, turn by turn."""
    return await compare_with_engine(bench, _with_cpu_time(by_reference(client), bench.sides.semel.server), floor)


def _with_cpu_time(ask: _Asks, server: Server) -> _Asks:
    async def timed(body: bytes) -> Look:
        pids = server.pids()
        spent_s = cpu_s(pids)
        look = await ask(body)
        return replace(look, cpu_ms=(cpu_s(pids) - spent_s) * 1e3)

    return timed


async def compare_with_engine(bench: Bench, semel: _Asks, floor: Floor) -> list[Row]:
    """Hold a conversation of semel's and one of the engine's."""

    async def ask_floor(body: bytes) -> Look:
        answer = await floor.ask(body)
        return Look(answer.seconds * 1e3, 0, answer.prompt_tokens, cpu_ms=answer.cpu_s * 1e3)

    sides = Pair(semel, ask_floor)
    warm = {id(ask): _talk(bench, 10 + number) for number, ask in enumerate((semel, ask_floor))}
    firsts = await take_turns(sides, lambda ask, _: ask(warm[id(ask)].next()), turns=_WARMING)
    counts = [look.prompt_tokens for look in firsts.vllm]
    turns = min(bench.effort.agent_turns, turns_that_fit(floor.max_tokens, *counts))
    talks = {id(ask): _talk(bench, 12 + number) for number, ask in enumerate((semel, ask_floor))}
    done = 0

    def on_turn() -> None:
        nonlocal done
        done += 1
        bench.tell("an agent's turns, next to the engine in process", done, turns)

    looks = await take_turns(sides, lambda ask, _: ask(talks[id(ask)].next()), turns=turns, on_turn=on_turn)
    latencies = Pair(_latencies(looks.semel), _latencies(looks.vllm))
    name = "by reference, next to the engine in process"
    last = Pair(latencies.semel[-_LAST:], latencies.vllm[-_LAST:])
    return [
        grown(f"agent: per image of history, {name}", "ms", latencies),
        *_processor_rows(name, looks.semel, looks.vllm),
        compared(f"agent: the last turns, {name}", "ms", last),
    ]
