"""The memory of outputs that have come and wait: for a slow reader, or for the rest of their answer (threats S21)."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from semel.core import Output

__all__ = ["AnswerRoom", "Backlog", "output_bytes"]

_OUTPUT_BYTES: Final = 400
_LOGPROB_BYTES: Final = 140
"""Of one log probability and, once more, of its text: with 20 of them a token takes 5.6 KB, measured in a frontend."""


class AnswerRoom(Protocol):
    """Where the memory of an answer is charged."""

    free_outputs: int
    """So many plain outputs may wait uncharged: a reader that keeps up costs nothing."""

    def hold(self, nbytes: int) -> None:
        """Charge so much more, or raise."""
        ...

    def drop(self, nbytes: int) -> None:
        """Outputs of so many bytes were read."""
        ...

    def clear(self) -> None:
        """Nothing of the answer is there any more."""
        ...


class Backlog:
    """What the outputs that wait are charged, in their order. There is no room to charge until there is one."""

    __slots__ = ("_room", "_sizes")

    def __init__(self) -> None:
        self._room: AnswerRoom | None = None
        self._sizes: deque[int] = deque()

    def begin(self, room: AnswerRoom, waiting: int) -> None:
        """Charge what comes from now on; so many outputs wait already."""
        self._room = room
        self._sizes.extend([0] * waiting)

    def push(self, output: Output, waiting: int) -> None:
        """Charge an output that has come; so many wait with it. Raises if there is no room."""
        if (room := self._room) is None:
            return
        is_plain = output.logprobs is None and output.prompt_logprobs is None
        size = 0 if is_plain and waiting <= room.free_outputs else output_bytes(output)
        self._sizes.append(0)
        if size:
            room.hold(size)
            self._sizes[-1] = size

    def pop(self) -> None:
        """The oldest output was read."""
        if self._room is not None and (size := self._sizes.popleft()):
            self._room.drop(size)

    def clear(self) -> None:
        """All outputs that waited were dropped."""
        self._sizes.clear()
        if self._room is not None:
            self._room.clear()


def output_bytes(output: Output) -> int:
    """About what an output takes in memory, until it is sent."""
    entries = 0
    for steps in (output.logprobs, output.texts, output.prompt_logprobs):
        entries += 0 if steps is None else sum(0 if step is None else len(step) for step in steps)
    return _OUTPUT_BYTES + 4 * len(output.text) + 36 * len(output.token_ids) + _LOGPROB_BYTES * entries
