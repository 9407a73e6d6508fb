"""Golden frames: what every message looks like on the wire, byte by byte, for each version of the protocol.

`python -m tests.wire.test_golden` writes the files of a new version; it never replaces those of an old one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

import pytest
from msgspec import structs

from semel.cache import Lease
from semel.core import Adapter, AdapterChange, FeatureInfo, Trace
from semel.errors import ProtocolError
from semel.ledger import Announcement
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, decode, encode, pack
from semel.wire.limits import Limits
from semel.wire.messages import (
    PROTOCOL,
    Abort,
    Accepted,
    Adapters,
    Bye,
    Challenge,
    ChangeAdapter,
    Chunk,
    Credit,
    Delta,
    Deltas,
    Details,
    Drain,
    Draining,
    Failed,
    Forget,
    FrontendMessage,
    Heartbeat,
    Hello,
    Message,
    Need,
    Pooled,
    Proof,
    Refusal,
    Resume,
    Welcome,
    Withdraw,
    WorkerMessage,
)
from semel.wire.translation import to_lend, to_payload, to_status
from tests.wire.examples import CONTRACT, LAYOUT, TRACE, digest_of, feature_of_rows, submit

GOLDEN: Final = Path(__file__).parent / "golden"
FEATURE: Final = feature_of_rows(2)
CHANGE: Final = AdapterChange("sql", 1_700_000_000_000_000, "/adapters/sql", "0f" * 16)
FULL: Final = Delta(
    "r3",
    0,
    "x",
    (5,),
    "tool_calls",
    ({5: -0.5},),
    Details(
        stop_reason=7,
        texts=({5: "x"},),
        message={"content": None, "tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        reasoning_tokens=3,
        cached_tokens=16,
        created_cache_tokens=0,
        prompt_logprobs=(None, {9: (-1.5, 2, "y")}),
        weight_versions=(("default", 0, 3), ("step-1", 3, 4)),
    ),
)
"""With every field that a delta can have."""

HOLDINGS: Final = {digest_of(5): FeatureInfo("image", 40, LAYOUT), digest_of(6): FeatureInfo("image", 41, LAYOUT)}
EXAMPLES: Final[tuple[tuple[Message, tuple[memoryview, ...]], ...]] = (
    (Hello(PROTOCOL, "0123456789abcdef", "f1", b"n" * 32), ()),
    (Challenge(b"m" * 32, b"p" * 32), ()),
    (Proof(b"q" * 32, Resume(b"i" * 8, 7)), ()),
    (Welcome(CONTRACT, "0123456789abcdef", b"i" * 8), ()),
    (Refusal("key", "the key differs"), ()),
    (Heartbeat(123_456), ()),
    (Credit(1 << 40), ()),
    (Bye("closed", "the worker closes"), ()),
    (submit(), ()),
    (Abort("r1"), ()),
    (to_payload(3, digest_of(5), FEATURE), tuple(tensor.data for tensor in FEATURE.tensors.values())),
    (Chunk(3, 1, 4096, 5), (memoryview(b"bytes"),)),
    (Withdraw(3), ()),
    (to_lend(digest_of(5), FEATURE, Lease(9, b"s" * 16, 4096, 40)), ()),
    (Drain(), ()),
    (Accepted("r1"), ()),
    (Deltas((Delta("r1", 0, "hé", (5, 6)), Delta("r2", 1, "", (), "stop", ({5: -0.5, 6: -1.5},)), FULL)), ()),
    (Pooled("r1", (2, 3), b"\0\0\x80?" * 6, "stop", 16), ()),
    (Failed("r1", 500, "feature_rejected", "too large"), ()),
    (Draining(), ()),
    (to_status(Announcement(3, 4, (digest_of(7),), HOLDINGS, more=True), 5, 6, True), ()),
    (Need("r1", (digest_of(5),)), ()),
    (Forget(), ()),
    (Adapters((Adapter("sql", "/adapters/sql", "0f" * 16, "tiny"),), (CHANGE,)), ()),
    (ChangeAdapter(CHANGE), ()),
)


def file_of(message: Message) -> Path:
    return GOLDEN / f"v{PROTOCOL}" / f"{type(message).__name__.lower()}.hex"


def hex_of(message: Message, buffers: tuple[memoryview, ...]) -> str:
    """One frame a line."""
    frames = encode(0x1122334455667788, 42, pack(message, Limits()), buffers)
    return "".join(f"{bytes(frame).hex()}\n" for frame in frames)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example[0]).__name__)
def test_a_message_is_encoded_as_its_golden_frames_say(example: tuple[Message, tuple[memoryview, ...]]) -> None:
    assert hex_of(*example) == file_of(example[0]).read_text(), "the wire format changed: PROTOCOL must, too"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example[0]).__name__)
def test_golden_frames_are_read_as_the_message_that_they_were(
    example: tuple[Message, tuple[memoryview, ...]],
) -> None:
    message, buffers = example
    frames = [bytes.fromhex(line) for line in file_of(message).read_text().splitlines()]
    found = (
        decode(frames, FROM_FRONTEND, Limits())
        if isinstance(message, get_args(FrontendMessage))
        else decode(frames, FROM_WORKER, Limits())
    )
    assert (found.epoch, found.sequence, found.message) == (0x1122334455667788, 42, message)
    assert [bytes(buffer) for buffer in found.buffers] == [bytes(buffer) for buffer in buffers]


def test_what_version_2_sent_is_understood_with_the_defaults_of_what_it_did_not_know() -> None:
    old = [bytes.fromhex(line) for line in (GOLDEN / "v2" / "submit.hex").read_text().splitlines()]
    submitted = decode(old, FROM_FRONTEND, Limits()).message
    assert submitted == structs.replace(
        submit(), parsing=None, priority=0, trace=None, client_features=(), adapter=None
    )
    old = [bytes.fromhex(line) for line in (GOLDEN / "v2" / "deltas.hex").read_text().splitlines()]
    told = decode(old, FROM_WORKER, Limits()).message
    assert isinstance(told, Deltas)
    assert told.deltas == (Delta("r1", 0, "hé", (5, 6)), Delta("r2", 1, "", (), "stop", ({5: -0.5, 6: -1.5},)))


def test_what_version_5_sent_is_understood_as_a_request_whose_client_sent_no_tensors() -> None:
    old = [bytes.fromhex(line) for line in (GOLDEN / "v5" / "submit.hex").read_text().splitlines()]
    assert decode(old, FROM_FRONTEND, Limits()).message == structs.replace(submit(), client_features=(), adapter=None)


@pytest.mark.parametrize(
    "trace",
    [
        Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\nINFO a line of my own"),
        Trace("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"),
        Trace("", ""),
        Trace(TRACE.parent, "x" * 513),
    ],
)
def test_a_trace_that_is_not_of_w3cs_form_or_over_its_length_is_refused(trace: Trace) -> None:
    frames = encode(1, 2, pack(structs.replace(submit(), trace=trace), Limits()), ())
    with pytest.raises(ProtocolError):
        decode(frames, FROM_FRONTEND, Limits())


def test_every_message_of_the_protocol_has_golden_frames() -> None:
    assert {type(message) for message, _ in EXAMPLES} == {*get_args(FrontendMessage), *get_args(WorkerMessage)}
    assert {file_of(message) for message, _ in EXAMPLES} == set((GOLDEN / f"v{PROTOCOL}").iterdir())


if __name__ == "__main__":
    (GOLDEN / f"v{PROTOCOL}").mkdir(parents=True)
    for one, its_buffers in EXAMPLES:
        file_of(one).write_text(hex_of(one, its_buffers))
