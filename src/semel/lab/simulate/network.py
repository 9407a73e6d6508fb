"""The network between simulated processes: connections with a latency and a bandwidth, and what may befall them.

Messages of one direction of a connection arrive in order. A cut holds them back; a cut that lasts longer than zmq
waits for a sign of life breaks the connection, and they are lost. Every byte is counted: as sent, and then as read or
as lost.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Final, Literal, get_args

from semel.lab.simulate.costs import Costs
from semel.lab.simulate.figures import Flow
from semel.wire.codec import Buffer, Frames
from semel.wire.limits import Deadlines
from semel.wire.messages import FrontendMessage, WorkerMessage

__all__ = ["Connection", "Direction", "Network", "Pipe", "kind_of"]

Direction = Literal["to_workers", "to_frontends"]

_TAG_AT: Final = 17
"""Of a message's tag in its first frame: behind epoch and sequence, and the head of an array."""

_KINDS: Final[dict[int, str]] = {
    one.__struct_config__.tag: one.__name__ for union in (FrontendMessage, WorkerMessage) for one in get_args(union)
}


def kind_of(frames: Sequence[Buffer]) -> str:
    """Return the kind of a message."""
    return _KINDS[frames[0][_TAG_AT]]


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: Network, direction: Direction, deliver: Callable[[Frames], None]) -> None:
        self._network = network
        self._direction = direction
        self._deliver = deliver
        self._free_at = self._last_at = 0.0
        self._under_way: deque[Frames] = deque()
        self._delayed: list[Frames] = []
        self._is_cut = self._is_closed = False
        self._on_drained: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are under way."""
        return sum(len(frame) for frames in (*self._under_way, *self._delayed) for frame in frames)

    def send(self, frames: Frames) -> None:
        """Let a message arrive after all others."""
        if self._is_closed:
            self._network.lose(frames)
            return
        if self._is_cut:
            self._delayed.append(frames)
            return
        network, nbytes = self._network, sum(map(len, frames))
        now = network.loop.time()
        self._free_at = max(now, self._free_at) + nbytes / network.bandwidth
        self._last_at = max(self._last_at, self._free_at + network.latency_s)
        self._under_way.append(frames)
        network.loop.call_at(self._last_at, self._arrive)

    def end(self, on_drained: Callable[[], None]) -> None:
        """Nothing more is sent; call when all has arrived."""
        self._on_drained = on_drained
        self._check_drained()

    def cut(self) -> None:
        """Hold back what is sent from now on."""
        self._is_cut = True

    def heal(self) -> None:
        """Let what was held back arrive."""
        self._is_cut = False
        delayed, self._delayed = self._delayed, []
        for frames in delayed:
            self.send(frames)
        self._check_drained()

    def close(self) -> None:
        """Lose everything that has not arrived."""
        self._is_closed = True
        for frames in (*self._under_way, *self._delayed):
            self._network.lose(frames)
        self._under_way.clear()
        self._delayed.clear()

    def _arrive(self) -> None:
        if not self._is_closed:
            self._deliver(self._under_way.popleft())
            self._check_drained()

    def _check_drained(self) -> None:
        if self._on_drained is not None and not self._under_way and not self._delayed and not self._is_closed:
            on_drained, self._on_drained = self._on_drained, None
            self._network.loop.call_later(self._network.latency_s, on_drained)


class Connection:
    """A link's socket and the listener's, and the pipes between them."""

    def __init__(
        self,
        network: Network,
        frontend: str,
        address: str,
        to_worker: Callable[[Frames], None],
        to_frontend: Callable[[Frames], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self.frontend = frontend
        self.address = address
        self.to_worker = Pipe(network, "to_workers", to_worker)
        self.to_frontend = Pipe(network, "to_frontends", to_frontend)
        self.on_broken = on_broken
        """Tells the frontend."""

    @property
    def pipes(self) -> tuple[Pipe, Pipe]:
        """Both directions."""
        return self.to_worker, self.to_frontend


class Network:
    """All connections of a simulated fleet."""

    def __init__(self, costs: Costs, deadlines: Deadlines | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.latency_s = costs.latency_s
        self.bandwidth = costs.bandwidth
        self.flows: dict[Direction, defaultdict[str, Flow]] = {one: defaultdict(Flow) for one in get_args(Direction)}
        self.sent_bytes = self.read_bytes = self.lost_bytes = 0
        self.connections: dict[Connection, None] = {}
        self._connection_s = (deadlines or Deadlines()).connection_s
        self._cuts: dict[tuple[str, str], int] = {}
        self._numbers = count(1)

    def number(self) -> int:
        """Another one each time, for names."""
        return next(self._numbers)

    def count_sent(self, direction: Direction, frames: Sequence[Buffer]) -> None:
        """A message was sent."""
        kind, nbytes = kind_of(frames), sum(map(len, frames))
        self.flows[direction][kind].count(1, nbytes)
        self.sent_bytes += nbytes

    def count_read(self, frames: Sequence[Buffer]) -> None:
        """A message was read."""
        self.read_bytes += sum(map(len, frames))

    def lose(self, frames: Sequence[Buffer]) -> None:
        """A message will not be read."""
        self.lost_bytes += sum(map(len, frames))

    @property
    def bytes_under_way(self) -> int:
        """Bytes of messages that are sent, and neither read nor lost."""
        return sum(pipe.nbytes for connection in self.connections for pipe in connection.pipes)

    def is_cut(self, frontend: str, address: str) -> bool:
        """Return whether nothing gets through between two processes."""
        return (frontend, address) in self._cuts

    def between(self, frontends: Sequence[str], addresses: Sequence[str]) -> Iterator[Connection]:
        """Yield the connections between these."""
        for connection in list(self.connections):
            if connection.frontend in frontends and connection.address in addresses:
                yield connection

    def cut(self, frontends: Sequence[str], addresses: Sequence[str]) -> None:
        """Let nothing through between these, until it is healed."""
        for pair in [(frontend, address) for frontend in frontends for address in addresses]:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
        for connection in self.between(frontends, addresses):
            for pipe in connection.pipes:
                pipe.cut()
            self.loop.call_later(self._connection_s, self._give_up, connection)

    def heal(self, frontends: Sequence[str], addresses: Sequence[str]) -> None:
        """Let everything through again."""
        for pair in [(frontend, address) for frontend in frontends for address in addresses]:
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                del self._cuts[pair]
        for connection in self.between(frontends, addresses):
            if not self.is_cut(connection.frontend, connection.address):
                for pipe in connection.pipes:
                    pipe.heal()

    def sever(self, connection: Connection) -> None:
        """Break a connection: what is under way is lost, and the frontend notices."""
        if connection in self.connections:
            del self.connections[connection]
            for pipe in connection.pipes:
                pipe.close()
            self.loop.call_soon(connection.on_broken, "it was closed")

    def _give_up(self, connection: Connection) -> None:
        if self.is_cut(connection.frontend, connection.address):
            self.sever(connection)
