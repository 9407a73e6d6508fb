"""What the tests of the wire send each other."""

from __future__ import annotations

from typing import Final

from semel.core import (
    AnswerParsing,
    Contract,
    Digest,
    Feature,
    Field,
    Item,
    Key,
    Layout,
    Mask,
    Placeholder,
    Prompt,
    Submission,
    Target,
    Tensor,
    Timeline,
    Trace,
)
from semel.lab.testing.wire import MemoryWire, Mischief
from semel.wire.handshake import FrontendHandshake, WorkerHandshake
from semel.wire.limits import Deadlines, Limits
from semel.wire.messages import INCARNATION_BYTES, NONCE_BYTES, Submit
from semel.wire.session import Session
from semel.wire.translation import to_submit

KEY: Final = Key(bytes(range(32)))
OTHER_KEY: Final = Key(bytes(range(1, 33)))
CONTRACT: Final = Contract(
    model="tiny",
    fingerprint="f" * 16,
    target=Target("float32", options={"max_pixels": 1024}),
    fields={"image": {"pixel_values": Field("float32", (None, 4)), "image_grid_thw": Field("int64", (3,))}},
    max_items={"image": 8},
    max_embeds=64,
    max_tokens=1024,
)
LAYOUT: Final = Layout((7, 8, 8, 9), Mask([False, True, True, False]))
"""Of every item."""

PARSING: Final = AnswerParsing(
    tools=[{"type": "function", "function": {"name": "f"}}],
    tool_choice={"type": "function", "function": {"name": "f"}},
    template_kwargs={"enable_thinking": False},
    stream=True,
)
TRACE: Final = Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "rojo=00f067aa0ba902b7")
SMALL: Final = Limits(inline_bytes=256, chunk_bytes=128, window_bytes=1024, max_open_features=3, max_open_bytes=16_384)
"""Limits under which a few kilobytes travel in chunks."""


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def feature_of_rows(rows: int, *, seed: int = 0) -> Feature:
    """A feature of 16 bytes a row and 24 more."""
    period = bytes((seed + index) % 251 for index in range(251))
    pixels = (period * (16 * rows // len(period) + 1))[: 16 * rows]
    return Feature(
        "image",
        {
            "pixel_values": Tensor("float32", (rows, 4), memoryview(pixels)),
            "image_grid_thw": Tensor("int64", (3,), memoryview(bytes(24))),
        },
        LAYOUT,
    )


def prompt() -> Prompt:
    return Prompt(
        [1, 2, 7, 8, 8, 9, 3, 7, 8, 8, 9],
        Timeline.decoder([Placeholder(2, 4, LAYOUT.mask), Placeholder(7, 4, LAYOUT.mask)]),
        (Item("image", digest_of(1)), Item("image", digest_of(2))),
    )


def submit(request_id: str = "r1") -> Submit:
    submission = Submission(
        request_id,
        prompt(),
        {},
        {"max_tokens": 4, "temperature": 0.0},
        "s",
        parsing=PARSING,
        priority=-3,
        trace=TRACE,
        client_features=frozenset({digest_of(1)}),
        adapter="sql",
    )
    return to_submit(submission, [digest_of(1)])


def frontend_session(
    key: Key = KEY, *, now: float = 0.0, limits: Limits = SMALL, deadlines: Deadlines | None = None
) -> Session:
    handshake = FrontendHandshake(key=key, frontend_id="f1", nonce=b"f" * NONCE_BYTES)
    return Session(handshake, now=now, limits=limits, deadlines=deadlines or Deadlines())


def worker_session(
    key: Key = KEY, *, now: float = 0.0, limits: Limits = SMALL, deadlines: Deadlines | None = None
) -> Session:
    incarnation = bytes(INCARNATION_BYTES)
    handshake = WorkerHandshake(keys=[key], contract=CONTRACT, nonce=b"w" * NONCE_BYTES, incarnation=incarnation)
    return Session(handshake, now=now, limits=limits, deadlines=deadlines or Deadlines())


class Pair:
    """A frontend's and a worker's session, joined in memory."""

    def __init__(self, *mischief: Mischief, limits: Limits = SMALL) -> None:
        self.frontend = frontend_session(limits=limits)
        self.worker = worker_session(limits=limits)
        self.wire = MemoryWire(self.frontend, self.worker, mischief=mischief)

    def open(self) -> Pair:
        self.wire.run()
        assert self.frontend.is_open
        assert self.worker.is_open
        self.wire.frontend_events.clear()
        self.wire.worker_events.clear()
        return self


def same(left: Feature, right: Feature) -> bool:
    """Whether two features are equal to the byte."""
    return (left.modality, left.layout) == (right.modality, right.layout) and {
        name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in left.tensors.items()
    } == {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in right.tensors.items()}
