"""Bytes of one kind of traffic in a session, both ways: what flow control is decided on."""

from __future__ import annotations

from dataclasses import dataclass

from semel.wire.events import Violation

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Totals since the session began. Totals need no order and no repair: the last one that came is the truth."""

    sent: int = 0
    acknowledged: int = 0
    """How much of what was sent the peer says it has read."""

    read: int = 0
    reported: int = 0
    """How much of what was read the peer has been told of."""

    @property
    def unread(self) -> int:
        """What is on its way, as far as this end knows."""
        return self.sent - self.acknowledged

    @property
    def unreported(self) -> int:
        """What the peer does not yet know to be read."""
        return self.read - self.reported

    def acknowledge(self, total: int) -> None:
        """The peer has read this much."""
        if not self.acknowledged <= total <= self.sent:
            raise Violation("order", f"the peer claims to have read {total:,} bytes of {self.sent:,} sent")
        self.acknowledged = total

    def report(self) -> int:
        """The total to tell the peer."""
        self.reported = self.read
        return self.read
