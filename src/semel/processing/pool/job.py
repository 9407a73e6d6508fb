"""One item on its way through the pool: what is asked for, who waits for it, and what a process answered."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Final, Generic, TypeVar

from semel.core import Assembly, Feature, Layout, Media, Modality
from semel.errors import MediaTooLarge, PromptTooLong, ProtocolError, SemelError
from semel.media import Pieces
from semel.processing.pool.pipe import (
    Answer,
    Assembled,
    ClipPieces,
    Failed,
    Made,
    Offer,
    PageCount,
    Text,
    Tokens,
    to_error,
    to_feature,
    to_pieces,
)
from semel.processing.pool.prompts import to_assembly
from semel.telemetry.request_context import current_span, record_child

__all__ = ["AssemblyJob", "CutJob", "FeatureJob", "Job", "LayoutJob", "OfferLimits", "PagesJob", "Spend"]


_T = TypeVar("_T")

_SMALL_BYTES: Final = 16 << 10
"""An order whose payload is shorter counts as so long: what is said of no text is some bytes too."""

Spend = Callable[[int], None]
"""Called with the number of bytes that a request is about to hold; raises if it may not."""


@dataclass(frozen=True, slots=True)
class OfferLimits:
    """The limits of a feature (threats S21): a larger one is dropped where it was made; nothing is evicted for it."""

    max_bytes: int = 256 * 1024**2
    """Of its tensors: no more can be sent to a worker."""

    max_tokens: int | None = None
    """Of its layout: no prompt can have more."""

    def check(self, modality: Modality, offer: Offer) -> None:
        """Refuse a feature that could never be used."""
        if offer.nbytes > self.max_bytes:
            raise MediaTooLarge(
                f"the {modality} makes {offer.nbytes:,} bytes of tensors; the limit is {self.max_bytes:,}: send a "
                "smaller one, or lower min_pixels in mm_processor_kwargs"
            )
        if self.max_tokens is not None and offer.tokens >= self.max_tokens:
            raise PromptTooLong(
                f"the {modality} alone has {offer.tokens:,} tokens; the model takes {self.max_tokens:,} with the answer"
            )


@dataclass(slots=True, eq=False)
class Job(ABC, Generic[_T]):
    """An item on its way; what comes of it is dropped if its caller has gone."""

    work: ClassVar[str]
    """What is done with the item, as its span says."""

    decodes: ClassVar[bool] = False
    """Whether a process decodes media for it."""

    is_offered: ClassVar[bool] = False
    """Whether a process offers what it has made, and learns whether it is taken."""

    is_staged: ClassVar[bool] = False
    """Whether a process leaves what it has made in its staging memory, if it has some."""

    answered_with: ClassVar[type[Made | ClipPieces | Assembled | PageCount | Tokens | Text]]
    """What a process that has not failed says of what it has made."""

    max_growth: ClassVar[int] = 0
    """How many bytes a process may send, without an offer, for each byte that it was sent (threats S21)."""

    item: int
    media: Media
    order: bytes
    tenant: str = ""
    """Whose item it is: whose turn and place in the queue it takes, and whose room in the shared memory.

    What it does to a process is held against nobody else's.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    group: Hashable | None = None
    """The request that it is of; None if it is one of its own."""

    apart: bool = False
    """Whether what is made stays out of the shared memory."""

    spend: Spend | None = None
    """Is asked before what is made is taken."""

    paid: int = 0
    """Bytes that its request was charged for what is made of it."""

    made: asyncio.Future[_T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    context: Context = field(default_factory=copy_context)
    """Of the first caller: a process is handed the next item by any caller."""

    queued_at: float = field(default_factory=perf_counter)

    @property
    def subject(self) -> str:
        """Return what is worked on, as its client knows it."""
        return self.media.subject

    @property
    def max_answer_bytes(self) -> int:
        """The bytes that a process may send without an offer."""
        return self.max_growth * max(len(self.order) + len(self.media.data), _SMALL_BYTES)

    def trace(self, began: float) -> None:
        """Tell the request's span of it: from when it was asked for, and how much of that it waited."""
        if current_span().is_recording():
            attributes: dict[str, str | int | float] = {
                "semel.item.work": self.work,
                "semel.item.modality": self.media.modality,
                "semel.item.bytes": len(self.media.data),
                "semel.pool.wait_seconds": round(began - self.queued_at, 6),
            }
            record_child("process item", perf_counter() - self.queued_at, attributes)

    def read(self, answer: Answer, payload: memoryview) -> _T:
        """Return what a process answered with, or the error; `payload` is a copy of what it has staged, if it has."""
        if isinstance(answer, Failed):
            raise to_error(answer)
        if not isinstance(answer, self.answered_with) or answer.item != self.item:
            raise self.unexpected(answer)
        return self._read(answer, payload)

    @abstractmethod
    def _read(self, answer: Any, payload: memoryview) -> _T:
        """Return what was made."""

    def offer_of(self, answer: Answer) -> Offer | None:
        """Return the offer that a first answer has to make; None if it failed, or if such a job is not offered."""
        if not self.is_offered or isinstance(answer, Failed):
            return None
        if self.is_staged and isinstance(answer, Made) and answer.is_written:
            return answer.offer
        if not isinstance(answer, Offer):
            raise self.unexpected(answer)
        return answer

    def admit(self, offer: Offer, limits: OfferLimits) -> None:
        """Refuse what a process offers if nobody could use it."""

    def pay(self, nbytes: int) -> None:
        """Charge its request for what is not written into the shared memory, or refuse it; a second try is free."""
        if self.spend is not None and nbytes > self.paid:
            self.spend(nbytes - self.paid)
            self.paid = nbytes

    def succeed(self, made: _T) -> None:
        """Give its caller the result, if it is still there."""
        if not self.made.done():
            self.made.set_result(made)

    def fail(self, error: SemelError) -> None:
        """Give its caller the error, unless it has got something already."""
        if not self.made.done():
            self.made.set_exception(error)
            self.made.exception()  # seen: no complaint if the caller is cancelled before it wakes up

    def unexpected(self, answer: Answer) -> ProtocolError:
        """Return the error of a process that answers with what nobody asked for."""
        return ProtocolError(f"a pool process answered item {self.item} with {type(answer).__name__}")


class FeatureJob(Job[Feature]):
    """An item that a feature is made of."""

    __slots__ = ()
    work = "making"
    answered_with = Made
    decodes = True
    is_offered = True
    is_staged = True

    def admit(self, offer: Offer, limits: OfferLimits) -> None:
        """Refuse a feature that is too large for any worker or any prompt."""
        limits.check(self.media.modality, offer)

    def _read(self, answer: Made, payload: memoryview) -> Feature:
        return to_feature(answer, payload, self.options)


class LayoutJob(Job[Layout]):
    """An item that is looked at, and not made anything of."""

    __slots__ = ()
    work = "laying"
    answered_with = Made
    decodes = True
    is_offered = True

    def admit(self, offer: Offer, limits: OfferLimits) -> None:
        """Refuse tensors, which nobody asked for."""
        del limits
        if offer.nbytes:
            raise ProtocolError(f"a pool process offered {offer.nbytes:,} bytes of tensors with the layout of an item")

    def _read(self, answer: Made, payload: memoryview) -> Layout:
        if answer.tensors:
            raise self.unexpected(answer)
        return to_feature(answer, payload).layout


class CutJob(Job[Pieces]):
    """A clip that is cut into pieces."""

    __slots__ = ()
    work = "cutting"
    answered_with = ClipPieces
    decodes = True
    is_offered = True

    def _read(self, answer: ClipPieces, payload: memoryview) -> Pieces:
        return to_pieces(answer, payload)


class PagesJob(Job[int]):
    """A document whose pages are counted."""

    __slots__ = ()
    work = "counting"
    answered_with = PageCount

    @property
    def subject(self) -> str:
        """The document."""
        return "the document"

    def _read(self, answer: PageCount, payload: memoryview) -> int:
        del payload
        return answer.pages


class AssemblyJob(Job[Assembly]):
    """A prompt that items are put into; its bytes travel as media do."""

    __slots__ = ()
    work = "assembling"
    answered_with = Assembled
    max_growth = 64

    @property
    def subject(self) -> str:
        """The prompt."""
        return "the prompt"

    def _read(self, answer: Assembled, payload: memoryview) -> Assembly:
        return to_assembly(answer, payload)
