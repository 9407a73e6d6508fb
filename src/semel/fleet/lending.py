"""A frontend's shared memory, lent to one worker on the same host: what lies there is read in place and not sent."""

from __future__ import annotations

import logging

from semel.cache import Lender, SharedCache
from semel.core import Digest, Feature
from semel.errors import ProtocolError
from semel.wire.messages import Lend
from semel.wire.translation import to_lend
from semel.wire.zmq import memory_path

__all__ = ["Lending"]

logger = logging.getLogger(__name__)


class Lending:
    """The connection over which one worker borrows. Without shared memory, or on another host, nothing is lent."""

    def __init__(self, memory: SharedCache | None, address: str) -> None:
        self._memory = memory
        self._address = address
        self._lender: Lender | None = None

    async def begin(self) -> None:
        """Let the worker read our shared memory; without it, features travel in frames."""
        if self._memory is None or (path := memory_path(self._address)) is None:
            return
        try:
            self._lender = await Lender.connect(path, self._memory)
        except (OSError, ProtocolError) as error:
            logger.warning("no shared memory with the worker at %s (%s): features are sent", self._address, error)

    def stop(self) -> None:
        """Lend nothing more."""
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    def take_over(self, before: Lending) -> bool:
        """Lend over the connection of another link to the same worker, which takes one for a segment; if it has one."""
        self._lender, before._lender = before._lender, None
        return self._lender is not None

    def lend(self, digest: Digest, feature: Feature) -> Lend | None:
        """Return the message that lends a feature; None if it must be sent.

        It may have been evicted since it was made, and still lie there. What does not is not copied: that would hold up
        the loop, and take the room of others for what a client has sent.
        """
        if self._lender is None or self._memory is None or (lying := self._memory.adopt(digest, feature)) is None:
            return None
        lease = self._lender.lend(digest)
        return None if lease is None else to_lend(digest, lying, lease)  # its tensors may be in another order
