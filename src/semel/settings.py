"""Settings that come from outside the code: files, flags, the environment. The only place that reads them."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from semel.core import Key, Keyring
from semel.errors import ConfigError
from semel.telemetry.tracing import Collector

__all__ = [
    "SERVICE_NAME",
    "TRACES_PROTOCOL",
    "create_key",
    "default_folder",
    "default_variable",
    "read_admin_key",
    "read_api_keys",
    "read_key",
    "trace_collector",
]

SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
TRACES_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"

_DEFAULT_TENANT: Final = "default"
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def trace_collector(endpoint: str | None) -> Collector | None:
    """Where spans go, and how: over HTTP unless the environment says otherwise, under OpenTelemetry's own names."""
    if endpoint is None:
        return None
    protocol = os.environ.get(TRACES_PROTOCOL) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return Collector.of(endpoint, protocol)


@contextmanager
def default_variable(name: str, value: str) -> Iterator[None]:
    """Let a variable of the environment have a value for a while, unless it has one; children are told of it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def default_folder(name: str) -> Iterator[None]:
    """Let a variable of the environment name a folder for a while, unless it has a value; children are told of it."""
    if name in os.environ:
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="semel-", ignore_cleanup_errors=True) as folder,
        default_variable(name, folder),
    ):
        yield


def create_key(path: Path) -> Key:
    """Make a fleet key and store it where only its owner can read it; a file that is there is never replaced."""
    key = Key(secrets.token_bytes(32))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    except FileExistsError:
        raise ConfigError(f"{path} exists; a fleet key is never overwritten: name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(key.secret.hex() + "\n")
    return key


def read_key(path: Path) -> Key:
    """A fleet key from a key file: 64 hexadecimal digits, readable by its owner alone."""
    text = _read_secret(path, remedy=f"`semel key {path}` makes one")
    try:
        return Key(bytes.fromhex(text))
    except ValueError:
        raise ConfigError(f"{path} is not a key file: it needs 64 hexadecimal digits") from None


def read_admin_key(path: Path) -> str:
    """The key of a worker's admin address: any printable text, readable by its owner alone."""
    return _read_secret(path, remedy="write at least 16 random characters into it")


def read_api_keys(path: Path | None, flag_keys: Sequence[str] = ()) -> Keyring:
    """The keys of clients: those given, of one tenant, and those of a file that only its owner can read."""
    keys = [(_DEFAULT_TENANT, key) for key in flag_keys]
    if path is not None:
        keys += _tenant_keys(path)
    try:
        return Keyring(keys)
    except ValueError as error:
        raise ConfigError(f"API keys: {error}") from None


def _tenant_keys(path: Path) -> list[tuple[str, str]]:
    remedy = "write a line `TENANT KEY` into it for each of them"
    keys = []
    for number, line in enumerate(_read_secret(path, remedy=remedy).splitlines(), 1):
        if not (fields := line.partition("#")[0].split()):
            continue
        if len(fields) != 2 or not _TENANT.fullmatch(fields[0]):
            raise ConfigError(
                f"{path}, line {number}: must be a tenant of letters, digits, '.', '_' and '-', and its key"
            )
        keys.append((fields[0], fields[1]))
    if not keys:
        raise ConfigError(f"{path} has no keys; {remedy}")
    return keys


def _read_secret(path: Path, *, remedy: str) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key file {path}; {remedy}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} can be read by others; `chmod 600 {path}`")
    return text
