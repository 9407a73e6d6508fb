"""`semel key`: makes, shows and rotates the keys of a fleet, and adds and revokes those of its clients."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console

from semel.cli.flags import Call, HelpGroup, command
from semel.core.flag import REQUIRED, flag, same_flag
from semel.core.keyring import MIN_KEY_CHARS, Keyring, hash_key, is_key
from semel.errors import ConfigError
from semel.settings.frontend import ApiKeySettings
from semel.settings.secrets import (
    create_key,
    is_tenant,
    read_admin_key,
    read_api_keys,
    read_key,
    read_transport_keys,
    tenant_key,
)

if TYPE_CHECKING:
    from semel.wire.proof import Role
    from semel.wire.zmq.key_pairs import KeyPairs

__all__ = [
    "ApiKeyAdditionSettings",
    "ApiKeyRemovalSettings",
    "HashSettings",
    "KeyFileSettings",
    "KeyFolderSettings",
    "NewKeyFolderSettings",
    "key",
]

_FLEET: Final = "fleet"


class KeyGroup(HelpGroup):
    """The commands of `semel key`; `semel key FILE` is `semel key fleet FILE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is called."""
        is_file = args[0] not in self.commands and ("/" in args[0] or "." in args[0])
        return super().resolve_command(ctx, [_FLEET, *args] if is_file else args)


key = typer.Typer(
    help="Make, show and rotate the keys of a fleet.", cls=KeyGroup, no_args_is_help=True, rich_markup_mode=None
)
console = Console()

_ADMIN_BYTES: Final = 32
_API_KEY_BYTES: Final = 24
_PRIVATE_FOLDER: Final = stat.S_IRWXU
_PRIVATE_FILE: Final = stat.S_IRUSR | stat.S_IWUSR


@dataclass(frozen=True, slots=True)
class KeyFileSettings:
    """The settings of `semel key fleet`."""

    path: Path = flag(REQUIRED, help="The file to create; it must not exist.", group="Keys", is_positional=True)


@dataclass(frozen=True, slots=True)
class NewKeyFolderSettings:
    """The settings of `semel key make`."""

    directory: Path = flag(
        REQUIRED, help="The folder for the keys; it must not exist, or be empty.", group="Keys", is_positional=True
    )


@dataclass(frozen=True, slots=True)
class KeyFolderSettings:
    """The settings of `semel key rotate`, `semel key retire` and `semel key show`."""

    directory: Path = flag(REQUIRED, help="The folder that `semel key make` made.", group="Keys", is_positional=True)


@dataclass(frozen=True, slots=True)
class HashSettings:
    """The settings of `semel key hash`."""

    tenant: str = flag(REQUIRED, help="The tenant whose API key it is.", group="Keys", is_positional=True)


@dataclass(frozen=True, slots=True)
class ApiKeyAdditionSettings:
    """The settings of `semel key api-add`."""

    path: Path = flag(REQUIRED, help="The file of --api-keys-file.", group="Keys", is_positional=True)
    tenant: str = flag(REQUIRED, help="The tenant.", group="Keys", is_positional=True)


@dataclass(frozen=True, slots=True)
class ApiKeyRemovalSettings:
    """The settings of `semel key api-remove`."""

    path: Path = same_flag(ApiKeyAdditionSettings, "path")
    tenant: str = same_flag(ApiKeyAdditionSettings, "tenant")
    key_from_stdin: bool = flag(
        False, help="Revoke only the key that is read from standard input, not all of the tenant.", group="Keys"
    )


@command(key, NewKeyFolderSettings)
def make(call: Call[NewKeyFolderSettings]) -> None:
    """Make the keys of a fleet: a folder for frontends and one for workers, which cannot stand in for each other."""
    from semel.key_files import ADMIN_FILE, IDENTITY_FILE, STORE_FILE
    from semel.wire.zmq.key_pairs import KeyPairs

    folder = call.settings.directory
    try:
        folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; keys are never overwritten: name another folder")
        for role in ("frontend", "worker"):
            (folder / role).mkdir(mode=_PRIVATE_FOLDER)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    create_key(folder / "frontend" / IDENTITY_FILE)
    create_key(folder / "worker" / STORE_FILE)
    _write(folder / "worker" / ADMIN_FILE, secrets.token_urlsafe(_ADMIN_BYTES) + "\n")
    _save(folder, KeyPairs.make(int(time.time())))
    _say(f"{folder}/frontend: for every frontend, as --key-dir.")
    _say(f"{folder}/worker: for every worker, as --key-dir.")
    _say(f"Keep {folder} itself where neither of them can read it: `semel key rotate` needs both.")


@command(key, KeyFolderSettings)
def rotate(call: Call[KeyFolderSettings]) -> None:
    """Add a generation of transport keys. The one before it is accepted until it is retired; digests stay."""
    folder = call.settings.directory
    pairs = _load(folder).rotate(int(time.time()))
    _save(folder, pairs)
    numbers = " and ".join(str(one.number) for one in pairs.worker.generations)
    _say(f"{folder}: generations {numbers} are accepted. Give frontends and workers their new files; they read them.")
    _say(f"When no link has an older one (`semel_link_key_generation`), `semel key retire {folder}` and do it again.")


@command(key, KeyFolderSettings)
def retire(call: Call[KeyFolderSettings]) -> None:
    """Keep only the newest generation of transport keys: links with older ones end when the files are replaced."""
    folder = call.settings.directory
    pairs = _load(folder).retire()
    _save(folder, pairs)
    _say(f"{folder}: generation {pairs.worker.newest.number} is accepted, and no other.")


@command(key, KeyFolderSettings)
def show(call: Call[KeyFolderSettings]) -> None:
    """Show which keys a folder has, without any secret."""
    from semel.key_files import ADMIN_FILE, IDENTITY_FILE, STORE_FILE

    folder = call.settings.directory
    pairs = _load(folder)
    _say(f"identity   {read_key(folder / 'frontend' / IDENTITY_FILE).id}  digests, tags and seals")
    _say(f"store      {read_key(folder / 'worker' / STORE_FILE).id}  the embedding store")
    read_admin_key(folder / "worker" / ADMIN_FILE)
    _say("admin      a worker's admin address")
    for one in pairs.worker.generations:
        made = datetime.fromtimestamp(one.made_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        use = "in use" if one is pairs.worker.newest else "accepted"
        _say(f"transport  {one.link.id}  generation {one.number}, made {made}, {use}")


@command(key, KeyFileSettings, _FLEET)
def fleet(call: Call[KeyFileSettings]) -> None:
    """Make a fleet key: one secret that everything is derived from, the same for all frontends and workers."""
    path = call.settings.path
    made = create_key(path)
    _say(f"{path}: fleet key {made.id}. Give it to every frontend and worker as --fleet-key-file.")


@command(key, HashSettings, "hash")
def hash_api_key(call: Call[HashSettings]) -> None:
    """Hash a client's API key, which is read from standard input: the line for --api-keys-file."""
    _say(f"{call.settings.tenant} {hash_key(_read_api_key())}")


@command(key, ApiKeyAdditionSettings, "api-add")
def api_add(call: Call[ApiKeyAdditionSettings]) -> None:
    """Make an API key for a tenant: its hash goes into the file, and the key is printed this once."""
    path, tenant = call.settings.path, call.settings.tenant
    if not is_tenant(tenant):
        raise ConfigError(
            "that is no name of a tenant: it has at most 64 letters, digits, '.', '_' and '-'; the key is made here, "
            "so give none"
        )
    made = secrets.token_urlsafe(_API_KEY_BYTES)
    with _edited(path) as lines:
        lines.append(f"{tenant} {hash_key(made)}")
    _say(made)


@command(key, ApiKeyRemovalSettings, "api-remove")
def api_remove(call: Call[ApiKeyRemovalSettings]) -> None:
    """Revoke the API keys of a tenant: all of them, or with --key-from-stdin the one that is read there."""
    path, tenant = call.settings.path, call.settings.tenant
    one = _read_api_key() if call.settings.key_from_stdin else None
    removed = 0
    with _edited(path) as lines:
        for line in list(lines):
            found = tenant_key(line)
            if found is None or found[0] != tenant or (one is not None and Keyring([found]).tenant(one) is None):
                continue
            lines.remove(line)
            removed += 1
        if not removed:
            raise ConfigError(f"{path} has no such key of that tenant; nothing was changed")
        if not any(tenant_key(line) for line in lines):
            raise ConfigError(
                f"{path} would have no keys then, and frontends would keep the old ones: add another first, or end "
                "the frontends; nothing was changed"
            )
    _say(f"{path}: {removed} keys of {tenant} are revoked; frontends refuse them within a second.")


@contextmanager
def _edited(path: Path) -> Iterator[list[str]]:
    """Edit the lines of a file of API keys, which replace it in one step with mode 0600; one editor at a time.

    A file that frontends would not take is refused before and after: they would go on with the keys that they have.
    """

    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot change {path}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            path = path.resolve()
            read_api_keys(ApiKeySettings(api_keys_file=path))
            owner, lines = path.stat(), path.read_text(encoding="ascii").splitlines()
        else:
            owner, lines = None, []
        yield lines
        _write(path, "".join(f"{line}\n" for line in lines), owner)
        read_api_keys(ApiKeySettings(api_keys_file=path))
    finally:
        os.close(folder)


def _read_api_key() -> str:
    text = getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not is_key(text):
        raise ConfigError(
            f"that is no API key: it needs at least {MIN_KEY_CHARS} printable ASCII characters and no blank; give one "
            "on standard input, as with `openssl rand -hex 16`"
        )
    return text


def _load(folder: Path) -> KeyPairs:
    from semel.key_files import TRANSPORT_FILE
    from semel.wire.zmq.key_pairs import KeyPairs

    roles: tuple[Role, Role] = ("frontend", "worker")
    frontend, worker = (read_transport_keys(folder / role / TRANSPORT_FILE, role) for role in roles)
    try:
        return KeyPairs(frontend, worker)
    except ValueError as error:
        raise ConfigError(f"{folder} cannot be rotated: {error}; restore it from where you keep it") from None


def _save(folder: Path, pairs: KeyPairs) -> None:
    """Replace both files, the workers' first: with either a process has a generation in common with the others."""
    from semel.key_files import TRANSPORT_FILE
    from semel.wire.zmq.key_pairs import encode_keys

    for keys in (pairs.worker, pairs.frontend):
        _write(folder / keys.role / TRANSPORT_FILE, encode_keys(keys))


def _write(path: Path, text: str, owner: os.stat_result | None = None) -> None:
    """Write a file that only its owner can read, in one step: nobody reads half of it. It keeps the owner it had."""

    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            if owner is not None and (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _say(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)
