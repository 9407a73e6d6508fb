"""A request's position in a trace, as sent between processes: the two W3C headers and nothing else."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["Trace"]


class Trace(Struct, frozen=True, array_like=True):
    """The parent span of the work that follows."""

    parent: Annotated[str, Meta(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
    """W3C's `traceparent`: the trace, the span, and whether they are recorded."""

    state: Annotated[str, Meta(max_length=512)] = ""
    """W3C's `tracestate`: data that other tracing systems pass along."""

    @property
    def headers(self) -> dict[str, str]:
        """The trace as HTTP headers."""
        return {"traceparent": self.parent} | ({"tracestate": self.state} if self.state else {})
