"""What should be counted when requests come one after another: a slow and obvious model of who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semel.core import Digest
from tools.fleet.linear import Candidate, choose


@dataclass
class Oracle:
    """A fleet without load. Features are of one size, and no frontend's cache is ever full."""

    workers: Sequence[str]
    items_held: int
    """How many a worker's engine holds; it gives up the one that was not shown for longest."""

    queries: int = 0
    processor_hits: int = 0
    worker_hits: int = 0
    evictions: int = 0
    held: dict[str, list[Digest]] = field(default_factory=dict)
    cached: dict[int, set[Digest]] = field(default_factory=dict)

    def ask(self, digest: Digest, frontend: int) -> None:
        """Somebody asks for an image through a frontend."""
        held = self.held.setdefault(self._worker(digest), [])
        cached = self.cached.setdefault(frontend, set())
        self.queries += 1
        if digest in held:
            self.processor_hits += 1
            self.worker_hits += 1
            held.remove(digest)
        elif digest in cached:
            self.processor_hits += 1
        else:
            cached.add(digest)
        held.append(digest)
        if len(held) > self.items_held:
            held.pop(0)
            self.evictions += 1

    def _worker(self, digest: Digest) -> str:
        candidates = [Candidate(name, 0, digest in self.held.get(name, [])) for name in self.workers]
        return self.workers[choose(candidates, [digest])]
