"""Invariants at the end of every simulated run, when all requests have ended and all faults are over.

Every request was answered once, or refused with a reason. Every frontend is linked to every worker, and knows exactly
what it holds. Nothing is left of any request: in an intake, in notes, in transfers, in an engine. Every byte that was
sent was read, or was lost by a fault. Without a fault no session ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from semel.fleet.worker import RemoteWorker
from semel.lab.simulate.network import Network
from semel.lab.simulate.processes import FrontendProcess, WorkerProcess

__all__ = ["InvariantBroken", "check_invariants"]


class InvariantBroken(AssertionError):
    """A run did not end as it must. The message has its seed."""


def check_invariants(
    frontends: Sequence[FrontendProcess], workers: Sequence[WorkerProcess], network: Network, *, has_faults: bool
) -> list[str]:
    """Return what is wrong; empty if nothing is."""
    by_address = {worker.address: worker for worker in workers}
    found: list[str] = []
    for frontend in frontends:
        found += _left_at_frontend(frontend)
        for remote in frontend.fleet.workers:
            found += (
                f"{frontend.name}: {one}" for one in _link(remote, by_address[remote.name], has_faults=has_faults)
            )
    for worker in workers:
        found += (f"{worker.address}: {one}" for one in _left_at_worker(worker, len(frontends)))
    found += _network(network, has_faults=has_faults)
    return found


def _left_at_frontend(frontend: FrontendProcess) -> Iterator[str]:
    fleet, directory = frontend.fleet, frontend.fleet._directory
    for name, holders in (("sent", directory.sent), ("pending", directory.pending)):
        if len(holders):
            yield f"{frontend.name}: {len(holders)} items count as {name}, and no request is under way"
    if left := len(frontend.pipeline.flight):
        yield f"{frontend.name}: {left} items are being made for nobody"
    if left := sum(pending.requests for pending in fleet._preparing.values()):
        yield f"{frontend.name}: {left} requests count as being prepared"
    if len(fleet.serving) != len(fleet.workers):
        yield f"{frontend.name}: {len(fleet.workers) - len(fleet.serving)} workers do not serve: {fleet.reason}"


def _link(remote: RemoteWorker, worker: WorkerProcess, *, has_faults: bool) -> Iterator[str]:
    name, ledger = remote.name, remote._ledger
    if not remote.is_connected:
        yield f"{name} is not connected: {remote.reason}"
        return
    cached = worker.engine.cached
    known = {digest for digest in cached if remote.holding(digest) == worker.engine.holding(digest)}
    if len(ledger) != len(cached) or known != cached:
        yield f"{name} has {len(cached)} items; {len(ledger)} are known, {len(cached - known)} of them not or wrongly"
    left = {
        "unsettled requests": ledger.unsettled,
        "notes": len(ledger._notes),
        "streams": len(remote._streams),
        "transfers": len(remote._transfers),
        "requests as load": remote.load,
    }
    yield from (f"{name}: {count} {what} are left" for what, count in left.items() if count)
    if not has_faults and remote.sessions != 1:
        yield f"{name}: {remote.sessions} sessions, and no fault"


def _left_at_worker(worker: WorkerProcess, frontends: int) -> Iterator[str]:
    intake, engine = worker.worker._intake, worker.engine
    residency = engine.model.residency
    left = {
        "requests in the intake": len(intake),
        "bytes in the intake": intake.nbytes,
        "sessions in the intake": len(intake._sessions),
        "requests": sum(map(len, worker.worker._frontends.values())),
        "requests in the engine": engine.model.jobs + len(engine._streams),
        "embeddings in use": residency.capacity - residency.free - residency.reclaimable,
        "places at the engine": worker.worker._turns._turns.places,
    }
    yield from (f"{count} {what} are left" for what, count in left.items() if count)
    holdings = worker.worker._publisher.holdings
    if len(holdings) != len(engine.cached) or any(digest not in holdings for digest in engine.cached):
        yield f"{len(holdings)} items count as held, {len(engine.cached)} are"
    if (peers := len(worker.listener.peers)) != frontends:
        yield f"{peers} frontends are linked, there are {frontends}"


def _network(network: Network, *, has_faults: bool) -> Iterator[str]:
    if network.sent_bytes != network.read_bytes + network.lost_bytes + network.bytes_under_way:
        yield (
            f"{network.sent_bytes} bytes were sent, {network.read_bytes} read, {network.lost_bytes} lost, "
            f"{network.bytes_under_way} are under way"
        )
    if not has_faults and network.lost_bytes:
        yield f"{network.lost_bytes} bytes were lost, and no fault"
