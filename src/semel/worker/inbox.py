"""Submissions of one frontend whose features are still on their way. Pure: no socket, no engine.

The invariant: a submission is waiting exactly as long as a feature that it announced has not arrived, and a feature is
kept exactly as long as a submission that announced it is waiting. Nothing is left when all are complete or aborted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from semel.core import Digest, Feature, Prompt
from semel.engine import Submission
from semel.errors import ProtocolError

__all__ = ["Announced", "Inbox"]


@dataclass(frozen=True, slots=True)
class Announced:
    """A submission, and the digests of the features that follow it."""

    request_id: str
    prompt: Prompt
    sampling: Mapping[str, object]
    cache_salt: str | None
    payloads: frozenset[Digest]


@dataclass(slots=True)
class _Waiting:
    announced: Announced
    features: dict[Digest, Feature] = field(default_factory=dict)

    def complete(self) -> Submission | None:
        if self.features.keys() != self.announced.payloads:
            return None
        return Submission(
            self.announced.request_id,
            self.announced.prompt,
            self.features,
            self.announced.sampling,
            self.announced.cache_salt,
        )


class Inbox:
    """Joins submissions with their features."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._wanted: dict[Digest, set[str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def announce(self, announced: Announced) -> Submission | None:
        """Take in a submission; it is returned at once if no feature follows."""
        if announced.request_id in self._waiting:
            raise ProtocolError(f"request {announced.request_id} was submitted twice")
        waiting = _Waiting(announced)
        if (complete := waiting.complete()) is not None:
            return complete
        self._waiting[announced.request_id] = waiting
        for digest in announced.payloads:
            self._wanted.setdefault(digest, set()).add(announced.request_id)
        return None

    def arrive(self, digest: Digest, feature: Feature) -> list[Submission]:
        """Take in a feature, and return the submissions that are complete with it."""
        complete = []
        for request_id in sorted(self._wanted.pop(digest, ())):
            waiting = self._waiting[request_id]
            waiting.features[digest] = feature
            if (submission := waiting.complete()) is not None:
                del self._waiting[request_id]
                complete.append(submission)
        return complete

    def abort(self, request_id: str) -> bool:
        """Forget a submission; whether it was waiting."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        for digest in waiting.announced.payloads - waiting.features.keys():
            self._wanted[digest].discard(request_id)
            if not self._wanted[digest]:
                del self._wanted[digest]
        return True
