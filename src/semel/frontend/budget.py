"""The memory budget: the bytes that one request and all requests of a process may hold (threats S18, S21).

A request opens an account and charges bytes before it stores them: its body, its parsed JSON, decoded base64 and
fetched media. It releases them as it drops them; closing the account releases the rest. What a thread needs for a
while, to make tokens of a text, is charged until the thread is done (`Account.lend`). So is what the account has that a
thread still holds (`Account.pin`). In whatever order that happens, the budget's total is the sum of its accounts and of
what is lent, and never exceeds the limit. Thread-safe.

Tenants share the bytes, and the places of requests that wait. Alone, a tenant has all of them. While others ask, each
is entitled to an equal share: if there is no room for a tenant within its share, the newest accounts of a tenant that
has more than that are called back (`Account.revocable`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Final, Self

from semel.errors import Busy, InvalidRequest, MediaTooLarge, ServiceError, TooManyBytes
from semel.fairness.retry import RetryQueue
from semel.fairness.shares import Claims
from semel.frontend.limits import BudgetLimits
from semel.web.revocation import Revocation

__all__ = ["Account", "Budget", "Loan"]

_EQUAL_SHARES: Final = "the request was called back: while other tenants ask, each has an equal share of the"


class Budget:
    """The bytes that all requests of one process hold, and the places of those that wait."""

    def __init__(self, limits: BudgetLimits | None = None) -> None:
        self.limits = limits or BudgetLimits()
        self._lock = threading.Lock()
        self._bytes: Claims[Account | Loan] = Claims(self.limits.max_bytes)
        self._places: Claims[Account] = Claims(self.limits.max_requests)
        self._retries = RetryQueue()
        self._called_back: Counter[tuple[str, str]] = Counter()

    @property
    def in_flight(self) -> int:
        """The bytes of all accounts, and of what is lent."""
        return self._bytes.shares.total

    @property
    def requests(self) -> int:
        """The number of open accounts."""
        return self._places.shares.total

    @property
    def called_back(self) -> dict[tuple[str, str], int]:
        """The number of accounts that were called back, by the code of the error and by tenant."""
        with self._lock:
            return dict(self._called_back)

    def by_tenant(self) -> dict[str, tuple[int, int]]:
        """The bytes and the open accounts of each tenant that has any."""
        with self._lock:
            nbytes, places = self._bytes.shares, self._places.shares
            return {tenant: (nbytes[tenant], places[tenant]) for tenant in {*nbytes, *places}}

    def open(self, tenant: str = "") -> Account:
        """Open an account for a request of a tenant; refuse it if too many are open."""
        limit = self.limits.max_requests
        with self._lock:
            revoked = self._places.to_revoke(tenant, 1)
            if revoked is None:
                raise Busy(
                    f"{limit:,} requests wait for their answers already: try again in a moment, or raise it with "
                    "--max-waiting-requests",
                    retry_after_s=self._retries.after_s(tenant),
                )
            for account in revoked:
                retry_after_s = self._retries.after_s(account._tenant)
                account._revoke(
                    Busy(
                        f"{_EQUAL_SHARES} {limit:,} requests that may wait for their answers; try again in a moment, "
                        "or raise it with --max-waiting-requests",
                        retry_after_s=retry_after_s,
                    )
                )
            self._places.shares.change(tenant, 1)
        return Account(self, tenant)

    def __repr__(self) -> str:
        return f"Budget({self.in_flight:,} of {self.limits.max_bytes:,} bytes, {self.requests:,} requests)"


class Account:
    """The bytes that one request holds. Made by `Budget.open`."""

    __slots__ = ("_answer", "_brought", "_budget", "_charged", "_error", "_open", "_pinned", "_revocation", "_tenant")

    def __init__(self, budget: Budget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._brought = 0
        self._charged = 0
        self._answer = 0
        """The part of it that is the answer's."""

        self._pinned = 0
        """The part of it that stays charged, whatever becomes of the account."""

        self._open = True
        self._revocation: Revocation | None = None
        """The scope in which it can be called back, if there is one."""

        self._error: ServiceError | None = None
        """Why it was called back, if it was."""

    @property
    def charged(self) -> int:
        """The bytes that it holds."""
        return self._charged

    def revocable(self) -> AbstractContextManager[object]:
        """Let the account be called back while the current task is in this scope, which then raises `Busy`.

        Its bytes and its place are released at once, and the task is cancelled. A scope inside of another has no
        effect, and `commit` ends it.
        """
        return _RevocableScope(self) if self._revocation is None else nullcontext()

    def commit(self) -> None:
        """The answer begins: the account cannot be called back any more. Raises if it has been."""
        self._offer(None)
        self.check(0)

    def check(self, nbytes: int) -> None:
        """Refuse `nbytes` if they could not be charged now. Charges nothing, and calls nobody back."""
        with self._budget._lock:
            self._check_open()
            self._check_request(nbytes)
            self._to_revoke(nbytes)

    def take(self, nbytes: int) -> None:
        """Charge `nbytes` more, or refuse them. A closed account charges nothing: its request has ended."""
        with self._budget._lock:
            if not self._open:
                self._check_open()
                return
            self._check_request(nbytes)
            self._make_room(nbytes)
            self._brought += nbytes
            self._hold(self._charged + nbytes)

    def take_feature(self, nbytes: int) -> None:
        """Charge a feature of `nbytes` that has no room in shared memory, or refuse it.

        It is none of the bytes that the request brings. Once the request has ended, nothing is charged: others may wait
        for the same feature.
        """
        with self._budget._lock:
            if not self._open:
                return
            if self._charged + nbytes > (limit := self._budget.limits.max_bytes):
                raise MediaTooLarge(
                    f"the request with its preprocessed items would hold more than {limit:,} bytes: send fewer items, "
                    "or raise it with --max-media-bytes-in-flight, or the room for them with --feature-cache-gb"
                )
            self._make_room(nbytes)
            self._hold(self._charged + nbytes)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[None]:
        """Charge `nbytes` to the tenant for a while, or refuse them.

        They stay charged to the end of the scope, whatever becomes of the account: nothing stops a thread. They are
        none of the bytes that the request brings.
        """
        if nbytes > (limit := self._budget.limits.max_bytes):
            raise MediaTooLarge(
                f"the text would take {nbytes:,} bytes while it becomes tokens; the limit is {limit:,}: send less, or "
                "raise it with --max-media-bytes-in-flight"
            )
        loan = Loan(self)
        loan.hold(nbytes)
        try:
            yield
        finally:
            loan.clear()

    def pin(self, nbytes: int) -> Callable[[], None]:
        """Let `nbytes` that are charged stay so until what is returned is called, once.

        They do when the account is closed or called back, too: nothing stops the thread that holds them. Raises if it
        has been called back. Of an account that is closed nothing is charged: its request has ended.
        """
        with self._budget._lock:
            self._check_open()
            nbytes = min(nbytes, self._charged - self._pinned) if self._open else 0
            self._set_pinned(self._pinned + nbytes)

        def unpin() -> None:
            with self._budget._lock:
                self._set_pinned(self._pinned - nbytes)

        return unpin

    def keep(self, nbytes: int) -> None:
        """Release all but `nbytes` and the answer: the request has dropped the rest."""
        if not self._open:
            return
        with self._budget._lock:
            self._hold(min(nbytes, self._charged - self._answer) + self._answer)

    def grow(self, nbytes: int) -> None:
        """Charge `nbytes` more of an answer that waits to be complete, or refuse them."""
        with self._budget._lock:
            if not self._open:
                self._check_open()
                return
            if self._answer + nbytes > (limit := self._budget.limits.max_request_bytes):
                raise InvalidRequest(
                    f"the complete answer takes more than {limit:,} bytes: stream it, or ask for fewer tokens, inputs "
                    "or log probabilities, or raise it with --max-request-media-bytes"
                )
            self._make_room(nbytes)
            self._hold(self._charged + nbytes)
            self._answer += nbytes

    def shrink(self, nbytes: int) -> None:
        """Release `nbytes` of the answer."""
        if not self._open:
            return
        with self._budget._lock:
            if nbytes := min(nbytes, self._answer):
                self._hold(self._charged - nbytes)
                self._answer -= nbytes

    def close(self) -> None:
        """Release the rest. A second call has no effect."""
        if self._open:
            with self._budget._lock:
                if self._open:
                    self._close()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_request(self, nbytes: int) -> None:
        limits = self._budget.limits
        if self._brought + nbytes > limits.max_request_bytes:
            raise MediaTooLarge(
                f"the request brings more than {limits.max_request_bytes:,} bytes, with its media decoded and fetched: "
                "send less, or raise it with --max-request-media-bytes"
            )

    def _make_room(self, nbytes: int) -> None:
        """Call back whom it takes to charge `nbytes` more; raises if that is not possible."""
        budget = self._budget
        if budget._bytes.shares.fits(nbytes):
            return
        for account in self._to_revoke(nbytes):
            retry_after_s = budget._retries.after_s(account._tenant)
            account._revoke(
                TooManyBytes(
                    f"{_EQUAL_SHARES} {budget.limits.max_bytes:,} bytes of requests in flight; try again in a moment, "
                    "or raise it with --max-media-bytes-in-flight",
                    retry_after_s=retry_after_s,
                )
            )

    def _to_revoke(self, nbytes: int) -> Sequence[Account | Loan]:
        """The accounts that have to be called back to charge `nbytes` more; raises if that is not possible."""
        budget, limit = self._budget, self._budget.limits.max_bytes
        revoked = budget._bytes.to_revoke(self._tenant, nbytes)
        if revoked is None:
            raise TooManyBytes(
                f"the requests in flight would hold more than {limit:,} bytes: try again in a moment, or "
                "raise it with --max-media-bytes-in-flight",
                retry_after_s=budget._retries.after_s(self._tenant),
            )
        return revoked

    def _offer(self, revocation: Revocation | None) -> None:
        """Begin or end the scope in which the account can be called back."""
        if revocation is self._revocation:  # it was closed in between
            return
        with self._budget._lock:
            if revocation is not None:
                self._check_open()
            self._revocation = revocation if self._open else None
            is_revocable = self._revocation is not None
            self._budget._places.offer(self._tenant, self, int(is_revocable))
            self._budget._bytes.offer(self._tenant, self, self._free() if is_revocable else 0)

    def _revoke(self, error: ServiceError) -> None:
        """Call the account back: only inside of its scope. The budget is locked."""
        revocation = self._revocation
        assert revocation is not None
        self._error = error
        self._budget._called_back[error.code, self._tenant] += 1
        self._close()
        revocation.revoke(error)

    def _close(self) -> None:
        self._hold(0)
        self._answer = 0
        self._open = False
        self._revocation = None
        self._budget._places.offer(self._tenant, self, 0)
        self._budget._places.shares.change(self._tenant, -1)
        self._budget._retries.free()

    def _set_pinned(self, nbytes: int) -> None:
        self._pinned = nbytes
        self._hold(self._charged if self._open else 0)

    def _hold(self, nbytes: int) -> None:
        """Have so many bytes charged, and those at least that are pinned."""
        nbytes = max(nbytes, self._pinned)
        claims, more = self._budget._bytes, nbytes - self._charged
        self._charged = nbytes
        if more:
            claims.shares.change(self._tenant, more)
        if self._revocation is not None:
            claims.offer(self._tenant, self, self._free() if self._pinned else nbytes)

    def _free(self) -> int:
        """Return what others get if it is called back: nothing if most of it is pinned."""
        free = self._charged - self._pinned
        return free if free >= self._pinned else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Account({self._charged:,} bytes{'' if self._open else ', closed'})"


class _RevocableScope(Revocation):
    """A scope in which an account can be called back."""

    __slots__ = ("_account",)

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account

    def __enter__(self) -> Self:
        self._account._offer(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._account._offer(None)
        super().__exit__(kind, error, traceback)


class Loan:
    """Bytes that are charged to the tenant of an account, and stay so when the account is closed or called back.

    They can be called back themselves if there is something to do then: `on_revoke`, in the event loop.
    """

    __slots__ = ("_account", "_error", "_loop", "_nbytes", "_on_revoke", "_tenant")

    def __init__(self, account: Account, on_revoke: Callable[[ServiceError], None] | None = None) -> None:
        self._account = account
        self._tenant = account._tenant
        self._nbytes = 0
        self._error: ServiceError | None = None
        self._on_revoke = on_revoke
        self._loop = None if on_revoke is None else asyncio.get_running_loop()

    def hold(self, nbytes: int) -> None:
        """Charge `nbytes` more, or refuse them."""
        with self._account._budget._lock:
            if self._error is not None:
                raise self._error
            self._account._check_open()
            self._account._make_room(nbytes)
            self._set(self._nbytes + nbytes)

    def drop(self, nbytes: int) -> None:
        """Release `nbytes` of them."""
        with self._account._budget._lock:
            self._set(max(self._nbytes - nbytes, 0))

    def clear(self) -> None:
        """Release all of them."""
        with self._account._budget._lock:
            self._set(0)

    def _revoke(self, error: ServiceError) -> None:
        assert self._loop is not None
        assert self._on_revoke is not None
        self._error = error
        self._account._budget._called_back[error.code, self._tenant] += 1
        self._set(0)
        self._loop.call_soon_threadsafe(self._on_revoke, error)

    def _set(self, nbytes: int) -> None:
        claims, more = self._account._budget._bytes, nbytes - self._nbytes
        self._nbytes = nbytes
        claims.shares.change(self._tenant, more)
        if self._on_revoke is not None:
            claims.offer(self._tenant, self, nbytes)

    def __repr__(self) -> str:
        return f"Loan({self._nbytes:,} bytes)"
