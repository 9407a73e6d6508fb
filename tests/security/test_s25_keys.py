"""S25: keys that are revoked while the server runs, and floods of wrong ones."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from semel.compose import reloading
from semel.compose.reloading import ReloadedFiles, reloaded_files
from semel.core import Keyring
from semel.core.keyring import hash_key
from semel.errors import ConfigError
from semel.frontend.limits import RefusalLimits
from semel.frontend.middleware.authentication import Authentication
from semel.frontend.middleware.refusal_rate import AddressThrottle
from semel.lab.bench.ports import free_port
from semel.settings.frontend import ApiKeySettings, ServingSettings
from semel.settings.secrets import read_api_keys
from semel.telemetry import Meter
from semel.web.server import HttpServer
from semel.web.tls import TlsSettings
from tests.embeddings.certificates import Authority
from tests.serve.served import sum_of

OLD, NEW = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef"
WITHIN_S = 30.0


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """As an operator does: a new file is moved to its place."""
    written = path.with_suffix(".new")
    written.write_text(text)
    written.chmod(mode)
    written.replace(path)


def rewrite(path: Path, text: str) -> None:
    """In place, with the same size and the same time."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


async def inside(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["state"]["tenant"].encode()})


class Served:
    """The guard of a frontend over a socket, with its keys and certificate in files that are looked after."""

    def __init__(self, serving: ServingSettings) -> None:
        keys = read_api_keys(serving.keys)
        self.meter = Meter()
        self.port = free_port()
        self.server = HttpServer(Authentication(inside, keys), "127.0.0.1", self.port, tls=serving.tls.context())
        self.files = list(reloaded_files(serving, keys, self.server, self.meter))

    async def status(self, key: str) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), WITHIN_S)
        writer.close()
        return int(answer.split(b" ")[1])

    async def until_status(self, key: str, status: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.status(key) != status:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def metric(self, name: str, labels: str = "") -> float:
        return sum_of(self.meter.render().decode(), name, labels)


@asynccontextmanager
async def running(serving: ServingSettings) -> AsyncIterator[Served]:
    served = Served(serving)
    for one in served.files:  # the first look counts as no change
        await one.refresh()
    tasks = [asyncio.create_task(one.run()) for one in served.files]
    async with served.server.running():
        try:
            yield served
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    replace_file(path, f"acme {OLD}\n")
    return path


def settings_of(path: Path) -> ServingSettings:
    return ServingSettings(keys=ApiKeySettings(api_keys_file=path))


async def test_a_revoked_key_is_refused_and_a_new_one_taken_without_a_restart(keys_file: Path) -> None:
    async with running(settings_of(keys_file)) as served:
        assert [await served.status(OLD), await served.status(NEW)] == [200, 401]
        replace_file(keys_file, f"acme {hash_key(NEW)}\n")
        await served.until_status(OLD, 401)
        assert await served.status(NEW) == 200
        assert await served.status(hash_key(NEW)) == 401, "the hash is no key"
        assert served.metric("semel_file_reloads_total", 'file="api_keys",outcome="ok"') == 1


BROKEN: dict[str, tuple[str, int]] = {
    "empty": ("", 0o600),
    "a line that is none": (f"acme {NEW}\nnonsense\n", 0o600),
    "a key that is too short": ("acme short\n", 0o600),
    "a hash that is cut off": (f"acme {hash_key(NEW)[:-1]}\n", 0o600),
    "readable by others": (f"acme {NEW}\n", 0o644),
}


@pytest.mark.parametrize(("text", "mode"), BROKEN.values(), ids=BROKEN)
async def test_a_broken_file_keeps_the_old_keys_and_log_and_metric_say_so(
    keys_file: Path, caplog: pytest.LogCaptureFixture, text: str, mode: int
) -> None:
    caplog.set_level(logging.INFO)
    served = Served(settings_of(keys_file))
    (files,) = served.files
    await files.refresh()
    assert served.metric("semel_file_stale") == 0
    replace_file(keys_file, text, mode)
    await check_stale(served, str(keys_file) if mode == 0o644 else "API keys", caplog)
    replace_file(keys_file, f"acme {OLD}\nacme {NEW}\n")
    await files.refresh()
    assert served.metric("semel_file_stale") == 0
    served.server._socket.close()


async def check_stale(served: Served, words: str, caplog: pytest.LogCaptureFixture) -> None:
    (files,) = served.files
    async with served.server.running():
        for _ in range(3):  # said once, not with each look
            await files.refresh()
        assert [await served.status(OLD), await served.status(NEW)] == [200, 401]
    assert served.metric("semel_file_stale", 'file="api_keys"') == 1
    assert served.metric("semel_file_reloads_total", 'outcome="failed"') == 1
    (line,) = [one.getMessage() for one in caplog.records if "stays in use" in one.getMessage()]
    assert words in line or "keys" in line
    assert OLD not in caplog.text
    assert NEW not in caplog.text


async def test_a_file_that_is_gone_keeps_the_old_keys_too(keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(settings_of(keys_file))
    await served.files[0].refresh()
    await asyncio.to_thread(keys_file.unlink)
    await check_stale(served, "cannot read", caplog)


def test_a_keyring_is_never_left_without_keys() -> None:
    """Without keys everybody is let in."""
    ring = Keyring([("acme", OLD)])
    with pytest.raises(ValueError, match="no keys"):
        ring.replace(Keyring())
    assert ring.tenant(OLD) == "acme"


async def test_a_change_before_the_first_look_is_not_missed(keys_file: Path) -> None:
    served = Served(settings_of(keys_file))
    replace_file(keys_file, f"acme {NEW}\n")
    await served.files[0].refresh()
    async with served.server.running():
        assert [await served.status(OLD), await served.status(NEW)] == [401, 200]


async def test_a_file_written_in_place_with_the_same_size_and_time_is_noticed(keys_file: Path) -> None:
    served = Served(settings_of(keys_file))
    await served.files[0].refresh()
    rewrite(keys_file, f"acme {NEW}\n")
    await served.files[0].refresh()
    async with served.server.running():
        assert [await served.status(OLD), await served.status(NEW)] == [401, 200]


class Once:
    """Fails the first time, as a process that is out of descriptors does."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.uses: list[str] = []

    def load(self) -> str:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return "keys"


class Hasty(ReloadedFiles[str]):
    """Mutant: it takes what it has looked at for what is in use."""

    async def refresh(self) -> None:
        try:
            await super().refresh()
        finally:
            self._used, self._failure = await asyncio.to_thread(reloading._fingerprint, self._paths), ""


@pytest.mark.parametrize(
    "error", [ConfigError("cannot read it"), OSError(24, "too many open files")], ids=["ours", "any"]
)
@pytest.mark.parametrize("kind", [ReloadedFiles, Hasty], ids=["shipped", "mutant"])
async def test_a_file_that_could_not_be_read_once_is_read_again(
    keys_file: Path, kind: type[ReloadedFiles[str]], error: Exception
) -> None:
    """Else a revoked key would be accepted until somebody edits the file."""
    once, meter = Once(error), Meter()
    files = kind("api_keys", [keys_file], once.load, once.uses.append, meter)
    for uses in (0, 1, 1):
        await files.refresh()
        assert len(once.uses) == (uses if kind is ReloadedFiles else 0)
        assert sum_of(meter.render().decode(), "semel_file_stale") == (kind is ReloadedFiles and uses == 0)


async def test_certificates_are_read_again_and_a_broken_one_is_not(tmp_path: Path, keys_file: Path) -> None:
    first, second = Authority.create(tmp_path / "1"), Authority.create(tmp_path / "2")
    tls = TlsSettings(first.certificate, first.private_key)
    served = Served(ServingSettings(keys=ApiKeySettings(api_keys_file=keys_file), tls=tls))
    _, files = served.files
    async with served.server.running():
        for content, expected, is_stale in (
            (second.certificate.read_bytes(), first, 1),  # its key is still the other one's
            (None, second, 0),
            (b"no certificate", second, 1),
        ):
            if content is None:
                first.private_key.write_bytes(second.private_key.read_bytes())
            else:
                first.certificate.write_bytes(content)
            await files.refresh()
            _, writer = await asyncio.open_connection(
                "127.0.0.1", served.port, ssl=expected.client_context(), server_hostname="localhost"
            )
            writer.transport.abort()
            assert served.metric("semel_file_stale", 'file="certificate"') == is_stale
    assert served.metric("semel_file_reloads_total", 'file="certificate",outcome="failed"') == 2


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


LIMITS = RefusalLimits(per_s=10.0, burst=5, max_wait_s=5.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), max_size=200))
def test_a_throttle_holds_so_many_addresses_and_none_slows_another(steps: Sequence[tuple[int, float]]) -> None:
    clock = Clock()
    throttle = AddressThrottle(LIMITS, clock, max_addresses=8)
    alone: dict[int, AddressThrottle] = {}
    recent: list[int] = []
    for address, pause_s in steps:
        clock.now += pause_s
        if address not in recent[-8:]:
            alone[address] = AddressThrottle(LIMITS, clock)
        recent = [one for one in recent if one != address] + [address]
        assert throttle.wait_s(str(address)) == alone[address].wait_s("it alone")
        assert len(throttle) <= 8


async def waits_of(guard: type[Authentication], keys: Sequence[str], address: str = "203.0.113.7") -> list[float]:
    """How long each of these requests from one address is made to wait."""
    throttle, waits = AddressThrottle(LIMITS, Clock()), [0.0]
    counted: list[str] = []

    def wait_s(one: str) -> float:
        assert one == address
        waits[-1] = throttle.wait_s(one)
        return 0.0  # it is noted, not slept

    app = guard(inside, Keyring([("acme", OLD)]), counted.append, wait_s)
    found, statuses = [], []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    for key in keys:
        waits.append(0.0)
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope: dict[str, Any] = {"type": "http", "path": "/v1/models", "headers": headers, "client": (address, 1)}
        await app(scope, None, send)  # type: ignore[arg-type]
        found.append(waits[-1])
    assert statuses == [200 if key == OLD else 401 for key in keys]
    assert counted == ["invalid_api_key"] * statuses.count(401)
    return found


FLOOD = [NEW] * 20 + [OLD] + [NEW] * 20 + [OLD]


async def check_honest_client(guard: type[Authentication]) -> None:
    waits = await waits_of(guard, FLOOD)
    assert [wait for wait, key in zip(waits, FLOOD, strict=True) if key == OLD] == [0.0, 0.0]
    assert waits[:5] == pytest.approx([0.0] * 5)
    assert waits[19] > 1.0, "the flood itself is delayed"


async def test_a_valid_key_never_waits_however_many_wrong_ones_come_from_its_address() -> None:
    await check_honest_client(Authentication)


class WaitsFirst(Authentication):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._wait_s(scope["client"][0])
        await super().__call__(scope, receive, send)


class NeverWaits(Authentication):
    def __init__(self, app: Any, keys: Keyring, count: Any, wait_s: Any) -> None:  # noqa: ARG002
        super().__init__(app, keys, count)


@pytest.mark.parametrize("mutant", [WaitsFirst, NeverWaits])
async def test_mutant_a_throttle_before_the_key_is_checked_lets_the_honest_wait(mutant: type[Authentication]) -> None:
    with pytest.raises(AssertionError):
        await check_honest_client(mutant)
