"""Communication between frontend and worker: messages, frames, sessions without I/O, and the sockets under them.

A worker uses `WorkerListener`, a frontend one `FrontendLink` per worker (both in `semel.wire.zmq`). Both return events;
messages to the owner are events themselves. `docs/internals/protocol.md` describes the protocol and how it may change.
"""
