"""Sends the requests of a run, as clients behind a balancer do, and judges each answer.

A balancer sends to frontends that are ready. A client whose connection was reset before its answer began sends the
request once more, to another frontend, and never a third time. One whose name of an image is not known any more sends
the image, as the API says. A stream that began and ended without its end is no failure, but what came of it has to be
right.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import aiohttp

from semel.lab.prove.answers import Answer, References, parse_stream, parse_whole
from semel.lab.prove.plan import Ask, Kind, Media, bodies

__all__ = ["Balancer", "Driver", "Outcome", "Tally"]

Outcome = Literal[
    "answered", "streamed", "refused", "aborted", "stream ended", "tie", "failed", "different", "admitted"
]
"""`admitted` is a request that had to be refused and was not."""

_REQUEST_S: Final = 120.0
_PROBE_S: Final = 0.2
_PROBE_TIMEOUT_S: Final = 1.0
_RETRY_S: Final = 0.1
_LEAVE_S: Final = 0.02
_MAX_LINES: Final = 40
_FAULTY: Final[tuple[Outcome, ...]] = ("failed", "different", "admitted")
_RESET: Final = (aiohttp.ClientError, OSError)


@dataclass(slots=True)
class Tally:
    """The outcomes of requests, and how long clients waited."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """The first requests that went wrong, each with its number in the plan."""

    differing_tokens: int = 0
    sent_again: int = 0
    """Requests whose connection was reset."""

    bytes_again: int = 0
    """Requests whose name was not known any more."""

    pairs: set[tuple[str, int]] = field(default_factory=set)
    """Images by tenant: each is an item."""

    items: int = 0
    """Places of items in requests."""

    longest_gap_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Of answers that came whole."""

    seconds: float = 0.0

    @property
    def ended(self) -> int:
        """The number of requests that came to an end."""
        return self.outcomes.total()


class Balancer:
    """The frontends that are ready."""

    def __init__(self, urls: Callable[[], Sequence[str]], probe: str = "/ready") -> None:
        self._urls = urls
        self._probe = probe
        self.ready: list[str] = list(urls())
        self._is_up = asyncio.Event()
        self._is_up.set()

    async def run(self) -> None:
        """Ask all of them again and again."""
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def is_ready(url: str) -> bool:
                try:
                    async with session.get(url + self._probe) as response:
                        return response.status == 200
                except (*_RESET, TimeoutError):
                    return False

            while True:
                urls = list(self._urls())
                answers = await asyncio.gather(*map(is_ready, urls))
                self.ready = [url for url, is_up in zip(urls, answers, strict=True) if is_up] or urls or self.ready
                self._is_up.set() if any(answers) else self._is_up.clear()
                await asyncio.sleep(_PROBE_S)

    async def until_up(self) -> None:
        """Wait until any is ready: one server that starts again is down for everybody."""
        await self._is_up.wait()

    def choose(self, number: int, but: str = "") -> str:
        """Return the frontend of a request."""
        others = [url for url in self.ready if url != but] or self.ready
        return others[number % len(others)]


@dataclass(slots=True)
class _Reply:
    status: int = 0
    text: str = ""
    reset: str = ""
    """Why its connection ended, if it did."""


class Driver:
    """Sends what is planned, so many at a time."""

    def __init__(
        self,
        balancer: Balancer,
        references: References,
        media: Media,
        keys: Mapping[str, str],
        *,
        at_a_time: int,
        is_bare: bool = False,
    ) -> None:
        self.tally = Tally()
        self._is_bare = is_bare  # its errors for a name that it does not know are many
        self._balancer = balancer
        self._references = references
        self._media = media
        self._keys = keys
        self._room = asyncio.Semaphore(at_a_time)
        self._names: set[tuple[str, int]] = set()
        self._last_s = 0.0

    async def run(self, asks: Sequence[Ask]) -> Tally:
        """Send all of it."""
        began = self._last_s = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        probing = asyncio.create_task(self._balancer.run())
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                asyncio.TaskGroup() as group,
            ):
                for ask in asks:
                    await self._room.acquire()
                    await self._balancer.until_up()
                    group.create_task(self._one(session, ask))
        finally:
            probing.cancel()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    async def _one(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        began = time.monotonic()
        ask = self._known(ask)
        try:
            outcome, why = await self._answered(session, ask)
        except TimeoutError:
            outcome, why = "failed", f"no answer within {_REQUEST_S:g} s"
        finally:
            self._room.release()
        now = time.monotonic()
        self.tally.outcomes[outcome] += 1
        if not ask.refusal:
            self.tally.items += len(ask.question.images)
            self.tally.pairs |= {(ask.tenant, image) for image in ask.question.images}
        if outcome in _FAULTY and len(self.tally.faults) < _MAX_LINES:
            self.tally.faults.append(f"request {ask.number} of {ask.tenant}, {_describe(ask)}: {outcome}: {why[:300]}")
        if outcome in ("answered", "streamed"):
            self.tally.longest_gap_s = max(self.tally.longest_gap_s, now - self._last_s)
            self._last_s = now
            self.tally.latencies_s.append(now - began)
            self._names |= {(ask.tenant, image) for image in _named(ask)}

    def _known(self, ask: Ask) -> Ask:
        """Send an image with its name as long as no answer came for that name."""
        pairs = zip(ask.question.images, ask.sources, strict=True)
        sources = tuple(
            "named" if source == "name" and (ask.tenant, image) not in self._names else source
            for image, source in pairs
        )
        return replace(ask, sources=sources)

    async def _answered(self, session: aiohttp.ClientSession, ask: Ask) -> tuple[Outcome, str]:
        """Send all turns of a request; the outcome, and what is wrong."""
        *first, last = bodies(ask, self._media)
        previous: dict[str, Any] = {}
        for path, body in first:
            reply = await self._send(session, ask, path, body)
            if reply.status != 200 or reply.reset:
                return "failed", f"first turn: {reply.status} {reply.reset} {reply.text}"
            previous = {"previous_response_id": json.loads(reply.text)["id"]}
        path, body = last[0], last[1] | previous
        if ask.kind in (Kind.LEFT_EARLY, Kind.LEFT_AT_ONCE):
            return await self._leave(session, ask, path, body)
        reply = await self._send(session, ask, path, body)
        is_unknown = reply.status == 404 and "unknown_media" in reply.text
        if "name" in ask.sources and (is_unknown or (self._is_bare and reply.status >= 400)):
            self.tally.bytes_again += 1
            ask = replace(ask, sources=tuple("named" if one == "name" else one for one in ask.sources))
            reply = await self._send(session, ask, *bodies(ask, self._media)[-1])
        return self._judge(ask, reply)

    async def _send(self, session: aiohttp.ClientSession, ask: Ask, path: str, body: Mapping[str, Any]) -> _Reply:
        """Send a request, and once more if its connection was reset before the answer began."""
        url = self._balancer.choose(ask.number)
        reply = await self._post(session, ask, url + path, body)
        if not reply.reset or _has_begun(ask, reply):
            return reply
        self.tally.sent_again += 1
        await asyncio.sleep(_RETRY_S)
        return await self._post(session, ask, self._balancer.choose(ask.number + 1, but=url) + path, body)

    async def _post(self, session: aiohttp.ClientSession, ask: Ask, url: str, body: Mapping[str, Any]) -> _Reply:
        reply, pieces = _Reply(), list[bytes]()
        try:
            async with session.post(url, json=body, headers=self._headers(ask)) as response:
                reply.status = response.status
                async for piece in response.content.iter_any():
                    pieces.append(piece)
        except _RESET as error:
            reply.reset = repr(error)
        reply.text = b"".join(pieces).decode(errors="replace")
        return reply

    async def _leave(
        self, session: aiohttp.ClientSession, ask: Ask, path: str, body: Mapping[str, Any]
    ) -> tuple[Outcome, str]:
        """Send a request and leave it: at once, or with the first bytes of its stream."""
        url = self._balancer.choose(ask.number) + path
        at_once = asyncio.timeout(_LEAVE_S if ask.kind is Kind.LEFT_AT_ONCE else _REQUEST_S)
        try:
            async with at_once, session.post(url, json=body, headers=self._headers(ask)) as response:
                if response.status not in (200, 404):  # a name that was forgotten may be
                    return "failed", f"{response.status} {await response.text()}"
                await response.content.readany()
                response.close()
        except (*_RESET, TimeoutError):
            return "aborted", ""
        return "aborted", ""

    def _headers(self, ask: Ask) -> dict[str, str]:
        key = "wrong" if ask.refusal == "wrong key" else self._keys[ask.tenant]
        return {"Authorization": f"Bearer {key}"}

    def _judge(self, ask: Ask, reply: _Reply) -> tuple[Outcome, str]:
        if ask.refusal:
            if reply.status == 200:
                return "admitted", reply.text
            is_refused = 400 <= reply.status < 500
            return ("refused", "") if is_refused else ("failed", f"{reply.status} {reply.reset} {reply.text}")
        if reply.status != 200 or (reply.reset and not _has_begun(ask, reply)):
            return "failed", f"{reply.status} {reply.reset} {reply.text}"
        expected = self._references.expected(ask.question)
        if expected is None:
            return "tie", ""
        if ask.kind is Kind.STREAMED:
            return self._judge_stream(reply, expected)
        if reply.reset:
            return "failed", reply.reset
        return self._compare(parse_whole(json.loads(reply.text)), expected, "answered")

    def _judge_stream(self, reply: _Reply, expected: Answer) -> tuple[Outcome, str]:
        answer, error = parse_stream(reply.text)
        if not error:
            return self._compare(answer, expected, "streamed")
        if not any(answer.texts.values()):
            return "failed", f"{error} {reply.reset}"
        if answer.begins(expected):
            return "stream ended", error
        return self._compare(answer, expected, "different")

    def _compare(self, answer: Answer, expected: Answer, outcome: Outcome) -> tuple[Outcome, str]:
        if not (count := answer.differing(expected)):
            return outcome, ""
        self.tally.differing_tokens += count
        return "different", f"{answer} instead of {expected}"


def _has_begun(ask: Ask, reply: _Reply) -> bool:
    """Return whether something of a streamed answer has come."""
    return ask.kind is Kind.STREAMED and reply.status == 200 and any(parse_stream(reply.text)[0].texts.values())


def _named(ask: Ask) -> list[int]:
    return [image for image, source in zip(ask.question.images, ask.sources, strict=True) if source == "named"]


def _describe(ask: Ask) -> str:
    question = ask.question
    form = f"{question.sequences} sequences" if question.sequences > 1 else "schema" if question.has_schema else ""
    turns = "2 turns" if question.next_text else ""
    words = (question.api, ask.kind.value, ask.refusal, form, turns, *ask.sources)
    return " ".join(filter(None, words))
