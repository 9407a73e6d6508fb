"""The protocol between a pool and its processes. No I/O: both ends read and write themselves.

A frame is a header (two lengths), a message of a closed union, and a payload of raw bytes: an item's media one way, its
tensors the other. A length is checked before anything is allocated for it, and a payload has to be exactly what its
message says (threats S10). One order, one answer: the two ends are never both sending. A process first offers what it
has made: a feature, a layout, or the pieces of a clip, which can be a thousand times its size. Whether there is room is
not the process's to say (S5, S18), and it sends no more than it has offered (S21). Where the two share memory, the
tensors are written there, and a short answer comes without an offer: the pool admits it before it copies a byte. An
answer is decoded on the event loop, so what can be long in it is bytes and not a list, and all else is short (S32).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Annotated, ClassVar, Final, Self

import msgspec

from semel.cache import tensor_offsets
from semel.core import (
    DTYPE_BYTES,
    TOKEN_BYTES,
    AssemblyKind,
    Feature,
    Media,
    Modality,
    Origin,
    Page,
    Probes,
    Target,
    Tensor,
    split_options,
    unpack_token_ids,
)
from semel.errors import (
    ConfigError,
    InvalidRequest,
    MediaDegenerate,
    MediaError,
    MediaTooLarge,
    MediaUndecodable,
    PromptTooLong,
    ProtocolError,
    SemelError,
    ServiceError,
)
from semel.media import DecodeLimits, Pieces
from semel.processing.probes import proven_fingerprint
from semel.processing.processor import Processor, ProcessorKind
from semel.processing.sandbox import Sandbox
from semel.processing.vocabulary import Vocabulary
from semel.wire.layout_runs import to_layouts, to_runs
from semel.wire.limits import MAX_TENSORS
from semel.wire.messages import Runs

__all__ = [
    "HEADER_BYTES",
    "MAX_ANSWER_BYTES",
    "MAX_MESSAGE_BYTES",
    "Answer",
    "Assemble",
    "Assembled",
    "ClipPieces",
    "CountPages",
    "Cut",
    "Description",
    "Detokenize",
    "Drop",
    "Dropped",
    "Failed",
    "Load",
    "Made",
    "Offer",
    "Order",
    "PageCount",
    "Ready",
    "Send",
    "TensorHead",
    "Text",
    "Tokenize",
    "Tokens",
    "Work",
    "decode_answer",
    "decode_order",
    "encode",
    "encode_pieces",
    "encode_work",
    "read_header",
    "to_error",
    "to_failure",
    "to_feature",
    "to_made",
    "to_payload",
    "to_pieces",
]

_HEADER: Final = struct.Struct("<IQ")  # the bytes of the message, the bytes of the payload
HEADER_BYTES: Final = _HEADER.size
MAX_MESSAGE_BYTES: Final = 16 << 20
"""Of an order, and of the answer to `Load`, which comes before a process has seen anything of a client's."""

MAX_ANSWER_BYTES: Final = 64 << 10
"""Of any other answer, but for the origin and the layout of a feature (threats S32)."""

_MAX_ORIGIN_BYTES: Final = 64 << 10
"""The numbers and times of 5,000 frames; to decode so much of anything takes the event loop 8 ms at most."""

_MAX_LAYOUT_BYTES: Final = 320 << 10
"""40,000 runs; to read them takes 6 ms."""

_RUN_BYTES: Final = 12  # of a token that differs from its neighbours: the token, its count, and one of the mask
_MAX_PIECES: Final = 8_192
_MAX_ERROR_CHARS: Final = 1_024
_NUMBER: Final = "{index}"  # in an insertion, where the item's number stands
_PROBE_INDEX: Final = 1_000_003  # a number that no family writes by itself
_MAX_DIMENSIONS: Final = 16
_ITEM_ERRORS: Final[Mapping[str, type[SemelError]]] = {
    kind.__name__: kind
    for kind in (
        *(InvalidRequest, MediaError, MediaDegenerate, MediaTooLarge, MediaUndecodable, PromptTooLong),
        *(ServiceError, ConfigError),
    )
}
"""The errors that a process may raise, also one that was taken over (threats S32)."""

_Size = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a process's loaded processor: enough to render prompts without one."""

    fingerprint: str
    """With the results of the probes, if they were run."""

    placeholders: Mapping[Modality, str]
    """What stands for an item of a modality in the prompt's text: one token, unless `assembly` says `apply`.

    A modality whose items are inserted into a prompt has none.
    """

    encoder_decoder: bool
    """Whether items go to an encoder's own prompt instead of taking positions in the decoder's."""

    insertions: Mapping[Modality, str] = field(default_factory=dict)
    """What to write into a prompt whose chat template takes no items; `{index}` in it is the item's number."""

    written: Mapping[Modality, str] = field(default_factory=dict)
    """What a prompt's text has in place of a modality's placeholder token, where that is more than the token."""

    vocabulary: Vocabulary | None = None
    """Of a tokenizer that runs in the pool; None where `tokenizer.json` does as well."""

    assembly: Mapping[Modality, AssemblyKind] = field(default_factory=dict)
    """How the items of a modality enter a prompt; one that is not listed is spliced."""

    probes: Probes | None = None
    """What the process's libraries made of the probes."""

    @classmethod
    def of(cls, processor: Processor, vocabulary: Vocabulary | None = None, probes: Probes | None = None) -> Self:
        """Return the description of a processor."""
        own = processor.fingerprint
        return cls(
            fingerprint=own if probes is None else proven_fingerprint(own, probes),
            probes=probes,
            placeholders=processor.placeholders,
            encoder_decoder=processor.encoder_decoder,
            vocabulary=vocabulary,
            insertions={
                modality: processor.insertion(modality, _PROBE_INDEX).replace(str(_PROBE_INDEX), _NUMBER)
                for modality in processor.assembly
            },
            written={
                modality: text
                for modality, token in processor.placeholders.items()
                if (text := processor.placeholder_text(modality)) != token
            },
            assembly=processor.assembly,
        )

    def insertion(self, modality: Modality, index: int) -> str:
        """Return the text for the index-th item (from 1) of a modality in a prompt whose chat template takes none."""
        if modality not in self.placeholders and modality not in self.assembly:
            raise ConfigError(f"this model takes no {modality}")
        return self.insertions.get(modality, self.placeholders.get(modality, "")).replace(_NUMBER, str(index))


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load a model folder's processor. The first order, and only the first."""

    folder: str
    target: Target
    limits: DecodeLimits
    timeout_s: float
    max_memory_bytes: int
    processor: ProcessorKind = "auto"
    probes: bool | Probes = False
    """Whether to run the probes; or what came out of them in another process of the pool, which stands for this one."""

    requires_sandbox: bool = False
    """Whether to refuse to load where a layer of the sandbox is missing."""

    max_tokens: int | None = None
    """Of an item: one that has more by its header is not decoded."""


class Work(msgspec.Struct, frozen=True, tag="work"):
    """Make the feature of an item; the payload is its media."""

    item: int
    modality: Modality
    mime: str | None
    options: Mapping[str, object]
    page: Page | None = None
    """The page to render, if the payload is a document."""

    only_layout: bool = False
    """Whether the layout is all that is asked for: the feature then comes without tensors."""


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Cut a clip into pieces that the model's encoder takes; the payload is its media."""

    item: int


class CountPages(msgspec.Struct, frozen=True, tag="count"):
    """Count the pages of a document; the payload is its bytes."""

    item: int


class Assemble(msgspec.Struct, frozen=True, tag="assemble"):
    """Put items into a prompt by the model's own rules; the payload is the prompt, as `encode_prompt` writes it."""

    item: int


class Send(msgspec.Struct, frozen=True, tag="send"):
    """Send what was offered."""


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Nobody takes what was offered."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The processor is loaded, and the process is in its sandbox."""

    description: Description
    sandbox: Sandbox = Sandbox()


class TensorHead(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the payload, but for its bytes."""

    name: str
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return DTYPE_BYTES.get(self.dtype, 0) * prod(self.shape)


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """The feature of an item is made, or a clip is cut, and takes so many bytes and tokens of a prompt."""

    item: int
    nbytes: _Size
    tokens: _Size = 0

    @property
    def max_message_bytes(self) -> int:
        """The bytes of the message that may follow: what was offered, but for its tensors."""
        return MAX_ANSWER_BYTES + _MAX_ORIGIN_BYTES + min(_RUN_BYTES * self.tokens, _MAX_LAYOUT_BYTES)

    def check_answer(self, answer: Answer) -> None:
        """Refuse an answer that is more than what was offered, or that says of nothing that it is written."""
        nbytes = answer.tensor_bytes if isinstance(answer, Made) else getattr(answer, "payload_bytes", 0)
        if isinstance(answer, Made) and answer.is_written and not nbytes:
            raise ProtocolError(f"a pool process offered {self.nbytes:,} bytes for item {self.item}, and wrote none")
        tokens = answer.tokens if isinstance(answer, Made) else 0
        if nbytes > self.nbytes or tokens > self.tokens:
            raise ProtocolError(
                f"a pool process offered {self.nbytes:,} bytes and {self.tokens:,} tokens for item {self.item}, "
                f"and answered with {nbytes:,} and {tokens:,}"
            )


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The feature of an item; the payload is its tensors, where `tensor_offsets` says."""

    item: int
    modality: Modality
    tensors: Annotated[tuple[TensorHead, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    layout: Runs
    is_written: bool = False
    """Whether the tensors are in the process's staging memory, and there is no payload."""

    origin: Annotated[bytes, msgspec.Meta(max_length=_MAX_ORIGIN_BYTES)] | None = None
    """Encoded, and without the options, which its pool knows."""

    @property
    def tokens(self) -> int:
        """The tokens of the layout."""
        try:
            return sum(unpack_token_ids(self.layout.token_ids)[1::2])
        except ValueError as error:
            raise ProtocolError(f"a pool process described no layout: {error}") from error

    def spans(self) -> Iterator[tuple[TensorHead, int, int]]:
        """Yield every tensor with where it begins and ends in the payload."""
        offsets, _ = tensor_offsets(head.nbytes for head in self.tensors)
        for head, start in zip(self.tensors, offsets, strict=True):
            yield head, start, start + head.nbytes

    @property
    def tensor_bytes(self) -> int:
        """The bytes of the tensors, with the gaps between them."""
        return max((end for _, _, end in self.spans()), default=0)

    @property
    def payload_bytes(self) -> int:
        """The bytes of the payload."""
        return 0 if self.is_written else self.tensor_bytes

    @property
    def offer(self) -> Offer:
        """The offer that it makes, or would have made."""
        return Offer(self.item, self.tensor_bytes, self.tokens)


class ClipPieces(msgspec.Struct, frozen=True, tag="heard"):
    """A clip that was cut; the payload is its pieces, one behind the other."""

    item: int
    samples: int
    sampling_rate: int
    sizes: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_PIECES)]

    @property
    def payload_bytes(self) -> int:
        """The bytes of the payload."""
        return sum(self.sizes)


class PageCount(msgspec.Struct, frozen=True, tag="pages"):
    """The number of pages of a document."""

    item: int
    pages: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    payload_bytes: ClassVar[int] = 0


class Assembled(msgspec.Struct, frozen=True, tag="assembled"):
    """A prompt that was assembled; the payload is its tokens without its items, and then their places."""

    item: int
    tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    places: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

    @property
    def payload_bytes(self) -> int:
        """The bytes of the payload."""
        return TOKEN_BYTES * (self.tokens + 2 * self.places)


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The answer to `Drop`: the offer is gone."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An order could not be done."""

    error: str
    """The name of the class; one that no process may raise is `ServiceError`."""

    message: str
    last: bool = False
    """Whether the process takes no order after this one, and ends."""


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Make tokens of texts; the payload is the texts in UTF-8, one behind the other."""

    item: int
    sizes: tuple[int, ...]
    """The bytes of each text."""

    add_special_tokens: bool = False


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """Make a text of tokens; the payload is their ids, of 32 bits each."""

    item: int
    skip_special_tokens: bool = False


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """The tokens of some texts; the payload is how many each has, and then their ids, of 32 bits each."""

    item: int
    texts: _Size
    tokens: _Size

    @property
    def payload_bytes(self) -> int:
        """The bytes of the payload."""
        return TOKEN_BYTES * (self.texts + self.tokens)


class Text(msgspec.Struct, frozen=True, tag="text"):
    """The text of some tokens; the payload is the text in UTF-8."""

    item: int
    payload_bytes: _Size


Order = Load | Work | CountPages | Cut | Assemble | Send | Drop | Tokenize | Detokenize
Answer = Ready | Offer | Made | ClipPieces | PageCount | Assembled | Dropped | Failed | Tokens | Text

_encoder: Final = msgspec.msgpack.Encoder()
_order_decoder: Final = msgspec.msgpack.Decoder(Order)
_answer_decoder: Final = msgspec.msgpack.Decoder(Answer)
_origin_decoder: Final = msgspec.msgpack.Decoder(Origin)


def encode(message: Order | Answer, payload_bytes: int = 0) -> bytes:
    """Return the header and the message of a frame; the payload is sent behind it, as it is."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body), payload_bytes) + body


def encode_work(item: int, media: Media, options: Mapping[str, object], *, only_layout: bool = False) -> bytes:
    """The order for an item, but for its payload. What cannot travel is the client's fault, and costs no process."""
    try:
        order = encode(Work(item, media.modality, media.mime, options, media.page, only_layout), len(media.data))
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidRequest("mm_processor_kwargs need JSON values, nested moderately, of 64 bits at most") from None
    if (message_bytes := len(order) - HEADER_BYTES) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the {media.modality}'s type and its mm_processor_kwargs have {message_bytes:,} bytes together; "
            f"the limit is {MAX_MESSAGE_BYTES:,}"
        )
    return order


def read_header(
    header: bytes | memoryview, *, max_payload_bytes: int, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> tuple[int, int]:
    """Return the lengths of a frame's message and payload, if there may be so much."""
    message_bytes, payload_bytes = _HEADER.unpack(header)
    if message_bytes > max_message_bytes or payload_bytes > max_payload_bytes:
        raise ProtocolError(
            f"a frame has a message of {message_bytes:,} and a payload of {payload_bytes:,} bytes; "
            f"the limits are {max_message_bytes:,} and {max_payload_bytes:,}"
        )
    return message_bytes, payload_bytes


def decode_order(body: bytes) -> Order:
    """Return the order of a frame."""
    try:
        order: Order = _order_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError("a pool process got what is not an order") from error
    return order


def decode_answer(body: bytes | memoryview, *, payload_bytes: int) -> Answer:
    """Return the answer of a frame, whose payload has the length that the answer says."""
    try:
        answer: Answer = _answer_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError("a pool process said what is not an answer") from error
    expected = answer.payload_bytes if isinstance(answer, Made | ClipPieces | Assembled | Tokens | Text) else 0
    if payload_bytes != expected:
        raise ProtocolError(f"an answer with {expected:,} bytes of payload came with {payload_bytes:,}")
    return answer


def to_made(item: int, feature: Feature) -> Made:
    """Return what to say of a feature, unless it is more than may be said."""
    origin = None if feature.origin is None else _encoder.encode(Origin(feature.origin.shape, feature.origin.metadata))
    if len(feature.tensors) > MAX_TENSORS:
        raise ServiceError(f"the {feature.modality} has {len(feature.tensors)} tensors; the limit is {MAX_TENSORS}")
    if feature.layout.nbytes > _MAX_LAYOUT_BYTES or len(origin or b"") > _MAX_ORIGIN_BYTES:
        raise MediaTooLarge(f"the {feature.modality} has too many frames or tokens to be described; send fewer frames")
    return Made(
        item=item,
        modality=feature.modality,
        tensors=tuple(TensorHead(name, tensor.dtype, tensor.shape) for name, tensor in feature.tensors.items()),
        layout=to_runs(feature.layout),
        origin=origin,
    )


def to_payload(made: Made, feature: Feature) -> Iterator[bytes | memoryview]:
    """Yield the payload that goes with it, piece by piece and without a copy."""
    written = 0
    for head, start, end in made.spans():
        if start > written:
            yield bytes(start - written)
        yield feature.tensors[head.name].data
        written = end


def to_feature(made: Made, payload: memoryview, options: Mapping[str, object] | None = None) -> Feature:
    """The feature over a payload, without a copy; its bytes cannot be written to. `options` are those of the order."""
    fixed = payload.toreadonly()
    if len({head.name for head in made.tensors}) != len(made.tensors):
        raise ProtocolError("a pool process described a feature that names a tensor twice")
    try:
        return Feature(
            modality=made.modality,
            tensors={head.name: Tensor(head.dtype, head.shape, fixed[start:end]) for head, start, end in made.spans()},
            layout=to_layouts((made.layout,))[0],
            origin=None if made.origin is None else _origin_of(made.origin, options),
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a pool process described no feature: {error}") from error


def _origin_of(origin: bytes, options: Mapping[str, object] | None) -> Origin:
    decoded = _origin_decoder.decode(origin)
    return Origin(decoded.shape, decoded.metadata, dict(split_options(options)[0]) or None)


def encode_pieces(item: int, pieces: Pieces) -> ClipPieces:
    """Return what to say of the pieces of a clip."""
    if len(pieces.files) > _MAX_PIECES:
        raise MediaTooLarge(f"the audio is cut into {len(pieces.files):,} pieces; the limit is {_MAX_PIECES:,}")
    return ClipPieces(item, pieces.samples, pieces.sampling_rate, tuple(map(len, pieces.files)))


def to_pieces(described: ClipPieces, payload: memoryview) -> Pieces:
    """Return the pieces over a payload, without a copy."""
    ends = list(accumulate(described.sizes))
    if min((*described.sizes, described.samples, described.sampling_rate)) < 1 or not ends:
        raise ProtocolError("a pool process cut a clip into nothing")
    fixed = payload.toreadonly()
    spans = zip([0, *ends], ends, strict=False)
    return Pieces(described.samples, described.sampling_rate, [fixed[begin:end] for begin, end in spans])


def to_failure(error: SemelError) -> Failed:
    """Return an error of ours, on its way to the pool."""
    return Failed(type(error).__name__, str(error).encode(errors="replace").decode()[: 8 * _MAX_ERROR_CHARS])


def to_error(failed: Failed) -> SemelError:
    """Return the same error at the other end, if a process may raise it; its text is cut."""
    return _ITEM_ERRORS.get(failed.error, ServiceError)(failed.message[:_MAX_ERROR_CHARS])
