"""Workers without a link, which are as their tests say: a fleet of a thousand is made in a moment."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from semel.core import Digest, FeatureInfo, Layout
from semel.fleet.worker import RemoteWorker
from semel.ledger import Announcement
from tests.wire.examples import CONTRACT

if TYPE_CHECKING:
    from semel.wire.zmq import FrontendLink


class UnlinkedWorker(RemoteWorker):
    """It serves, holds what it announces, and has the load that it is set to."""

    def __init__(self, number: int) -> None:
        link = SimpleNamespace(address=f"tcp://10.0.{number >> 8}.{number & 255}:9000", resume=None, newest_only=False)
        super().__init__(cast("FrontendLink", link))
        self._ledger.open()
        self._announcements = 0
        self._become(CONTRACT, "")

    def announce(self, digests: Iterable[Digest], *, gone: Iterable[Digest] = ()) -> None:
        before, self._announcements = self._announcements, self._announcements + 1
        holdings = dict.fromkeys(digests, FeatureInfo("image", 1, Layout((7,))))
        since = before or None
        self._ledger.announce(Announcement(since, self._announcements, holdings=holdings, gone=tuple(gone)))

    def set_load(self, load: int) -> None:
        self._others = load
        self.on_load()
