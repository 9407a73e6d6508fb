"""Where a worker may listen, and who may connect there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from semel.errors import ConfigError
from semel.wire.proof import curve_secret
from semel.wire.zmq.address import admit, public_key, secure_client, secure_server, transport_keys
from tests.wire.examples import KEY, OTHER_KEY

WORKER = transport_keys(KEY, "worker")
GENERATION = WORKER.newest
DOMAIN = b"semel." + KEY.id.encode()


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.linger = 0
        yield made


def test_the_directory_of_a_socket_is_made_private_S17(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    secure_server(router, f"ipc://{tmp_path}/new/w", GENERATION)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_frontend_makes_no_directory_for_a_worker_s_socket(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    """One that outlived `semel serve` by a moment made the directory of the run again, and left it."""
    secure_client(router, f"ipc://{tmp_path}/gone/w", GENERATION)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("secure", [secure_server, secure_client])
def test_a_directory_that_others_can_enter_is_refused_on_both_ends_S17(
    secure: type, router: zmq.Socket[bytes], tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=f"chmod 700 {tmp_path}"):
        secure(router, f"ipc://{tmp_path}/w", GENERATION)


@pytest.mark.parametrize("secure", [secure_server, secure_client])
def test_a_link_to_a_directory_is_refused_S17(secure: type, router: zmq.Socket[bytes], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a directory of this user"):
        secure(router, f"ipc://{tmp_path}/link/w", GENERATION)


def test_the_directory_of_another_user_is_refused_S17(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    foreign = Path("/proc")
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 65534, 65534)
    with pytest.raises(ConfigError, match="not a directory of this user"):
        secure_server(router, f"ipc://{foreign}/w", GENERATION)


@pytest.mark.parametrize(
    "address", ["inproc://w", "ws://127.0.0.1:1", "127.0.0.1:1", "ipc://@abstract", "ipc://rel", ""]
)
def test_any_other_address_is_refused_with_what_would_do(router: zmq.Socket[bytes], address: str) -> None:
    for secure in (secure_server, secure_client):
        with pytest.raises(ConfigError, match=r"ipc:///DIRECTORY/NAME|absolute path"):
            secure(router, address, GENERATION)


def test_a_path_that_no_unix_socket_can_have_is_refused(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        secure_server(router, f"ipc://{tmp_path}/{'x' * 107}", GENERATION)


def test_the_socket_of_a_live_worker_is_not_taken_over(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    path = str(tmp_path / "w")
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(path)
        live.listen()
        with pytest.raises(ConfigError, match="another worker listens"):
            secure_server(router, f"ipc://{path}", GENERATION)
    secure_server(router, f"ipc://{path}", GENERATION)  # the file of a dead one is no obstacle


def test_only_the_frontends_own_key_is_let_in_over_tcp_S17() -> None:
    def status(mechanism: bytes, *credentials: bytes, domain: bytes = DOMAIN) -> bytes:
        return admit([b"1.0", b"1", domain, b"127.0.0.1", b"", mechanism, *credentials], WORKER)[2]

    assert status(b"CURVE", public_key(curve_secret(KEY, "frontend"))) == b"200"
    assert status(b"CURVE", public_key(curve_secret(KEY, "worker"))) == b"400"
    assert status(b"CURVE", public_key(curve_secret(OTHER_KEY, "frontend"))) == b"400"
    assert status(b"CURVE", bytes(32)) == b"400"
    assert status(b"PLAIN", b"user", b"password") == b"400"
    assert status(b"NULL") == b"400"
    ours = public_key(curve_secret(KEY, "frontend"))
    assert status(b"CURVE", ours, domain=b"semel." + OTHER_KEY.id.encode()) == b"400"
    assert status(b"CURVE", ours, domain=b"") == b"400"
