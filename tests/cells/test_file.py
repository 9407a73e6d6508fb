"""A cells file: what it says, and what is wrong with it, in one line with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semel.cells.envoy import envoy_config
from semel.cells.file import CellsFile, read_cells
from semel.cells.haproxy import haproxy_config, server_numbers
from semel.errors import ConfigError

GOOD = """
listen = "0.0.0.0:8080"
[[cells]]
name = "eu-1"
zone = "eu-central-1a"
weight = 2
addresses = ["10.0.1.11:8000", "[fd00::1]:8000"]
[[cells]]
name = "eu-2"
addresses = ["frontends.eu-2.svc:8000"]
"""
NAMED = 'tenant_header = "x-tenant"\n' + GOOD + '[[tenants]]\nname = "acme"\ncells = 2\n'


def written(home: Path, text: str) -> Path:
    (path := home / "cells.toml").write_text(text)
    return path


def read(home: Path, text: str) -> CellsFile:
    return read_cells(written(home, text))


def test_it_says_which_cells_there_are(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    assert [(cell.name, cell.zone, cell.weight) for cell in found.cells] == [
        ("eu-1", "eu-central-1a", 2),
        ("eu-2", "", 1),
    ]
    assert found.cells[0].addresses == ("10.0.1.11:8000", "[fd00::1]:8000")
    assert (found.listening.host, found.listening.port, found.balance_factor) == ("0.0.0.0", 8080, 200)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "eu-2"', 'name = "eu-1"', "2 cells named 'eu-1'"),
        ('name = "eu-2"', 'name = "EU 2"', "$.cells[1].name"),
        ("weight = 2", "weight = 0", "$.cells[0].weight"),
        ("weight = 2", "wieght = 2", "wieght"),
        ('"10.0.1.11:8000"', '"10.0.1.11"', "'10.0.1.11' is no address; write HOST:PORT"),
        ('"10.0.1.11:8000"', '"10.0.1.11:80000"', "no address"),
        ('"10.0.1.11:8000"', '"10.0.1.11:8000 backup"', "no address"),
        ("frontends.eu-2.svc:8000", "10.0.1.11:8000", "10.0.1.11:8000 stands there twice, in eu-1 and eu-2"),
        ("listen", "lisen", "lisen"),
        ("[[cells]]", "[cells", "is not TOML"),
        ('zone = "eu-central-1a"', 'zone = "a\\nserver x"', "$.cells[0].zone"),
        ('listen = "0.0.0.0:8080"', 'certificate = "/tls.crt"', "go together"),
        ('listen = "0.0.0.0:8080"', 'certificate = "/a b"\nprivate_key = "/b"', "$.certificate"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, told: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert told in str(caught.value)
    assert str(tmp_path / "cells.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NAMED.replace('tenant_header = "x-tenant"\n', ""), "a balancer sees only API keys; set tenant_header"),
        (NAMED.replace("x-tenant", "authorization"), "a balancer sees only API keys; set tenant_header"),
        (NAMED.replace("cells = 2\n", "cells = 3\n"), "cannot live in 3 cells; there are 2"),
        (NAMED.replace('"acme"', '"acme }"'), "$.tenants[0].name"),
    ],
)
def test_a_large_tenant_needs_its_name_and_enough_cells(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cells\.toml") as caught:
        read(tmp_path, text)
    assert told in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the cells file .*nothing\.toml: No such file"):
        read_cells(tmp_path / "nothing.toml")


@pytest.mark.parametrize("text", [GOOD, NAMED])
def test_no_configuration_logs_requests(text: str, tmp_path: Path) -> None:
    """API keys are in headers, which logs may show."""
    found = read(tmp_path, text)
    assert "log" not in envoy_config(found)
    assert not [line for line in haproxy_config(found).splitlines() if line.split()[:1] in (["log"], ["capture"])]


def test_a_large_tenant_has_its_own_cells_and_the_others_only_if_they_are_down(tmp_path: Path) -> None:
    found = read(tmp_path, NAMED + '[[cells]]\nname = "eu-3"\naddresses = ["10.0.3.1:8000"]\n')
    clusters = json.loads(envoy_config(found))["static_resources"]["clusters"]
    (large,) = [one for one in clusters if one["name"] == "tenant-acme"]
    by_priority = {
        priority: {
            one["locality"]["sub_zone"] for one in large["load_assignment"]["endpoints"] if one["priority"] == priority
        }
        for priority in (0, 1)
    }
    assert {priority: len(cells) for priority, cells in by_priority.items()} == {0: 2, 1: 1}
    _, _, section = haproxy_config(found).partition("\nbackend tenant-acme")
    lines = section.partition("\n\n")[0].splitlines()
    servers = [line.split() for line in lines if line.split()[:1] == ["server"]]
    assert {line[1] for line in servers if line[-1] == "backup"} == by_priority[1]
    assert {line[1] for line in servers if line[-1] != "backup"} == by_priority[0]


def test_the_number_of_a_server_is_of_its_name_alone() -> None:
    """HAProxy hashes it: another order of cells, or one more, must not move anybody."""
    names = [f"cell-{number}" for number in range(256)]
    numbers = server_numbers(names)
    assert numbers == server_numbers(reversed(names))
    assert len(set(numbers.values())) == len(names)
    assert all(0 < number < 1 << 20 for number in numbers.values())
    moved = [name for name in names[:16] if server_numbers(names[:16])[name] != numbers[name]]
    assert not moved


def test_haproxy_finds_a_private_key_only_beside_the_certificate(tmp_path: Path) -> None:
    tls = 'certificate = "/etc/tls.crt"\nprivate_key = "{}"\n' + GOOD
    found = read(tmp_path, tls.format("/etc/tls.crt.key"))
    assert "ssl crt /etc/tls.crt" in haproxy_config(found)
    assert "/etc/tls.crt.key" in envoy_config(found)
    with pytest.raises(ConfigError, match=r"name it /etc/tls\.crt\.key"):
        haproxy_config(read(tmp_path, tls.format("/etc/tls.key")))
