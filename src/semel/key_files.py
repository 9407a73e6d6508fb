"""The keys that a process runs with: of one fleet key, or of the folder of its role; and how rotated ones reach it.

The folder of a role has what that role needs and nothing else (`semel key make`)::

    frontend/identity.key       digests, tags and seals
    frontend/transport.keys     a frontend's own secrets, the workers' public keys
    worker/store.key            names and seals in the embedding store
    worker/transport.keys       a worker's own secrets, the frontends' public keys
    worker/admin.key            what the admin address asks for
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from semel.core import Key
from semel.errors import ConfigError
from semel.settings.secrets import read_key, read_transport_keys
from semel.settings.worker import WorkerSettings
from semel.wire.keys import TransportKeys
from semel.wire.proof import Role
from semel.wire.zmq.address import transport_keys

__all__ = [
    "ADMIN_FILE",
    "IDENTITY_FILE",
    "STORE_FILE",
    "TRANSPORT_FILE",
    "ProcessKeys",
    "TransportSource",
    "admin_key_file",
    "process_keys",
]

IDENTITY_FILE: Final = "identity.key"
STORE_FILE: Final = "store.key"
TRANSPORT_FILE: Final = "transport.keys"
ADMIN_FILE: Final = "admin.key"


@dataclass(slots=True)
class TransportSource:
    """Transport keys, and the file that they are read from again when it changes; None if they never change."""

    keys: TransportKeys
    file: Path | None = None

    def load(self) -> TransportKeys:
        """Return the keys that are in the file now."""
        assert self.file is not None
        return read_transport_keys(self.file, self.keys.role)


@dataclass(frozen=True, slots=True)
class ProcessKeys:
    """The keys of one process."""

    hashing: Key
    """Of a frontend what digests, tags and seals are made with; of a worker, names and seals in the embedding store."""

    transport: TransportSource

    @classmethod
    def of_fleet_key(cls, key: Key, role: Role) -> Self:
        """Derive everything from one key, which never changes."""
        return cls(key, TransportSource(transport_keys(key, role)))


def admin_key_file(settings: WorkerSettings) -> Path | None:
    """Find the key file of a worker's admin address: the one that is named, or that of its folder, if there is one."""
    named, folder = settings.admin.admin_key_file, settings.key_dir
    if named is None and folder is not None and (folder / ADMIN_FILE).exists():
        return folder / ADMIN_FILE
    return named


def process_keys(key_file: Path | None, key_dir: Path | None, role: Role) -> ProcessKeys:
    """Read the keys of a process of this role: of one fleet key, or of its folder."""
    if key_file is not None and key_dir is not None:
        raise ConfigError("--fleet-key-file and --key-dir are two ways to give keys: keep one of them")
    if key_dir is not None:
        if not (key_dir / TRANSPORT_FILE).exists() and (key_dir / role / TRANSPORT_FILE).exists():
            raise ConfigError(f"{key_dir} has the keys of both roles; give a {role} its own, {key_dir / role}")
        path, hashing = key_dir / TRANSPORT_FILE, IDENTITY_FILE if role == "frontend" else STORE_FILE
        return ProcessKeys(read_key(key_dir / hashing), TransportSource(read_transport_keys(path, role), path))
    if key_file is None:
        raise ConfigError(
            f"there are no keys: give --key-dir DIR/{role}, which `semel key make DIR` makes, or --fleet-key-file "
            "FILE, which `semel key fleet FILE` makes"
        )
    return ProcessKeys.of_fleet_key(read_key(key_file), role)
