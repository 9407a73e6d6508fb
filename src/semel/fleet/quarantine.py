"""Requests that were under way when an engine died, of which one may have killed it (threats S22). Pure: no clock.

A request that was under way gets a strike. It gets one *isolated retry* elsewhere: until its first output, no other
such request is at the same engine. If that engine dies too, the isolated request gets the second strike; without one,
all that were there. With two strikes, of two engines, a tenant's content is refused for 10 minutes. An answer that
comes to its end clears its content. Content that has a strike is answered one at a time, and others with it wait: a
client that sends the same again must not kill a third engine with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from semel.core import LruMap, Submission, tenant_name
from semel.errors import NotReady, RequestQuarantined

__all__ = ["IDLE_WORKER_TIMEOUT_S", "KEEP_S", "MAX_STRIKES", "Content", "EngineRun", "Quarantine", "Suspect"]

KEEP_S: Final = 600.0  # for which a strike counts, and content with two of them is refused
MAX_STRIKES: Final = 2
IDLE_WORKER_TIMEOUT_S: Final = 30.0
"""The longest wait for an engine that no other suspect is at."""

_MAX_TENANTS: Final = 256
_MAX_CONTENTS: Final = 256  # of one tenant: the strikes of one forget nothing of another
_MAX_ENGINES: Final = 1_024


class EngineRun(NamedTuple):
    """An engine, from one start to its end: the address of its worker, and the number of our session with it."""

    worker: str
    session: int


class Content(NamedTuple):
    """The tenant, prompt and items of a request, whatever its sampling parameters."""

    tenant: str
    hash: int  # not cryptographic, and so ten times as fast: only a tenant's own contents can collide

    @classmethod
    def of(cls, submission: Submission) -> Content:
        """Return the content of a submission."""
        prompt = submission.prompt
        encoder = tuple(prompt.encoder_token_ids or ())
        return cls(tenant_name(submission.cache_salt), hash((tuple(prompt.token_ids), encoder, prompt.items)))


@dataclass(slots=True, eq=False)
class Suspect:
    """One request, from its submission to its end."""

    content: Content
    engine: EngineRun | None = None  # where it is under way
    is_isolated: bool = False


@dataclass(slots=True, eq=False)
class _Record:
    """The strikes of one content."""

    engines: list[EngineRun] = field(default_factory=list)  # those that died with it under way
    until: float = 0.0
    isolated_retry: Suspect | None = None  # others wait for its end


class Quarantine:
    """Contents that were under way when engines died, and the engines that are reserved for isolated retries."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._tenants: LruMap[str, LruMap[int, _Record]] = LruMap(_MAX_TENANTS)
        self._until = float("-inf")  # the last strike is forgotten then
        self._lanes: dict[str, Suspect] = {}  # by worker, the suspect that its engine is reserved for
        # Engines that died of an isolated suspect: nobody else that had a strike gets another for it.
        self._blamed: LruMap[EngineRun, bool] = LruMap(_MAX_ENGINES)

    def strikes(self, content: Content) -> int:
        """Count the engines that have died with this content under way."""
        record = self._record(content)
        return 0 if record is None else len(record.engines)

    def has_isolated_retry(self, content: Content) -> bool:
        """Return whether a request with this content, which has a strike, is under way: others wait for its end."""
        record = self._record(content)
        return record is not None and record.isolated_retry is not None

    def enter(self, content: Content) -> Suspect:
        """Begin a request; raises if its content is refused, or is being retried."""
        suspect = Suspect(content)
        if (record := self._record(content)) is not None:
            self.check_strikes(suspect)
            if record.isolated_retry is not None:
                raise NotReady("the same request was under way when an engine died, and is tried now; try again soon")
            record.isolated_retry = suspect
        return suspect

    def check_strikes(self, suspect: Suspect) -> None:
        """Raise if the content of a request is refused."""
        record = self._record(suspect.content)
        if record is not None and len(record.engines) >= MAX_STRIKES:
            left_s = record.until - self._now()
            raise RequestQuarantined(
                f"this request was under way when {MAX_STRIKES} engines died; it is refused for {left_s:.0f} s",
                retry_after_s=left_s,
            )

    def may_retry_isolated(self, suspect: Suspect, worker: str) -> bool:
        """Return whether no other suspect is at a worker's engine, and none with the same content is retried."""
        record = self._record(suspect.content)
        is_free = self._lanes.get(worker) in (None, suspect)
        return is_free and (record is None or record.isolated_retry in (None, suspect))

    def submit(self, suspect: Suspect, engine: EngineRun, *, isolated: bool = False) -> None:
        """Note that it goes to an engine; `isolated` if it was under way when another one died."""
        self.release_engine(suspect)
        suspect.engine = engine
        if isolated:
            assert self.may_retry_isolated(suspect, engine.worker), "the engine is not free"
            suspect.is_isolated = True
            self._lanes[engine.worker] = suspect
            if (record := self._record(suspect.content)) is not None:
                record.isolated_retry = suspect

    def finish(self, suspect: Suspect) -> None:
        """Note that its answer is complete: nothing is wrong with it."""
        is_clean = self._now() >= self._until
        if not is_clean and (contents := self._tenants.peek(suspect.content.tenant)) is not None:
            contents.pop(suspect.content.hash)
        self.leave(suspect)

    def die(self, suspect: Suspect) -> None:
        """Note that the engine that it was under way at has died."""
        engine, was_isolated = suspect.engine, suspect.is_isolated
        if engine is None:
            return
        is_anothers = engine in self._blamed or (not was_isolated and engine.worker in self._lanes)
        if was_isolated:
            self._blamed.put(engine, True)
        if not (is_anothers and self.strikes(suspect.content)):
            self._strike(suspect.content, engine)
        self.leave(suspect)

    def leave(self, suspect: Suspect) -> None:
        """End it: it is not under way any more."""
        self.release_engine(suspect)
        suspect.engine = None
        record = self._record(suspect.content)
        if record is not None and record.isolated_retry is suspect:
            record.isolated_retry = None

    def release_engine(self, suspect: Suspect) -> None:
        """Let the next suspect have its engine: its first output has come, or it is over."""
        if suspect.is_isolated and suspect.engine is not None:
            del self._lanes[suspect.engine.worker]
        suspect.is_isolated = False

    def _strike(self, content: Content, engine: EngineRun) -> None:
        record = self._record(content) or _Record()
        if engine not in record.engines:
            record.engines.append(engine)
        record.until = self._until = self._now() + KEEP_S
        self._contents(content).put(content.hash, record)

    def _record(self, content: Content) -> _Record | None:
        if self._now() >= self._until:
            return None  # nearly always: no engine has died
        contents = self._tenants.peek(content.tenant)
        record = None if contents is None else contents.peek(content.hash)
        if contents is not None and record is not None and record.until <= self._now():
            contents.pop(content.hash)
            return None
        return record

    def _contents(self, content: Content) -> LruMap[int, _Record]:
        contents = self._tenants.get(content.tenant)
        if contents is None:
            contents = LruMap(_MAX_CONTENTS)
            self._tenants.put(content.tenant, contents)
        return contents
