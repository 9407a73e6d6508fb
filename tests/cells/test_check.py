"""`semel cells check`: what is wrong with the frontends of all cells, the cause first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from semel.cells.check import CELL_HEADER, CONTRACT_HEADER, Answer, findings
from semel.cells.file import CellsFile
from semel.cells.placement import Cell
from semel.lab.bench.ports import free_port
from tests.commands import invoke

FILE = CellsFile((Cell("a", ("a1:1", "a2:1")), Cell("b", ("b1:1",))))
WELL = {
    "a1:1": Answer(ready=True, cell="a", contract="c0"),
    "a2:1": Answer(ready=True, cell="a", contract="c0"),
    "b1:1": Answer(ready=True, cell="b", contract="c0"),
}


def told(**answers: Answer) -> list[str]:
    found = findings(FILE, WELL | {f"{name}:1": answer for name, answer in answers.items()})
    return [f"{one.cell}: {one.text}" for one in found if one.is_problem]


def test_nothing_is_said_of_cells_that_are_well() -> None:
    assert told() == []
    assert [one.text for one in findings(FILE, WELL)] == ["2 of 2 frontends are ready", "1 of 1 frontends are ready"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer("Connection refused"), "a: a2:1 does not answer: Connection refused"),
        (Answer(reason="no worker is connected", cell="a"), "a: a2:1 is not ready: no worker is connected"),
        (Answer(ready=True, cell="b", contract="c0"), "a: a2:1 is a frontend of cell 'b'"),
    ],
)
def test_one_frontend_that_is_not_well_is_named(answer: Answer, text: str) -> None:
    assert told(a2=answer) == [text]


def test_a_cell_without_any_frontend_that_is_ready_is_named() -> None:
    assert told(b1=Answer("Connection refused")) == [
        "b: b1:1 does not answer: Connection refused",
        "b: none of its 1 frontends is ready",
    ]


def test_cells_that_serve_differently_are_named_the_fewest_first() -> None:
    assert told(b1=Answer(ready=True, cell="b", contract="c1")) == [
        "b: b serves contract c1, a c0: a tenant that moves gets other answers"
    ]


class Frontend(BaseHTTPRequestHandler):
    """Answers as a frontend of cell a that is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/ready":
            self.send_header(CELL_HEADER, "a")
            self.send_header(CONTRACT_HEADER, "c0")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def answering() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Frontend) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(10)


def test_the_command_asks_every_frontend(tmp_path: Path) -> None:
    with answering() as port:
        nobody, path = free_port(), tmp_path / "cells.toml"
        path.write_text(f'[[cells]]\nname = "a"\naddresses = ["127.0.0.1:{port}"]\n')
        well = invoke("cells", "check", str(path))
        path.write_text(f'[[cells]]\nname = "b"\naddresses = ["127.0.0.1:{port}", "127.0.0.1:{nobody}"]\n')
        ill = invoke("cells", "check", str(path))
    assert (well.exit_code, ill.exit_code) == (0, 1)
    assert "a: 1 of 1 frontends are ready" in well.output
    assert f"b: 127.0.0.1:{port} is a frontend of cell 'a'" in ill.output
    assert f"b: 127.0.0.1:{nobody} does not answer: Connection refused" in ill.output
