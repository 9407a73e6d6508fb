"""Check of a fleet's cells: all frontends are ready, in the cell that the file says, and serve alike."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

from semel.cells.file import CellsFile, split_address

__all__ = ["CELL_HEADER", "CONTRACT_HEADER", "Answer", "CellFinding", "ask_all", "ask_frontend", "findings"]

CELL_HEADER: Final = "semel-cell"
CONTRACT_HEADER: Final = "semel-contract"
"""Headers of a frontend's answer to /ready: its cell, and a short hash of the contract that it serves."""

_TIMEOUT_S: Final = 3.0
_AT_A_TIME: Final = 32
_MAX_BODY_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a frontend."""

    refusal: str = ""
    """The reason if it did not answer at all."""

    ready: bool = False
    reason: str = ""
    """The reason if it is not ready."""

    cell: str = ""
    contract: str = ""


@dataclass(frozen=True, slots=True)
class CellFinding:
    """One line of `semel cells check`, the cause before the remedy."""

    cell: str
    is_problem: bool
    text: str
    remedy: str = ""


def ask_frontend(address: str) -> Answer:
    """Ask one frontend whether it lives and is ready."""
    host, port = split_address(address)
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)) as connection:
            connection.request("GET", "/health")
            health = connection.getresponse()
            health.read(_MAX_BODY_BYTES)
            if health.status != http.client.OK:
                return Answer(f"/health answers {health.status}")
            connection.request("GET", "/ready")
            ready = connection.getresponse()
            body = ready.read(_MAX_BODY_BYTES)
    except TimeoutError:
        return Answer(f"no answer within {_TIMEOUT_S:g} s")
    except (OSError, http.client.HTTPException) as error:
        return Answer(getattr(error, "strerror", None) or str(error) or type(error).__name__)
    its = ready.getheader(CELL_HEADER, ""), ready.getheader(CONTRACT_HEADER, "")
    if ready.status == http.client.OK:
        return Answer("", True, "", *its)
    return Answer("", False, _reason(body) or f"/ready answers {ready.status}", *its)


def ask_all(file: CellsFile) -> dict[str, Answer]:
    """Ask every frontend, several at a time."""
    addresses = [address for cell in file.cells for address in cell.addresses]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return dict(zip(addresses, pool.map(ask_frontend, addresses), strict=True))


def findings(file: CellsFile, answers: Mapping[str, Answer]) -> Iterator[CellFinding]:
    """Return what is wrong with each cell; one line that all is well if nothing is. Pure."""
    for cell in file.cells:
        mine = {address: answers[address] for address in cell.addresses}
        wrong = [found for address, answer in mine.items() for found in _faults(cell.name, address, answer)]
        yield from wrong
        if not any(answer.ready for answer in mine.values()):
            yield CellFinding(
                cell.name, True, f"none of its {len(mine)} frontends is ready", "its tenants are in other cells now"
            )
        elif not wrong:
            yield CellFinding(cell.name, False, f"{len(mine)} of {len(mine)} frontends are ready")
    yield from _differences(file, answers)


def _faults(cell: str, address: str, answer: Answer) -> Iterator[CellFinding]:
    if answer.refusal:
        yield CellFinding(
            cell, True, f"{address} does not answer: {answer.refusal}", "start the frontend, or correct the address"
        )
        return
    if answer.cell and answer.cell != cell:
        yield CellFinding(
            cell,
            True,
            f"{address} is a frontend of cell {answer.cell!r}",
            f"move the address to that cell, or start it with --cell {cell}",
        )
    if not answer.ready:
        yield CellFinding(cell, True, f"{address} is not ready: {answer.reason}")


def _differences(file: CellsFile, answers: Mapping[str, Answer]) -> Iterator[CellFinding]:
    """Report cells that serve another model, or the same one otherwise: right during an upgrade, and wrong after it."""
    serving: dict[str, list[str]] = {}
    for cell in file.cells:
        for contract in sorted({answers[address].contract for address in cell.addresses} - {""}):
            serving.setdefault(contract, []).append(cell.name)
    if len(serving) < 2:
        return
    most, *others = sorted(serving.items(), key=lambda one: (-len(one[1]), one[0]))
    for contract, cells in others:
        yield CellFinding(
            cells[0],
            True,
            f"{' and '.join(cells)} serves contract {contract}, {' and '.join(most[1])} {most[0]}: a tenant that moves "
            "gets other answers",
            "give all cells the same model, flags and versions of libraries",
        )


def _reason(body: bytes) -> str:
    with suppress(ValueError, AttributeError):
        return str(json.loads(body).get("reason") or "")
    return ""
