"""`python -m semel.lab.prove.without PROTECTION WORDS…`: the `semel` command in a process that lacks one protection.

Functions are replaced in this process alone. No flag of the product does this: nobody should want it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from semel.core import Digest, Tenant
from semel.errors import ServiceError
from semel.fleet.retry_policy import RetryPolicy
from semel.fleet.worker import RemoteWorker
from semel.ledger import Ledger
from semel.store.seal import Seal

__all__ = ["PROTECTIONS", "command_without", "main"]


def _no_repair() -> None:
    def give_up(self: Any, stream: Any, _: Iterable[Digest]) -> None:
        self._give_up(stream, ServiceError("an item that the worker should have is not there"))

    _set(RemoteWorker, "_repair", give_up)


def _no_ledger() -> None:
    _set(Ledger, "knows", lambda *_: False)
    _set(Ledger, "holding", lambda *_: None)


def _no_tenant_key() -> None:
    _set(Tenant, "parts", property(lambda _: (b"", b"")))


def _no_retry() -> None:
    _set(RetryPolicy, "is_resumable", lambda *_: False)


def _no_seals() -> None:
    _set(Seal, "open", lambda self, _, record: record[self.NBYTES :])


def _set(owner: type, name: str, value: object) -> None:
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more"
    setattr(owner, name, value)


PROTECTIONS: Final[dict[str, Callable[[], None]]] = {
    "repair": _no_repair,
    "ledger": _no_ledger,
    "tenant-key": _no_tenant_key,
    "retry": _no_retry,
    "seals": _no_seals,
}
"""By name: what takes it out of a frontend."""


def command_without(protection: str) -> tuple[str, ...]:
    """Return the `semel` command without a protection."""
    return (sys.executable, "-m", "semel.lab.prove.without", protection)


def main() -> None:
    """Run the command line without the protection that it begins with."""
    from semel import cli

    PROTECTIONS[sys.argv.pop(1)]()
    cli.main()


if __name__ == "__main__":
    main()
