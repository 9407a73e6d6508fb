"""`python -m tests.fleet.round_robin frontend …`: the `semel` command with a frontend that asks its workers in turn.

The control for `semel.fleet.balance`: everything else is the same, so what differs is the choice. No flag of semel's
does this: nobody should want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from unittest.mock import patch

from semel import cli
from semel.core import Digest
from semel.fleet.balance import Candidate

__all__ = ["RoundRobin", "main"]


class RoundRobin:
    """Chooses one worker after another, whoever holds what, whatever is asked."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, candidates: Sequence[Candidate], *_: Sequence[Digest] | bytes) -> int:
        return next(self._turns) % len(candidates)


def main() -> None:
    with patch("semel.fleet.fleet.choose", RoundRobin()):
        cli.main()


if __name__ == "__main__":
    main()
