"""Secrets from files and the environment: the keys of a fleet and of clients, and the password of a store."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semel.core import Key, Keyring
from semel.core.keyring import MIN_KEY_CHARS, hash_key, is_hashed, is_sendable
from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.embeddings.nodes import Nodes
    from semel.embeddings.settings import EmbeddingStoreSettings
    from semel.settings.frontend import ApiKeySettings
    from semel.settings.worker import EncoderSettings
    from semel.wire.keys import TransportKeys
    from semel.wire.proof import Role

__all__ = [
    "api_key_warnings",
    "create_key",
    "embedding_store",
    "embedding_store_nodes",
    "has_api_keys",
    "is_tenant",
    "read_admin_key",
    "read_api_keys",
    "read_key",
    "read_transport_keys",
    "tenant_key",
]

_DEFAULT_TENANT: Final = "default"
_VLLM_KEY: Final = "VLLM_API_KEY"
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
    """Read a fleet key from a key file: 64 hexadecimal digits, which nobody else can read."""
    text = _read_secret(path, remedy=f"`semel key fleet {path}` makes one")
    try:
        return Key(bytes.fromhex(text))
    except ValueError:
        raise ConfigError(f"{path} is not a key file: it needs 64 hexadecimal digits") from None


def read_transport_keys(path: Path, role: Role) -> TransportKeys:
    """Read one role's transport keys from a file of `semel key make`, which nobody else can read."""
    from semel.wire.zmq.address import transport_keys
    from semel.wire.zmq.key_pairs import decode_keys

    text = _read_secret(path, remedy="`semel key make DIR` makes one")
    try:
        keys = decode_keys(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}; `semel key make DIR` makes one") from None
    return transport_keys(keys, role)


def read_admin_key(path: Path) -> str:
    """Read the key of a worker's admin address: any printable text, which nobody else can read."""
    return _read_secret(path, remedy="write at least 16 random characters into it")


def embedding_store_nodes(store: EmbeddingStoreSettings) -> Nodes | None:
    """Return the nodes of the embedding store; None if the settings name none. Nothing is connected yet."""
    from semel.embeddings.nodes import open_nodes

    if store.locations is None:
        return None
    path = store.password_file
    password = None if path is None else _read_secret(path, remedy="write the embedding store's password into it")
    if password == "":
        raise ConfigError(f"{path} is empty; write the embedding store's password into it")
    return open_nodes(store, password)


def embedding_store(encoder: EncoderSettings) -> Nodes | None:
    """Return the same for a worker, whose host tier must have room for what comes from the store."""
    encoder.store.check_tier(encoder.embedding_tier_bytes)
    return embedding_store_nodes(encoder.store)


def read_api_keys(settings: ApiKeySettings) -> Keyring:
    """Read the keys of clients: those given, of one tenant, and those of a file that nobody else can read.

    A key of a flag or of the environment may be short, as with vLLM; `api_key_warnings` says so.
    """
    keys = []
    for key in _given_keys(settings):
        if not is_sendable(key):
            raise ConfigError(
                "API keys: a key of --api-key or VLLM_API_KEY is empty, or has a blank or a character that is not "
                "printable ASCII; no client could send it"
            )
        keys.append((_DEFAULT_TENANT, key if is_hashed(key) else hash_key(key)))
    if settings.api_keys_file is not None:
        keys += _tenant_keys(settings.api_keys_file)
    try:
        return Keyring(keys)
    except ValueError as error:
        raise ConfigError(f"API keys: {error}") from None


def api_key_warnings(settings: ApiKeySettings) -> Iterator[str]:
    """Warn of keys that are easy to guess, and of one that is not used. No key is shown."""
    short = [len(key) for key in _given_keys(settings) if len(key) < MIN_KEY_CHARS]
    if short:
        yield (
            f"an API key has {min(short)} characters: use {MIN_KEY_CHARS} or more random ones, which cannot be guessed"
        )
    if os.environ.get(_VLLM_KEY) and settings.api_keys_file is not None and not settings.api_keys:
        yield f"{_VLLM_KEY} is set and not used: --api-keys-file has the keys"


def has_api_keys(settings: ApiKeySettings) -> bool:
    """Return whether clients need a key."""
    return settings.api_keys_file is not None or bool(_given_keys(settings))


def _given_keys(settings: ApiKeySettings) -> tuple[str, ...]:
    """Return the keys of flags; without any, and without a file of keys, that of vLLM's variable."""
    variable = os.environ.get(_VLLM_KEY)
    if settings.api_keys or settings.api_keys_file is not None or not variable:
        return settings.api_keys
    return (variable,)


def is_tenant(text: str) -> bool:
    """Return whether a text can be the name of a tenant."""
    return _TENANT.fullmatch(text) is not None


def tenant_key(line: str) -> tuple[str, str] | None:
    """Return the tenant of a line of an API keys file, and its key or the hash of it; None if the line has none."""
    if not (fields := line.partition("#")[0].split()):
        return None
    if len(fields) != 2 or not is_tenant(fields[0]):
        raise ValueError("must be a tenant of letters, digits, '.', '_' and '-', and its key")
    return fields[0], fields[1]


def _tenant_keys(path: Path) -> list[tuple[str, str]]:
    remedy = "write a line `TENANT KEY` into it for each of them"
    keys = []
    for number, line in enumerate(_read_secret(path, remedy=remedy).splitlines(), 1):
        try:
            found = tenant_key(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if found is not None:
            keys.append(found)
    if not keys:
        raise ConfigError(f"{path} has no keys; {remedy}")
    return keys


def _read_secret(path: Path, *, remedy: str) -> str:
    """Read the text of a key file; the `remedy` says how to make one that is not there."""
    try:
        with path.open(encoding="ascii") as file:
            status = os.fstat(file.fileno())
            text = file.read().strip()
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}; {remedy}") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the key file {path}: {error.strerror or 'the system gives no reason'}"
        ) from error
    except UnicodeDecodeError as error:
        # Not the error's own words: they have a byte of the secret.
        raise ConfigError(
            f"cannot read the key file {path}: it has other characters than ASCII, the first at byte {error.start:,}"
        ) from None
    if not _is_private(status):
        raise ConfigError(f"{path} can be read by others; `chmod 600 {path}`, or 0440 with root as its owner")
    return text


def _is_private(status: os.stat_result) -> bool:
    """Accept a file of its owner alone, or root's and readable by a group of ours: so Kubernetes mounts secrets."""
    if not (others := status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)):
        return True
    is_ours = status.st_gid in {os.getegid(), *os.getgroups()}
    return others == stat.S_IRGRP and status.st_uid == 0 and is_ours
