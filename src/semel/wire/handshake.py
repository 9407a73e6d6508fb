"""The start of a session: both ends prove that they have the same key before either reveals anything.

    frontend                              worker
    Hello(nonce)              ──►
                              ◄──         Challenge(nonce, proof)      or Refusal
    Proof(proof, resume)      ──►
                              ◄──         Welcome(contract)            or Refusal

These classes do no I/O, and each object makes one attempt. Nonces are arguments, so that tests are exact; each must be
random and used once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from semel.core import Contract, Key
from semel.wire.events import Admitted, Opened, Violation
from semel.wire.messages import PROTOCOL, Challenge, Hello, Message, Proof, Resume, Welcome
from semel.wire.proof import HandshakeTranscript, Role

__all__ = ["NO_EPOCH", "FrontendHandshake", "Handshake", "Step", "WorkerHandshake"]

NO_EPOCH: Final = 0
"""The epoch of messages before both ends can know that of their session."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a message from the peer."""

    reply: Message | None = None
    epoch: int = NO_EPOCH
    """The session's epoch, once it is known."""

    opened: Opened | Admitted | None = None
    """Set when both ends have proved that they have the key."""


class Handshake(Protocol):
    """One end of the handshake."""

    @property
    def role(self) -> Role:
        """The role of this end."""
        ...

    def first(self) -> Message | None:
        """Return the message to send first, if any."""
        ...

    def receive(self, message: Message) -> Step:
        """Process a message from the peer, or raise a `Violation`."""
        ...


class FrontendHandshake:
    """The frontend's end: it sends the first message and proves itself second."""

    role: Final = "frontend"

    def __init__(self, *, key: Key, frontend_id: str, nonce: bytes, resume: Resume | None = None) -> None:
        self._key = key
        self._resume = resume
        self._hello = Hello(PROTOCOL, key.id, frontend_id, nonce)
        self._epoch = NO_EPOCH

    def first(self) -> Message:
        """Return the first message."""
        return self._hello

    def receive(self, message: Message) -> Step:
        """Check the worker's proof and send the frontend's, then process the welcome."""
        match message:
            case Challenge() if self._epoch == NO_EPOCH:
                return self._prove(message)
            case Welcome() if self._epoch != NO_EPOCH:
                return Step(epoch=self._epoch, opened=Opened(message.contract, message.incarnation))
            case _:
                raise Violation("handshake", f"the worker sent {type(message).__name__} before the session was open")

    def _prove(self, challenge: Challenge) -> Step:
        transcript = HandshakeTranscript(PROTOCOL, self._hello.frontend_id, self._hello.nonce, challenge.nonce)
        if not transcript.is_proof(challenge.proof, self._key, "worker"):
            raise Violation("key", f"the worker cannot prove that it has the fleet key {self._key.id}")
        self._epoch = transcript.epoch(self._key)
        return Step(reply=Proof(transcript.proof(self._key, "frontend"), self._resume), epoch=self._epoch)


class WorkerHandshake:
    """The worker's end: it proves itself first, and sends its contract last.

    It takes any of its keys, the one that the frontend names: during a rotation there are two.
    """

    role: Final = "worker"

    def __init__(self, *, keys: Sequence[Key], contract: Contract, nonce: bytes, incarnation: bytes) -> None:
        self._keys = {key.id: key for key in keys}
        self._key = keys[-1]
        self._contract = contract
        self._incarnation = incarnation
        self._nonce = nonce
        self._transcript: HandshakeTranscript | None = None

    def first(self) -> None:
        """None: the frontend sends the first message."""

    def receive(self, message: Message) -> Step:
        """Challenge a frontend, then admit it."""
        match message, self._transcript:
            case Hello(), None:
                return self._challenge(message)
            case Proof(), HandshakeTranscript() as transcript:
                return self._admit(transcript, message)
            case _:
                raise Violation("handshake", f"{type(message).__name__} came before the session was open")

    def _challenge(self, hello: Hello) -> Step:
        if hello.protocol != PROTOCOL:
            raise Violation("protocol", f"the worker speaks protocol {PROTOCOL}, the frontend {hello.protocol}")
        if (key := self._keys.get(hello.key_id)) is None:
            ours = " and ".join(self._keys)
            raise Violation(
                "key", f"the worker's fleet key is {ours}, the frontend's {hello.key_id}: give both keys of one fleet"
            )
        self._key = key
        self._transcript = HandshakeTranscript(PROTOCOL, hello.frontend_id, hello.nonce, self._nonce)
        return Step(reply=Challenge(self._nonce, self._transcript.proof(self._key, "worker")))

    def _admit(self, transcript: HandshakeTranscript, message: Proof) -> Step:
        if not transcript.is_proof(message.proof, self._key, "frontend"):
            raise Violation("key", f"the frontend cannot prove that it has the fleet key {self._key.id}")
        return Step(
            reply=Welcome(self._contract, self._key.id, self._incarnation),
            epoch=transcript.epoch(self._key),
            opened=Admitted(transcript.frontend_id, self._key.id, self._resumed(message.resume)),
        )

    def _resumed(self, resume: Resume | None) -> Resume | None:
        """Return what a frontend knows of this process; of another one it is worth nothing."""
        return resume if resume is not None and resume.incarnation == self._incarnation else None
