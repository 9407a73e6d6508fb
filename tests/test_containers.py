"""The containers: linted, and held to the code. No container engine runs here, so nothing is built."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from semel.processing.fingerprint import PACKAGES
from tests.commands import root_command
from tools.locks import LOCKS

ROOT = Path(__file__).parent.parent
CONTAINERS = ROOT / "containers"
FILES = sorted(CONTAINERS.glob("*.Containerfile"))
TOOLS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["services"]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_containerfile_passes_its_linter(file: Path) -> None:
    done = subprocess.run([TOOLS / "hadolint", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_compose_file_keeps_to_the_specification() -> None:
    command = [str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(CONTAINERS / "compose.yaml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_pinned_versions_are_those_that_the_tests_run_with() -> None:
    pinned = dict(re.findall(r"^([a-z]+)==(\S+)$", (CONTAINERS / "versions.txt").read_text(), re.MULTILINE))
    assert pinned == {package: version(package).partition("+")[0] for package in PACKAGES}


def images() -> dict[str, str]:
    """The text that each image is built from: a Containerfile with the lock that `scripts/images` gives it."""
    names = [lock.name for lock in LOCKS if lock.extras]
    texts = {name: (CONTAINERS / f"{name.partition('-')[0]}.Containerfile").read_text() for name in names}
    return {name: text.replace("${LOCK}", name) for name, text in texts.items()}


def test_there_is_a_frontend_with_vllm_one_without_and_a_worker() -> None:
    assert [*images()] == ["frontend", "frontend-slim", "worker"]
    for file in FILES:
        assert re.findall(r"^ARG LOCK=(.+)$", file.read_text(), re.MULTILINE) == [file.stem]


@pytest.mark.parametrize("name", images())
def test_what_is_copied_is_there(name: str) -> None:
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", images()[name], re.MULTILINE)
    assert f"containers/{name}.lock" in sources
    assert all((ROOT / path).exists() for source in sources for path in source.split())


def loose_installs(text: str) -> list[str]:
    """What would install a file that no hash names, or from an index besides the lock's addresses and PyPI."""
    commands = re.findall(r"pip (?:install|wheel) .+$", text, re.MULTILINE)
    hashed, own = "--require-hashes --only-binary :all: --requirement", "--no-deps --no-"
    return [one for one in commands if "index-url" in one or not (hashed in one or own in one)]


def test_whatever_is_installed_is_named_by_its_hash() -> None:
    for file in FILES:
        assert loose_installs(file.read_text()) == []


@pytest.mark.parametrize(
    "command",
    [
        "pip install semel",
        "pip install --requirement /opt/frontend.lock",
        "pip install --require-hashes --only-binary :all: --requirement a --extra-index-url https://example.org",
    ],
)
def test_an_install_without_a_hash_is_found(command: str) -> None:
    assert loose_installs(f"RUN python -m {command}\n") == [command]


def is_pinned_base(text: str) -> bool:
    """Whether all stages are built on one image, named by its digest unless another is given."""
    (base,) = re.findall(r"^ARG BASE=(.+)$", text, re.MULTILINE)
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    return set(stages) == {"${BASE}"} and bool(re.fullmatch(r"python:3\.12-slim-trixie@sha256:[0-9a-f]{64}", base))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_base_image_is_named_by_its_digest(file: Path) -> None:
    text = file.read_text()
    assert is_pinned_base(text)
    assert not is_pinned_base(re.sub(r"@sha256:[0-9a-f]+", "", text))
    assert not is_pinned_base(text.replace("FROM ${BASE} AS", "FROM python:3.12 AS"))


def test_what_the_licence_needs_is_copied_into_every_image() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    for file in FILES:
        (copied,) = re.findall(r"^COPY (pyproject.toml .+) \./$", file.read_text(), re.MULTILINE)
        assert {*needed, "README.md"} <= set(copied.split())


def test_all_of_them_run_as_one_user_since_shared_memory_is_lent_to_no_other() -> None:
    assert len({re.findall(r"^USER (\d+:\d+)$", file.read_text(), re.MULTILINE)[0] for file in FILES}) == 1


def test_a_service_is_built_with_the_lock_of_its_image(services: dict[str, Any]) -> None:
    built = {name: (service["image"], service["build"]["args"]["LOCK"]) for name, service in services.items()}
    frontend = ("semel-${SEMEL_FRONTEND:-frontend}", "${SEMEL_FRONTEND:-frontend}")
    assert built == {"worker": ("semel-worker", "worker"), "frontend-1": frontend, "frontend-2": frontend}


@pytest.mark.parametrize("name", ["worker", "frontend-1", "frontend-2"])
def test_a_service_is_started_with_flags_that_there_are(services: dict[str, Any], name: str) -> None:
    command = name.partition("-")[0]
    (entrypoint,) = re.findall(
        r"^ENTRYPOINT (.+)$", (CONTAINERS / f"{command}.Containerfile").read_text(), re.MULTILINE
    )
    assert entrypoint == f'["semel", "{command}"]'
    parsed = root_command().commands[command].make_context(command, [*services[name]["command"]])
    assert parsed.params["model"] == "/model"
    assert all(flag.startswith("--served-model-name=") for flag in parsed.args), "these go to vLLM's own parser"


def test_a_service_has_more_time_to_end_than_it_takes_for_draining(services: dict[str, Any]) -> None:
    commands = root_command().commands
    for name, service in services.items():
        flags = {flag.name: flag.default for flag in commands[name.partition("-")[0]].flags}
        drains = flags["drain-delay-s"] + flags["drain-s"]
        assert int(service["stop_grace_period"].removesuffix("s")) > drains


def weaknesses(service: dict[str, Any]) -> list[str]:
    """What a service could do that it need not."""
    wanted = {
        "its image cannot be written to": service.get("read_only") is True,
        "no capabilities": service.get("cap_drop") == ["ALL"] and "cap_add" not in service,
        "no more privileges": service.get("security_opt") == ["no-new-privileges:true"],
        "not privileged": not service.get("privileged"),
        "limits of memory and processes": bool(service.get("mem_limit")) and int(service.get("pids_limit", 0)) > 0,
        "no swap beyond its memory": service.get("memswap_limit") == service.get("mem_limit"),
        "sizes of what is in memory": all("size=" in one for one in service.get("tmpfs", ["none"])),
        "its own namespaces": not {"pid", "ipc"} & service.keys() and "network_mode" not in service,
        "volumes that it only reads, but for sockets": all(
            one.endswith(":ro") for one in service["volumes"] if not one.startswith("sockets:")
        ),
        "ports on this machine only": all(one.startswith("127.0.0.1:") for one in service.get("ports", ())),
    }
    return [name for name, is_so in wanted.items() if not is_so]


def test_a_worker_reaches_nobody_over_a_network(services: dict[str, Any]) -> None:
    """Control: a frontend, which serves at a port of the machine, is in the usual network."""
    networks = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["networks"]
    closed = [name for name, one in networks.items() if one == {"internal": True}]
    assert services["worker"]["networks"] == closed
    assert "ports" not in services["worker"]
    assert "networks" not in services["frontend-1"]


def test_no_service_can_do_more_than_it_needs(services: dict[str, Any]) -> None:
    assert {name: weaknesses(service) for name, service in services.items()} == {name: [] for name in services}


@pytest.mark.parametrize(
    "change",
    [
        {"read_only": False},
        {"cap_add": ["NET_ADMIN"]},
        {"cap_drop": []},
        {"security_opt": []},
        {"privileged": True},
        {"mem_limit": None},
        {"pids_limit": -1},
        {"memswap_limit": -1},
        {"tmpfs": ["/tmp"]},
        {"ipc": "host"},
        {"network_mode": "host"},
        {"volumes": ["/:/host"]},
        {"ports": ["8001:8000"]},
    ],
    ids=str,
)
def test_mutant_a_service_that_can_do_more_is_found(services: dict[str, Any], change: dict[str, Any]) -> None:
    assert weaknesses(services["frontend-1"] | change)
