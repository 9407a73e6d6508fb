"""Two cells of real semel processes behind a real Envoy and a real HAProxy, with the configuration that we write.

The engines have no model (`semel testing serve`); all else is what operators run. Cell by cell the model has another
name, so every answer tells which cell gave it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme

from semel.cells.envoy import envoy_config
from semel.cells.file import CellsFile, read_cells
from semel.cells.haproxy import haproxy_config
from semel.lab.bench.ports import free_port
from tests.cells.balancers import Balancer, check_envoy, check_haproxy, running_envoy, running_haproxy
from tests.cells.test_file import GOOD, NAMED, read
from tests.conftest import Folder
from tests.serve.served import SEMEL, until

NAMES = ("a", "b")
TENANTS = {f"tenant-{number}": f"key-of-tenant-{number:04}" for number in range(16)}
START_S = 200.0
TOKENS = 60


@pytest.mark.parametrize("text", [GOOD, NAMED, "tls"])
def test_both_balancers_take_what_is_written_for_them(text: str, tmp_path: Path) -> None:
    """Control: a configuration with a word that there is not is refused by both."""
    if text == "tls":
        made, path = trustme.CA().issue_cert("127.0.0.1"), tmp_path / "tls.crt"
        made.cert_chain_pems[0].write_to_path(str(path))
        made.private_key_pem.write_to_path(f"{path}.key")
        text = f'certificate = "{path}"\nprivate_key = "{path}.key"\n' + GOOD
    found = read(tmp_path, text)
    (envoy := tmp_path / "envoy.json").write_text(written := envoy_config(found))
    (proxy := tmp_path / "haproxy.cfg").write_text(haproxy_config(found))
    for done in (check_envoy(envoy), check_haproxy(proxy)):
        assert done.returncode == 0, done.stderr[-3_000:]
    envoy.write_text(written.replace("hash_policy", "hash_policies"))
    proxy.write_text(haproxy_config(found).replace("balance hash", "balance hashed"))
    assert check_envoy(envoy).returncode != 0
    assert check_haproxy(proxy).returncode != 0


@dataclass(frozen=True)
class Cell:
    """A `semel testing serve` with a worker and a frontend."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3_000:]
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=10, verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """End all its processes in an instant, as a zone does that loses power."""
        if self.process.poll() is None:
            family = [parent := psutil.Process(self.process.pid), *parent.children(recursive=True)]
            for process in family:
                process.kill()
            psutil.wait_procs(family, timeout=30)
        self.process.wait(30)


@dataclass(frozen=True)
class Site:
    """Two cells, and three balancers before them; the last has no hash, no health checks and no retries."""

    cells: dict[str, Cell]
    good: dict[str, Balancer]
    careless: Balancer
    file: Path

    def homes(self, balancer: Balancer) -> dict[str, str]:
        """The cell that answers each tenant; what is no answer stands there as it is."""
        with ThreadPoolExecutor(4) as pool:
            return dict(zip(TENANTS, pool.map(lambda key: cell_of(balancer, key), TENANTS.values()), strict=True))


def cell_of(balancer: Balancer, key: str) -> str:
    reply = balancer.get("/v1/models", key)
    if reply.status_code != 200:
        return f"{reply.status_code}: {reply.text[:200]}"
    name: str = reply.json()["data"][0]["id"]
    return name.rpartition("/")[2]


def careless(config: str) -> str:
    """Envoy's configuration without what keeps tenants in their cells, and without what spares them a dead one."""
    found: dict[str, Any] = json.loads(config)

    def strip(part: Any) -> Any:
        if isinstance(part, list):
            return [strip(one) for one in part]
        if not isinstance(part, dict):
            return part
        return {
            name: strip(one)
            for name, one in part.items()
            if name not in ("hash_policy", "health_checks", "retry_policy")
        }

    return json.dumps(strip(found))


@contextmanager
def serving_cells(model: Path, home: Path) -> Iterator[dict[str, Cell]]:
    keys = home / "keys"
    keys.touch(mode=0o600)
    keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in TENANTS.items()))
    with ExitStack() as stack:
        made = {}
        for name in NAMES:
            (home / name).symlink_to(model)
            port, log = free_port(), home / f"{name}.log"
            command = [SEMEL, "testing", "serve", home / name, "--port", port, "--api-keys-file", keys, "--rate", 20]
            with log.open("wb") as output:
                words = [*map(str, command), "--preprocessing-processes", "1", "--cell", name]
                process = subprocess.Popen(words, stdout=output, stderr=output, process_group=0)
            made[name] = Cell(name, port, process, log)
            stack.callback(made[name].kill)
        for cell in made.values():
            until(cell.is_ready, START_S, every_s=0.2)
        yield made


def write_file(home: Path, cells: dict[str, Cell], port: int) -> CellsFile:
    text = f'listen = "127.0.0.1:{port}"\n' + "".join(
        f'[[cells]]\nname = "{cell.name}"\naddresses = ["127.0.0.1:{cell.port}"]\n' for cell in cells.values()
    )
    (path := home / "cells.toml").write_text(text)
    return read_cells(path)


@pytest.fixture(scope="module")
def site(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("cells")
    with ExitStack() as stack:
        cells = stack.enter_context(serving_cells(tiny("qwen2-vl"), home))
        ports = [free_port() for _ in range(3)]
        first, second, third = (write_file(home, cells, port) for port in ports)
        envoy = stack.enter_context(running_envoy(envoy_config(first), ports[0], home))
        proxy = stack.enter_context(running_haproxy(haproxy_config(second), ports[1], home))
        wrong = stack.enter_context(running_envoy(careless(envoy_config(third)), ports[2], home, "careless"))
        made = Site(cells, {"envoy": envoy, "haproxy": proxy}, wrong, home / "cells.toml")
        for balancer in made.good.values():  # each has asked both cells whether they are there
            until(lambda: set(made.homes(balancer).values()) == set(NAMES), 30, every_s=0.2)  # noqa: B023
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["envoy", "haproxy"])
def test_a_tenant_stays_in_its_cell(site: Site, name: str) -> None:
    """However it sends its key. Both cells have tenants: so few are all in one only once in thousands of times."""
    balancer = site.good[name]
    homes = site.homes(balancer)
    assert set(homes.values()) == set(NAMES)
    for _ in range(2):
        assert site.homes(balancer) == homes
    for tenant, key in list(TENANTS.items())[:4]:
        for headers in ({"x-api-key": key}, {"authorization": f"bearer {key}"}):
            reply = httpx.get(f"{balancer.url}/v1/models", headers=headers, timeout=30, verify=False)
            assert reply.json()["data"][0]["id"].endswith(f"/{homes[tenant]}")


@pytest.mark.slow
def test_without_the_hash_a_tenant_wanders(site: Site) -> None:
    key = next(iter(TENANTS.values()))
    assert {cell_of(site.careless, key) for _ in range(24)} == set(NAMES)


@pytest.mark.slow
def test_check_asks_both_cells_and_finds_the_difference(site: Site) -> None:
    """Their models have other names here."""
    done = subprocess.run(
        [str(SEMEL), "cells", "check", str(site.file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout.count("1 of 1 frontends are ready") == 2, done.stdout + done.stderr
    assert "serves contract" in done.stdout


def stream(client: httpx.Client, balancer: Balancer, key: str) -> httpx.Response:
    """A long answer that has begun."""
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": TOKENS, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    request = client.build_request("POST", f"{balancer.url}/v1/chat/completions", json=body, headers=headers)
    answer = client.send(request, stream=True)
    assert answer.status_code == 200
    return answer


@pytest.mark.slow
def test_a_killed_cell_fails_no_new_request_and_streams_of_the_other_go_on(site: Site) -> None:
    """The last test here: one cell is gone after it. Control: the careless balancer fails some requests."""
    homes = {name: site.homes(balancer) for name, balancer in site.good.items()}
    with httpx.Client(timeout=60, verify=False) as client:
        streams = []
        for name, balancer in site.good.items():
            tenant = next(tenant for tenant, cell in homes[name].items() if cell == "b")
            streams.append(stream(client, balancer, TENANTS[tenant]).iter_lines())
        begun = [[next(lines)] for lines in streams]
        site.cells["a"].kill()
        for name, balancer in site.good.items():
            for _ in range(3):
                found = site.homes(balancer)
                assert set(found.values()) == {"b"}, (name, found)
        for lines, rest in zip(begun, streams, strict=True):
            lines += [line for line in rest if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            assert sum('"content"' in line for line in lines) >= TOKENS // 2
    key = next(iter(TENANTS.values()))
    outcomes = {cell_of(site.careless, key)[:1] for _ in range(24)}
    assert "5" in outcomes, outcomes  # a status over 499
