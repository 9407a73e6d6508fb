"""Flags of the embedding store: what fits together, and messages that say what to do and never show a password."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from semel.cli.checks.start import serve_findings, worker_findings
from semel.cli.doctor import check_embedding_store
from semel.core.flag import GIB, fill
from semel.embeddings.address import StoreAddress
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.errors import ConfigError
from semel.settings.secrets import embedding_store, embedding_store_nodes
from semel.settings.serve import ServeSettings
from semel.settings.worker import EncoderSettings, WorkerSettings
from tests.embeddings.redis import running_redis

SECRET = "hunter2"


def addresses(text: str, **others: object) -> tuple[StoreAddress, ...]:
    return fill(EmbeddingStoreSettings, {"embedding_store": text, **others}).addresses()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("valkey://127.0.0.1", StoreAddress("127.0.0.1", 6379)),
        ("redis://localhost:7000/", StoreAddress("localhost", 7000)),
        ("redis://[::1]:7000/0", StoreAddress("::1", 7000)),
        ("valkeys://store.example:6380", StoreAddress("store.example", 6380, is_encrypted=True)),
        ("rediss://store.example", StoreAddress("store.example", 6379, is_encrypted=True)),
        ("unix:///run/valkey.sock", StoreAddress(path="/run/valkey.sock")),
    ],
)
def test_addresses_are_read(text: str, expected: StoreAddress) -> None:
    assert addresses(text) == (expected,)


def test_several_nodes_are_separated_by_commas_and_have_names_for_logs() -> None:
    found = addresses("valkeys://a:1, valkeys://[2001:db8::1]:2,unix:///s")
    assert [address.name for address in found] == ["a:1", "[2001:db8::1]:2", "/s"]
    assert fill(EmbeddingStoreSettings, {}).addresses() == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"valkeys://user:{SECRET}@host", "--embedding-store-password-file"),
        (f"valkeys://:{SECRET}@host", "--embedding-store-password-file"),
        (f"http://user:{SECRET}@host", "--embedding-store-password-file"),
        (f"{SECRET}@host", "not valid"),
        ("host:6379", "not valid"),
        ("", "not valid"),
        ("valkeys://", "no address"),
        ("valkeys://host:0", "no address"),
        ("valkeys://host:port", "not valid"),
        ("valkeys://host:70000", "not valid"),
        ("valkeys://host/3", "names a database"),
        ("valkeys://host?x=1", "options"),
        ("unix://host/path", "no path"),
        ("unix:///", "no path"),
        ("valkeys://a,valkeys://a:6379", "twice"),
        ("valkey://store.example", "--embedding-store-plain"),
        ("valkey://10.0.0.1", "--embedding-store-plain"),
        ("valkeys://user@host", "--embedding-store-password-file"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do_and_without_a_password(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        addresses(text)
    assert SECRET not in str(raised.value)
    assert "; " in str(raised.value), "what to do follows a semicolon"


def test_plain_text_leaves_the_machine_only_if_the_operator_says_so() -> None:
    (address,) = addresses("valkey://10.0.0.1", embedding_store_plain=True)
    assert not address.is_encrypted


def test_a_store_needs_a_host_tier_that_is_larger_than_its_staging() -> None:
    def check(tier_gb: float, staging_mb: int = 256) -> None:
        values = {"embedding_store": "unix:///s", "embedding_tier_gb": tier_gb, "embedding_staging_mb": staging_mb}
        embedding_store(fill(EncoderSettings, values))

    with pytest.raises(ConfigError, match="add --embedding-tier-gb"):
        check(0)
    with pytest.raises(ConfigError, match="lower the former"):
        check(0.25)
    check(0.26)
    assert embedding_store(EncoderSettings()) is None
    assert EncoderSettings(embedding_tier_bytes=GIB).store.staging_bytes == 256 << 20


def test_the_password_comes_from_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "password"
    settings = EmbeddingStoreSettings(locations="valkeys://user@host", password_file=path)
    with pytest.raises(ConfigError, match="write the embedding store's password into it"):
        embedding_store_nodes(settings)
    path.write_text(SECRET + "\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as raised:
        embedding_store_nodes(settings)
    assert SECRET not in str(raised.value)
    path.chmod(0o600)
    assert embedding_store_nodes(settings) is not None
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        embedding_store_nodes(settings)


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    settings = EmbeddingStoreSettings(locations="valkeys://host", ca=path)
    with pytest.raises(ConfigError, match="must be a PEM file"):
        embedding_store_nodes(settings)
    path.write_text("no certificate")
    with pytest.raises(ConfigError, match="must be a PEM file"):
        embedding_store_nodes(settings)


@pytest.mark.parametrize("command", ["worker", "serve"])
def test_a_command_refuses_a_store_without_a_host_tier_before_it_starts(tmp_path: Path, command: str) -> None:
    values: dict[str, object] = {"model": str(tmp_path), "embedding_store": "unix:///s"}
    if command == "serve":
        findings = list(serve_findings(fill(ServeSettings, values), ()))
    else:
        values |= {"listen": f"ipc://{tmp_path}/worker", "fleet_key_file": tmp_path / "key"}
        findings = list(worker_findings(fill(WorkerSettings, values), ()))
    (found,) = [one for one in findings if one.what == "embedding store"]
    assert (found.verdict, found.remedy) == ("problem", "add --embedding-tier-gb, for example 4")


def test_the_doctor_asks_every_node(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        settings = EmbeddingStoreSettings(locations=f"{redis.url},unix://{tmp_path}/none.sock")
        up, down = check_embedding_store(settings)
    assert (up.verdict, up.detail) == ("ok", f"{redis.address.name} answers")
    assert down.verdict == "problem"
    assert "cannot be reached" in down.detail
    assert down.remedy
    assert list(check_embedding_store(EmbeddingStoreSettings())) == []
    (refused,) = check_embedding_store(EmbeddingStoreSettings(locations="valkey://10.0.0.1"))
    assert refused.verdict == "problem"
