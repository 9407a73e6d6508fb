"""Sessions over zmq: a worker listens for many frontends, a frontend links to one worker.

High-water marks are off: the sessions' own windows bound the bytes in transit, and a full `EventQueue` stops reading.
The worker's ROUTER is mandatory, so the worker notices a dead frontend with the next message to it, at the latest a
heartbeat. A frontend monitors its connection, so it notices a dead worker at once. A frontend's socket lives as long as
its session and has a random identity of its own.
"""

from semel.wire.zmq.address import memory_path
from semel.wire.zmq.backoff import Backoff
from semel.wire.zmq.link import Connected, FrontendLink, LinkSession
from semel.wire.zmq.listener import Peer, WorkerListener
from semel.wire.zmq.loop import LoopBudget, link_context

__all__ = [
    "Backoff",
    "Connected",
    "FrontendLink",
    "LinkSession",
    "LoopBudget",
    "Peer",
    "WorkerListener",
    "link_context",
    "memory_path",
]
