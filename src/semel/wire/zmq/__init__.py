"""Sessions over zmq: a worker listens for many frontends, a frontend links to one worker.

High-water marks are off: what is under way is bounded by the sessions' own windows, and an `EventQueue` that is full
stops reading. The worker's ROUTER is mandatory, so a frontend that died is noticed with the next message to it, a
heartbeat at the latest; a frontend watches its connection, so a worker that died is noticed at once. A frontend's
socket lives as long as its session and has a random identity of its own.
"""

from semel.wire.zmq.address import memory_path
from semel.wire.zmq.link import Backoff, FrontendLink, Transfer
from semel.wire.zmq.listener import Peer, WorkerListener

__all__ = ["Backoff", "FrontendLink", "Peer", "Transfer", "WorkerListener", "memory_path"]
