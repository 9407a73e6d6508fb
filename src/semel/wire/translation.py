"""Conversion between values of `semel.core` and messages: prompts, submissions, features, announcements.

Everything from a peer is checked here once, by the constructors of the values; what they reject is a `ProtocolError`.
Tensor bytes are never copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from semel.cache import Lease
from semel.core import (
    DTYPE_BYTES,
    TOKEN_BYTES,
    Digest,
    Feature,
    FeatureInfo,
    Item,
    Layout,
    Mask,
    Placeholder,
    Prompt,
    Submission,
    Tensor,
    Timeline,
    Trace,
    pack_token_ids,
    unpack_token_ids,
)
from semel.errors import PromptTooLong, ProtocolError
from semel.ledger.announcement import Announcement
from semel.wire.layout_runs import to_info, to_layouts, to_runs
from semel.wire.messages import HaveItem, Lend, Payload, Place, Status, Submit, TensorHead

__all__ = [
    "sizes_of",
    "to_announcement",
    "to_feature",
    "to_layout",
    "to_lease",
    "to_lend",
    "to_payload",
    "to_prompt",
    "to_status",
    "to_submission",
    "to_submit",
]


def to_submit(submission: Submission, payloads: Iterable[Digest] = ()) -> Submit:
    """Return the message for a submission. `payloads` names the features that will be sent."""
    prompt = submission.prompt
    encoder = prompt.encoder_token_ids is not None
    token_ids: list[int] = []
    places: list[Place] = []
    copied = 0
    for placeholder, item in zip(prompt.timeline, prompt.items, strict=True):
        if not encoder:
            token_ids += prompt.token_ids[copied : placeholder.offset]
            copied = placeholder.end
        places.append(Place(len(token_ids), item.modality, item.digest))
    token_ids += prompt.token_ids[copied:]
    return Submit(
        submission.request_id,
        pack_token_ids(token_ids),
        tuple(places),
        dict(submission.sampling),
        submission.cache_salt,
        encoder,
        tuple(dict.fromkeys(payloads)),
        submission.parsing,
        submission.priority,
        submission.trace,
        tuple(sorted(submission.client_features)),
        submission.adapter,
    )


def to_submission(
    submit: Submit, prompt: Prompt, features: Mapping[Digest, Feature], *, trace: Trace | None = None
) -> Submission:
    """The submission in a message: its assembled prompt, the features received for it, and its parent span here."""
    return Submission(
        submit.request_id,
        prompt,
        features,
        submit.sampling,
        submit.cache_salt,
        parsing=submit.parsing,
        priority=submit.priority,
        trace=trace,
        client_features=frozenset(submit.client_features),
        adapter=submit.adapter,
    )


def to_prompt(submit: Submit, layout: Callable[[Digest], Layout], *, max_tokens: int) -> Prompt:
    """Return the submitted prompt, checked, with the layouts of its items at their positions.

    A prompt over `max_tokens` is refused before it is assembled: a short message can repeat a long layout often.
    """
    total = len(submit.token_ids) // TOKEN_BYTES
    if not submit.encoder:
        total += sum(len(layout(place.digest)) for place in submit.places)
    if total > max_tokens:
        raise PromptTooLong(f"the prompt has {total:,} tokens; the model takes {max_tokens:,} with the answer")
    try:
        return _encoder_prompt(submit, layout) if submit.encoder else _decoder_prompt(submit, layout)
    except ValueError as error:
        raise ProtocolError(f"request {submit.request_id} has a broken prompt: {error}") from error


def _decoder_prompt(submit: Submit, layout: Callable[[Digest], Layout]) -> Prompt:
    text = unpack_token_ids(submit.token_ids)
    token_ids: list[int] = []
    placeholders: list[Placeholder] = []
    copied = 0
    for place in submit.places:
        if not copied <= place.position <= len(text):
            raise ValueError(f"an item stands at {place.position} of {len(text)} tokens, behind one at {copied}")
        its = layout(place.digest)
        token_ids += text[copied : place.position]
        placeholders.append(Placeholder(len(token_ids), len(its), its.mask))
        token_ids += its.token_ids
        copied = place.position
    token_ids += text[copied:]
    return Prompt(token_ids, Timeline.decoder(placeholders), _items(submit))


def _encoder_prompt(submit: Submit, layout: Callable[[Digest], Layout]) -> Prompt:
    layouts = [layout(place.digest) for place in submit.places]
    timeline = Timeline.encoder(Placeholder(0, len(its), its.mask) for its in layouts)
    encoder_token_ids = layouts[0].token_ids if layouts else ()
    return Prompt(unpack_token_ids(submit.token_ids), timeline, _items(submit), encoder_token_ids)


def _items(submit: Submit) -> tuple[Item, ...]:
    return tuple(Item(place.modality, place.digest) for place in submit.places)


def to_payload(transfer: int, digest: Digest, feature: Feature) -> Payload:
    """Return the first message of a feature."""
    return Payload(transfer, digest, feature.modality, _heads(feature), *_layout_fields(feature.layout), feature.origin)


def to_lend(digest: Digest, feature: Feature, lease: Lease) -> Lend:
    """Return the message that lends a feature in shared memory."""
    return Lend(
        digest,
        feature.modality,
        _heads(feature),
        *_layout_fields(feature.layout),
        lease.segment,
        lease.id,
        lease.offset,
        lease.nbytes,
        feature.origin,
    )


def to_lease(lend: Lend) -> Lease:
    """Return the lease in a message."""
    return Lease(lend.lease, lend.segment, lend.offset, lend.nbytes)


def sizes_of(message: Payload | Lend) -> list[int]:
    """Return the size of each tensor, from dtype and shape; allocates nothing."""
    if len({head.name for head in message.tensors}) != len(message.tensors):
        raise ProtocolError(f"{message.digest!r} names a tensor twice")
    for head in message.tensors:
        if head.dtype not in DTYPE_BYTES:
            raise ProtocolError(f"tensor {head.name} has the unknown dtype {head.dtype!r}")
    return [DTYPE_BYTES[head.dtype] * prod(head.shape) for head in message.tensors]


def to_layout(message: Payload | Lend) -> Layout:
    """Return the layout of the feature in a message."""
    try:
        return Layout(tuple(unpack_token_ids(message.token_ids)), None if message.mask is None else Mask(message.mask))
    except ValueError as error:
        raise ProtocolError(f"{message.digest!r} has no layout: {error}") from error


def to_feature(message: Payload | Lend, buffers: Sequence[memoryview]) -> Feature:
    """Return the feature in a message, over its bytes."""
    try:
        tensors = {
            head.name: Tensor(head.dtype, head.shape, buffer)
            for head, buffer in zip(message.tensors, buffers, strict=True)
        }
        return Feature(message.modality, tensors, to_layout(message), message.origin)
    except ValueError as error:
        raise ProtocolError(f"{message.digest!r} is no feature: {error}") from error


def to_status(announcement: Announcement, running: int, waiting: int, is_paused: bool = False) -> Status:
    """Return the message for an announcement, with the engine's load."""
    layouts: dict[Layout, int] = {}
    items = tuple(
        HaveItem(digest, holding.modality, holding.nbytes, layouts.setdefault(holding.layout, len(layouts)))
        for digest, holding in announcement.holdings.items()
    )
    return Status(
        announcement.since,
        announcement.number,
        running,
        waiting,
        announcement.gone,
        items,
        tuple(map(to_runs, layouts)),
        announcement.more,
        is_paused,
    )


def to_announcement(status: Status) -> Announcement:
    """Return the announcement in a message."""
    return Announcement(status.since, status.number, status.gone, _holdings(status), status.more)


def _holdings(status: Status) -> dict[Digest, FeatureInfo]:
    try:
        layouts = to_layouts(status.layouts)
        infos: dict[tuple[str, int, int], FeatureInfo] = {}
        found = {}
        for item in status.items:
            key = item.modality, item.nbytes, item.layout
            if (info := infos.get(key)) is None:
                info = infos[key] = to_info(item.modality, item.nbytes, layouts[item.layout])
            found[item.digest] = info
        return found  # noqa: TRY300
    except (IndexError, ValueError) as error:
        raise ProtocolError(f"status {status.number} cannot be read: {error}") from error


def _heads(feature: Feature) -> tuple[TensorHead, ...]:
    return tuple(TensorHead(name, tensor.dtype, tensor.shape) for name, tensor in feature.tensors.items())


def _layout_fields(layout: Layout) -> tuple[bytes, bytes | None]:
    return pack_token_ids(layout.token_ids), None if layout.mask is None else layout.mask.bits
