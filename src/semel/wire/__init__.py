"""Between frontend and worker: messages, frames, sessions without I/O, and the sockets under them.

A worker uses `WorkerListener`, a frontend one `FrontendLink` per worker (both in `semel.wire.zmq`); what they give are
events, and messages to the owner are events themselves. `docs/protocol.md` tells how the protocol works and how it may
change.
"""
