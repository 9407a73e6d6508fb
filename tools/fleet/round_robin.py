"""`python -m tools.fleet.round_robin frontend …`: the `semel` command with a frontend that asks its workers in turn.

The control for `semel.fleet.balance`: everything else is the same, so what differs is the choice. No flag of semel's
does this: nobody should want it.
"""

from __future__ import annotations

from itertools import count
from unittest.mock import patch

from semel import cli
from semel.fleet.ranking import numbers_in


class RoundRobin:
    """Chooses one worker after another, whoever holds what, whatever is asked."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, among: int, *_: object) -> int:
        numbers = list(numbers_in(among))
        return numbers[next(self._turns) % len(numbers)]


def main() -> None:
    with patch("semel.fleet.balance.Balance.choose", RoundRobin()):
        cli.main()


if __name__ == "__main__":
    main()
