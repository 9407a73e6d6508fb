"""A request's place in a trace, as it travels from process to process: W3C's two headers, and nothing else of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["Trace"]


class Trace(Struct, frozen=True, array_like=True):
    """The span that what is done next belongs to."""

    parent: Annotated[str, Meta(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
    """W3C's `traceparent`: the trace, the span, and whether they are recorded."""

    state: Annotated[str, Meta(max_length=512)] = ""
    """W3C's `tracestate`: what other systems want handed on."""

    @property
    def headers(self) -> dict[str, str]:
        """As HTTP tells it."""
        return {"traceparent": self.parent} | ({"tracestate": self.state} if self.state else {})
