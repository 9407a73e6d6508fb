"""The memory budget: the bytes that one request and all requests of a process may hold (threats S18).

A request opens an account and charges bytes before it stores them: its body, its parsed JSON, decoded base64 and
fetched media. It releases them as it drops them; closing the account releases the rest. In whatever order that happens,
the budget's total is the sum of its open accounts and never exceeds the limit. No I/O; thread-safe.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Self

from semel.core import RetryQueue
from semel.core.flag import MIB, flag
from semel.errors import Busy, ConfigError, MediaTooLarge, TooManyBytes

__all__ = ["Account", "Budget", "BudgetLimits"]


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """The limits of the memory budget."""

    max_request_bytes: int = flag(
        512 * MIB,
        "max-request-media-bytes",
        help="Maximum bytes of one request: its body, its decoded media and its fetched media; over it the answer is "
        "413.",
        group="Limits",
        unit="bytes",
        min=1,
    )
    max_bytes: int = flag(
        2_048 * MIB,
        "max-media-bytes-in-flight",
        help="Maximum bytes of all requests together until their answers begin; over it the answer is 429.",
        group="Limits",
        unit="bytes",
        min=1,
    )
    max_requests: int = flag(
        2_048,
        "max-waiting-requests",
        help="Maximum number of requests whose answers have not begun; more are answered with 429.",
        group="Limits",
        min=1,
    )

    def __post_init__(self) -> None:
        if self.max_request_bytes < 1:
            raise ConfigError(f"--max-request-media-bytes is {self.max_request_bytes:,}: it must be at least 1")
        if self.max_bytes < self.max_request_bytes:
            raise ConfigError(
                f"--max-media-bytes-in-flight is {self.max_bytes:,}, less than the {self.max_request_bytes:,} that one "
                "request may bring: raise it, or lower --max-request-media-bytes"
            )
        if self.max_requests < 1:
            raise ConfigError(f"--max-waiting-requests is {self.max_requests:,}: it must be at least 1")


class Budget:
    """The bytes that all requests of one process hold."""

    def __init__(self, limits: BudgetLimits | None = None) -> None:
        self.limits = limits or BudgetLimits()
        self._lock = threading.Lock()
        self._charged = 0
        self._accounts = 0
        self._retries = RetryQueue()

    @property
    def in_flight(self) -> int:
        """The bytes of all open accounts."""
        return self._charged

    @property
    def requests(self) -> int:
        """The number of open accounts."""
        return self._accounts

    def open(self, tenant: str = "") -> Account:
        """Open an account for a request of a tenant; refuse it if too many are open."""
        with self._lock:
            if self._accounts >= self.limits.max_requests:
                raise Busy(
                    f"{self.limits.max_requests:,} requests wait for their answers already: try again in a moment, or "
                    "raise it with --max-waiting-requests",
                    retry_after_s=self._retries.after_s(tenant),
                )
            self._accounts += 1
        return Account(self, tenant)

    def __repr__(self) -> str:
        return f"Budget({self._charged:,} of {self.limits.max_bytes:,} bytes, {self._accounts:,} requests)"


class Account:
    """The bytes that one request holds. Made by `Budget.open`."""

    __slots__ = ("_brought", "_budget", "_charged", "_open", "_tenant")

    def __init__(self, budget: Budget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._brought = 0
        self._charged = 0
        self._open = True

    @property
    def charged(self) -> int:
        """The bytes that it holds."""
        return self._charged

    def check(self, nbytes: int) -> None:
        """Refuse `nbytes` if they could not be charged now. Charges nothing."""
        limits = self._budget.limits
        if self._brought + nbytes > limits.max_request_bytes:
            raise MediaTooLarge(
                f"the request brings more than {limits.max_request_bytes:,} bytes, with its media decoded and fetched: "
                "send less, or raise it with --max-request-media-bytes"
            )
        if self._budget._charged + nbytes > limits.max_bytes:
            raise TooManyBytes(
                f"the requests in flight would hold more than {limits.max_bytes:,} bytes: try again in a moment, or "
                "raise it with --max-media-bytes-in-flight",
                retry_after_s=self._budget._retries.after_s(self._tenant),
            )

    def take(self, nbytes: int) -> None:
        """Charge `nbytes` more, or refuse them. A closed account charges nothing: its request has ended."""
        with self._budget._lock:
            if self._open:
                self.check(nbytes)
                self._brought += nbytes
                self._hold(self._charged + nbytes)

    def keep(self, nbytes: int) -> None:
        """Release all but `nbytes`: the request has dropped the rest."""
        with self._budget._lock:
            self._hold(min(nbytes, self._charged))

    def close(self) -> None:
        """Release the rest. A second call has no effect."""
        with self._budget._lock:
            self._hold(0)
            if self._open:
                self._budget._accounts -= 1
                self._budget._retries.free()
            self._open = False

    def _hold(self, nbytes: int) -> None:
        self._budget._charged += nbytes - self._charged
        self._charged = nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Account({self._charged:,} bytes{'' if self._open else ', closed'})"
