"""The messages between frontend and worker: one closed union per direction, one typed decoder each.

A message is a tagged array: its tag, then its fields in order. Tags are never reused; new fields are added only at the
end and with a default (docs/internals/protocol.md). Tensor bytes are not in a message but in buffers next to it
(`codec`).
`translation` converts between values of `semel.core` and messages; nothing here interprets a prompt.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from semel.core import (
    MAX_ADAPTER_NAME_CHARS,
    Adapter,
    AdapterChange,
    AnswerParsing,
    Contract,
    Digest,
    Modality,
    Origin,
    Trace,
)
from semel.wire.limits import MAX_ITEMS, MAX_TENSORS

__all__ = [
    "INCARNATION_BYTES",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "PROTOCOL",
    "SEGMENT_BYTES",
    "Abort",
    "Accepted",
    "Adapters",
    "Bye",
    "Challenge",
    "ChangeAdapter",
    "Chunk",
    "Credit",
    "Delta",
    "Deltas",
    "Details",
    "Drain",
    "Draining",
    "Failed",
    "Forget",
    "FrontendMessage",
    "HaveItem",
    "Heartbeat",
    "Hello",
    "Lend",
    "Message",
    "Need",
    "Payload",
    "Place",
    "Pooled",
    "Proof",
    "Refusal",
    "Resume",
    "Runs",
    "Status",
    "Submit",
    "TensorHead",
    "ToFrontend",
    "ToWorker",
    "Welcome",
    "Withdraw",
    "WorkerMessage",
]

PROTOCOL: Final = 11
"""Version of everything in this package that both ends must agree on."""

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
SEGMENT_BYTES: Final = 16
INCARNATION_BYTES: Final = 8

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Length = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Segment = Annotated[bytes, Meta(min_length=SEGMENT_BYTES, max_length=SEGMENT_BYTES)]
Incarnation = Annotated[bytes, Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
Shape = Annotated[tuple[Length, ...], Meta(max_length=16)]


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """Frontend: its identity, and a nonce for the worker's proof. Its form never changes."""

    protocol: Count
    key_id: Name
    """Identifies the fleet key without revealing it, so that an error can report a wrong key file."""

    frontend_id: Name
    nonce: Nonce


class Challenge(Struct, frozen=True, array_like=True, tag=2):
    """Worker: its proof over both nonces, and the nonce for the frontend's proof."""

    nonce: Nonce
    proof: Mac


class Resume(Struct, frozen=True, array_like=True):
    """The state that a frontend has from an earlier session."""

    incarnation: Incarnation
    """Of the worker's process."""

    number: Count
    """It knows the worker's changes up to this one."""


class Proof(Struct, frozen=True, array_like=True, tag=3):
    """Frontend: its proof over both nonces. What it knows it says here, and not before the worker has proved itself."""

    proof: Mac
    resume: Resume | None = None


class Welcome(Struct, frozen=True, array_like=True, tag=4):
    """Worker: the session is open; contains the engine's contract."""

    contract: Contract
    key_id: Name
    incarnation: Incarnation
    """Random, of this process: the numbers of changes are its own."""


class Refusal(Struct, frozen=True, array_like=True, tag=5):
    """Worker: no session, and the reason. Its form never changes."""

    code: Name
    message: str


class Heartbeat(Struct, frozen=True, array_like=True, tag=10):
    """Either: the sender is alive, and has read this many control bytes in this session."""

    read: Count


class Credit(Struct, frozen=True, array_like=True, tag=11):
    """Either: the sender has read this many bulk bytes in this session; a window more may follow."""

    read: Count


class Bye(Struct, frozen=True, array_like=True, tag=12):
    """Either: the sender's last message. The code is "closed", or the reason of a reset."""

    code: Name
    message: str


class Place(Struct, frozen=True, array_like=True):
    """One item of a prompt, and its position. The worker has its layout."""

    position: Length
    """Number of the message's token ids before the item."""

    modality: Modality
    digest: Digest


class Submit(Struct, frozen=True, array_like=True, tag=26):
    """Frontend: generate. The features named in `payloads` follow; the worker has the others."""

    request_id: Name
    token_ids: bytes
    """Of the prompt without its items' layouts: int32, little endian."""

    places: Annotated[tuple[Place, ...], Meta(max_length=MAX_ITEMS)]
    sampling: dict[str, Any]
    cache_salt: str | None = None
    encoder: bool = False
    """True if the items are the encoder's, and the token ids the decoder's."""

    payloads: Annotated[tuple[Digest, ...], Meta(max_length=MAX_ITEMS)] = ()
    parsing: AnswerParsing | None = None
    priority: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    trace: Trace | None = None
    """The parent span of the worker's span; None without tracing."""

    client_features: Annotated[tuple[Digest, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Items whose tensors the client sent, for the worker to count."""

    adapter: Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)] | None = None
    """The adapter that answers."""


class Abort(Struct, frozen=True, array_like=True, tag=21):
    """Frontend: no client waits for this request any more."""

    request_id: Name


class TensorHead(Struct, frozen=True, array_like=True):
    """A tensor without its bytes."""

    name: Name
    dtype: Name
    shape: Shape


class Payload(Struct, frozen=True, array_like=True, tag=22):
    """Frontend: the start of a feature. Its bytes are this message's buffers, one per tensor, or follow in chunks."""

    transfer: Count
    """Number of the transfer in its session; the same digest may be sent twice."""

    digest: Digest
    modality: Modality
    tensors: Annotated[tuple[TensorHead, ...], Meta(max_length=MAX_TENSORS)]
    token_ids: bytes
    """Of the layout: int32, little endian."""

    mask: bytes | None = None
    origin: Origin | None = None


class Chunk(Struct, frozen=True, array_like=True, tag=23):
    """Frontend: the next bytes of a feature, in this message's one buffer. A chunk never spans two tensors."""

    transfer: Count
    tensor: Length
    offset: Count
    nbytes: Count


class Withdraw(Struct, frozen=True, array_like=True, tag=24):
    """Frontend: the rest of this feature will not be sent."""

    transfer: Count


class Lend(Struct, frozen=True, array_like=True, tag=27):
    """Frontend: a feature in shared memory that the worker has mapped. No tensor bytes are sent."""

    digest: Digest
    modality: Modality
    tensors: Annotated[tuple[TensorHead, ...], Meta(max_length=MAX_TENSORS)]
    token_ids: bytes
    """Of the layout: int32, little endian."""

    mask: bytes | None
    segment: Segment
    lease: Count
    offset: Count
    nbytes: Count
    origin: Origin | None = None


class Drain(Struct, frozen=True, array_like=True, tag=25):
    """Frontend: it will submit nothing more in this session."""


class ChangeAdapter(Struct, frozen=True, array_like=True, tag=28):
    """Frontend: what an operator asked another worker for. It goes to workers that have sent `Adapters`."""

    change: AdapterChange


class Accepted(Struct, frozen=True, array_like=True, tag=40):
    """Worker: the features are resolved and the request is submitted; the frontend may release the bytes."""

    request_id: Name


class Details(Struct, frozen=True, array_like=True):
    """The fields that only few deltas have, in addition to text and tokens."""

    stop_reason: int | str | None = None
    texts: tuple[dict[int, str], ...] | None = None
    message: dict[str, Any] | None = None
    reasoning_tokens: Length | None = None
    cached_tokens: Length | None = None
    created_cache_tokens: Length | None = None
    prompt_logprobs: tuple[dict[int, tuple[float, int | None, str | None]] | None, ...] | None = None
    weight_versions: tuple[tuple[str, int, int], ...] | None = None


class Delta(Struct, frozen=True, array_like=True):
    """The output of one sequence of one request since its last delta."""

    request_id: Name
    index: Length
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[dict[int, float], ...] | None = None
    details: Details | None = None


class Deltas(Struct, frozen=True, array_like=True, tag=41):
    """Worker: deltas of any number of requests. Only the session uses this message: it packs and unpacks them."""

    deltas: tuple[Delta, ...]


class Pooled(Struct, frozen=True, array_like=True, tag=50):
    """Worker: a piece of a request's pooling output. Sent only for a submission that pools."""

    request_id: Name
    shape: Shape
    data: bytes
    """Of the piece: float32, little endian. The pieces come in order."""

    finish_reason: str | None = None
    """Of the last piece."""

    cached_tokens: Length | None = None
    """Of the first piece."""

    @property
    def index(self) -> int:
        """The number of the sequence, as of a delta: there is one."""
        return 0


class Failed(Struct, frozen=True, array_like=True, tag=42):
    """Worker: this request ended with an error, with the fields of the HTTP error."""

    request_id: Name
    status: Annotated[int, Meta(ge=400, le=599)]
    code: Name
    message: str


class Draining(Struct, frozen=True, array_like=True, tag=43):
    """Worker: submit to other workers; requests in flight will be finished."""


class HaveItem(Struct, frozen=True, array_like=True, gc=False):
    """An item that the worker's engine has."""

    digest: Digest
    modality: Modality
    nbytes: Count
    layout: Length
    """Index of its layout in the message's layouts."""


class Runs(Struct, frozen=True, array_like=True, gc=False):
    """A run-length encoded layout: images repeat one token a thousand times."""

    token_ids: bytes
    """int32 pairs, little endian: a token, and how many times it repeats."""

    mask: bytes | None = None
    """int32, little endian: alternating counts of positions without and with an embedding, starting without."""


class Status(Struct, frozen=True, array_like=True, tag=49):
    """Worker: the load of its engine, and what that has stored and evicted since.

    Changes are numbered for the worker's process and not for a session, so the same bytes go to every frontend that
    knows as much.
    """

    since: Count | None
    """The number up to which the frontend knows all changes; None for a frontend that has to forget what it knows."""

    number: Count
    """The number up to which it knows them from now on."""

    running: Count
    waiting: Count
    gone: Annotated[tuple[Digest, ...], Meta(max_length=MAX_ITEMS)] = ()
    items: Annotated[tuple[HaveItem, ...], Meta(max_length=MAX_ITEMS)] = ()
    layouts: Annotated[tuple[Runs, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Each distinct layout once."""

    more: bool = False
    """True if slices of all that the engine has are still to come. The frontend then says at once what it has read."""

    paused: bool = False
    """True if the engine makes no steps on purpose: requests wait."""


class Need(Struct, frozen=True, array_like=True, tag=47):
    """Worker: this request refers to features that the worker lacks; send them."""

    request_id: Name
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_ITEMS)]


class Forget(Struct, frozen=True, array_like=True, tag=48):
    """Worker: an operator has reset it; drop the cached features."""


class Adapters(Struct, frozen=True, array_like=True, tag=51):
    """Worker: all adapters that its engine has now, instead of those in its contract."""

    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_ITEMS)]
    changes: Annotated[tuple[AdapterChange, ...], Meta(max_length=MAX_ITEMS)] = ()
    """The last of each name that the worker knows."""


ToWorker = Submit | Lend | Abort | Drain | ChangeAdapter
"""The messages that a frontend may send."""

ToFrontend = Accepted | Delta | Pooled | Failed | Draining | Status | Need | Forget | Adapters
"""The messages that a worker may send."""

FrontendMessage = (
    Hello
    | Proof
    | Submit
    | Abort
    | Payload
    | Chunk
    | Withdraw
    | Lend
    | Drain
    | ChangeAdapter
    | Heartbeat
    | Credit
    | Bye
)
WorkerMessage = (
    Challenge
    | Welcome
    | Refusal
    | Accepted
    | Deltas
    | Pooled
    | Failed
    | Draining
    | Status
    | Need
    | Forget
    | Adapters
    | Heartbeat
    | Credit
    | Bye
)
Message = FrontendMessage | WorkerMessage
