"""Byte counts of one kind of traffic in a session, in both directions: the input of flow control."""

from __future__ import annotations

from dataclasses import dataclass

from semel.wire.events import Violation

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Totals since the session began. Totals need no order and no repair: the last one received is correct."""

    sent: int = 0
    acknowledged: int = 0
    """Sent bytes that the peer has reported as read."""

    read: int = 0
    reported: int = 0
    """Read bytes that were reported to the peer."""

    @property
    def unread(self) -> int:
        """Bytes in transit, as far as this end knows."""
        return self.sent - self.acknowledged

    @property
    def unreported(self) -> int:
        """Read bytes that were not yet reported to the peer."""
        return self.read - self.reported

    def acknowledge(self, total: int) -> None:
        """The peer reports that it has read this total."""
        if not self.acknowledged <= total <= self.sent:
            raise Violation("order", f"the peer claims to have read {total:,} bytes of {self.sent:,} sent")
        self.acknowledged = total

    def report(self) -> int:
        """The total to report to the peer."""
        self.reported = self.read
        return self.read
