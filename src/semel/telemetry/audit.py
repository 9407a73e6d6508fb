"""The audit log: one line for each action of an operator, done, refused or failed."""

from __future__ import annotations

import logging

__all__ = ["audit"]

logger = logging.getLogger("semel.audit")


def audit(action: str, *, who: str, peer: str, result: str) -> None:
    """Write who did what, from where, and what came of it. A key is never in it."""
    fields = {"action": action, "who": who, "peer": peer, "result": result}
    logger.info("%s by %s from %s: %s", action, who, peer, result, extra={"fields": fields})
