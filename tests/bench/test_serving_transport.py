"""`semel bench serve --transport tcp`, `scripts/load`: who is started with what, and what fails, without any engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import psutil
import pytest

from semel.core import Key
from semel.core.flag import flags_of
from semel.errors import ConfigError
from semel.lab.bench.serving import servers
from semel.lab.bench.serving.run import Options
from semel.lab.bench.serving.servers import Launch, semel_server
from semel.lab.prove.counters import Counts
from semel.lab.prove.processes import Fleet
from semel.settings.frontend import FrontendSettings
from semel.settings.worker import WorkerSettings
from tools.fleet import comparing, load
from tools.fleet.driving import Tally
from tools.fleet.transports import Figures

STAND_IN = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Up(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

words = sys.argv[1:]
if words[1] != "key":
    port = words[words.index("--admin-port" if words[1] == "worker" else "--port") + 1]
    HTTPServer(("127.0.0.1", int(port)), Up).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Instead of semel: it answers every probe, and its command line can be read."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(servers, "_PYTHON", (sys.executable, str(tmp_path / "stand_in.py")))
    yield


@pytest.mark.parametrize("port", [0, 40_001])
async def test_over_tcp_the_worker_and_the_frontend_are_commands_of_their_own(
    port: int, tmp_path: Path, stand_in: None
) -> None:
    """Control: over ipc there is one command, which starts both."""
    launch = Launch("MODEL", ("--seed", "0"), tmp_path, semel_flags=("--embedding-tier-gb", "1"), tcp_port=port)
    async with semel_server(launch) as server:
        commands = {words[1]: words for words in (psutil.Process(pid).cmdline()[2:] for pid in server.roots)}
        roles = server.roles()
    if not port:
        assert list(commands) == ["serve"]
        return
    assert set(commands) == {"worker", "frontend"}
    worker, frontend = commands["worker"], commands["frontend"]
    assert worker[worker.index("--listen") + 1] == frontend[frontend.index("--worker") + 1] == "tcp://127.0.0.1:40001"
    assert worker[worker.index("--fleet-key-file") + 1] == frontend[frontend.index("--fleet-key-file") + 1]
    assert {"--seed", "--embedding-tier-gb"} <= set(worker) - set(frontend)
    for words, settings in ((worker, WorkerSettings), (frontend, FrontendSettings)):
        taken = {one.spelling for one in flags_of(settings)} | {"--seed"}  # which is the engine's
        assert {word for word in words if word.startswith("--")} <= taken
    assert server.admin_url == f"http://127.0.0.1:{worker[worker.index('--admin-port') + 1]}"
    assert {role: len(roles[role]) for role in ("frontend", "worker")} == {"frontend": 1, "worker": 1}


def test_the_transport_of_a_server_that_runs_elsewhere_cannot_be_chosen() -> None:
    elsewhere = Options(baseline="http://a", semel="http://b")
    assert elsewhere.are_elsewhere()
    with pytest.raises(ConfigError, match="--transport tcp is for a semel that is started here"):
        replace(elsewhere, transport="tcp").are_elsewhere()


@pytest.mark.parametrize(("transport", "beginning"), [("ipc", "ipc:///"), ("tcp", "tcp://127.0.0.1:")])
def test_workers_of_a_load_listen_as_it_is_asked_for(transport: str, beginning: str) -> None:
    fleet = Fleet(Path("/m"), Path("/h"), Key(bytes(32)), "", transport=transport)
    assert fleet.address_of("worker-0").startswith(beginning)


@pytest.mark.parametrize(("encodes", "failures", "status"), [(120, [], 0), (121, [], 1), (100, ["another answer"], 1)])
def test_a_comparison_fails_if_images_are_encoded_over_1_2_times_or_a_request_fails(
    encodes: int, failures: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 8. Round robin encodes each image twice, which is its own affair."""

    def figures(encoded: int, failures: list[str]) -> comparing.Figures:
        counts = Counts(**dict.fromkeys((one.name for one in fields(Counts)), 0) | {"encoded": encoded})
        return comparing.Figures([Tally(failures=failures, latencies_s=[0.1, 0.2])], [counts], images=100)

    async def drive_rivals(*_: object, **__: object) -> dict[str, comparing.Figures]:
        return {"semel": figures(encodes, failures), "round robin": figures(200, [])}

    monkeypatch.setattr(load, "_model", lambda folder: folder)
    monkeypatch.setattr(load, "running_fleet", lambda *_, **__: nullcontext())
    monkeypatch.setattr(load, "drive_rivals", drive_rivals)
    assert load.main(["--compare", "--json"]) == status


def test_figures_are_medians_by_the_feature() -> None:
    figures = Figures(repeats_s=[0.01, 0.02, 9.0], new_s=[2.0, 1.0, 9.0], new=4, nbytes=[8_000] * 3)
    figures.frontend_s, figures.worker_s = [0.4, 0.4, 9.0], [0.2, 0.2, 9.0]
    assert figures.table() == {
        "latency of a repeat, ms": 20.0,
        "new features per second": 2.0,
        "bytes of a new feature, KB": 2.0,
        "processor, frontend, ms a new feature": 100.0,
        "processor, worker, ms a new feature": 50.0,
        "requests": 15,
        "failed": 0,
    }
