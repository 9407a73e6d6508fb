"""`semel key`: what it makes, who can read it, and what a rotation changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.core import Keyring
from semel.core.flag import fill
from semel.errors import ConfigError
from semel.key_files import ProcessKeys, admin_key_file, process_keys
from semel.settings.frontend import ApiKeySettings
from semel.settings.secrets import create_key, read_api_keys, read_transport_keys
from semel.settings.worker import WorkerSettings
from tests.commands import invoke

FILES = {
    "frontend/identity.key",
    "frontend/transport.keys",
    "worker/store.key",
    "worker/transport.keys",
    "worker/admin.key",
}


def key(*words: object, text: str = "") -> str:
    """What a command of `semel key` prints; an error is raised."""
    done = invoke("key", *map(str, words), given=text)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    key("make", tmp_path / "keys")
    return tmp_path / "keys"


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def keys_of(folder: Path) -> tuple[ProcessKeys, ProcessKeys]:
    return process_keys(None, folder / "frontend", "frontend"), process_keys(None, folder / "worker", "worker")


def numbers(keys: ProcessKeys) -> list[int]:
    return [one.number for one in keys.transport.keys.generations]


def test_make_gives_each_role_its_own_files_which_only_their_owner_reads(folder: Path) -> None:
    assert contents(folder).keys() == FILES
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    frontend, worker = keys_of(folder)
    assert numbers(frontend) == numbers(worker) == [1]
    assert frontend.hashing != worker.hashing


def test_no_secret_of_one_role_is_in_a_file_of_the_other(folder: Path) -> None:
    """Apart from the link key, with which neither can be the other over tcp (test_s17_roles.py)."""
    found = contents(folder)
    frontend, worker = keys_of(folder)
    for ours, others in ((frontend, "worker/"), (worker, "frontend/")):
        secrets = [one.secret.hex() for one in ours.transport.keys.generations] + [ours.hashing.secret.hex()]
        for name, text in found.items():
            if name.startswith(others):
                assert not any(secret in text for secret in secrets), name


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(ConfigError, match="never overwritten"):
        key("make", folder)
    assert contents(folder) == before


def test_a_rotation_changes_transport_keys_and_nothing_else(folder: Path) -> None:
    before, old = contents(folder), keys_of(folder)
    said = key("rotate", folder)
    assert "generations 1 and 2 are accepted" in said
    after, new = contents(folder), keys_of(folder)
    assert {name for name in FILES if before[name] != after[name]} == {f for f in FILES if "transport" in f}
    assert [one.hashing for one in new] == [one.hashing for one in old], "digests, tags, seals and names stay"
    assert [numbers(one) for one in new] == [[1, 2]] * 2
    key("rotate", folder)
    assert [numbers(one) for one in keys_of(folder)] == [[2, 3]] * 2, "the oldest goes"
    assert "generation 3 is accepted, and no other" in key("retire", folder)
    assert [numbers(one) for one in keys_of(folder)] == [[3]] * 2


def test_show_shows_no_secret(folder: Path) -> None:
    key("rotate", folder)
    shown = key("show", folder)
    assert "generation 1" in shown
    assert "generation 2" in shown
    assert shown.count("in use") == 1
    for one in keys_of(folder):
        assert one.hashing.id in shown
        assert one.hashing.secret.hex() not in shown
        for generation in one.transport.keys.generations:
            assert generation.secret.hex() not in shown
            assert generation.link.secret.hex() not in shown


def test_a_folder_whose_halves_do_not_fit_is_not_rotated(folder: Path, tmp_path: Path) -> None:
    key("make", tmp_path / "other")
    (tmp_path / "other/worker/transport.keys").replace(folder / "worker/transport.keys")
    with pytest.raises(ConfigError, match="cannot be rotated: frontends and workers have different generations"):
        key("rotate", folder)


def test_a_process_says_which_keys_it_lacks_or_has_too_many_of(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no keys: give --key-dir DIR/worker.*or --fleet-key-file FILE"):
        process_keys(None, None, "worker")
    create_key(tmp_path / "fleet.key")
    with pytest.raises(ConfigError, match="keep one of them"):
        process_keys(tmp_path / "fleet.key", folder / "worker", "worker")
    with pytest.raises(ConfigError, match=f"both roles; give a worker its own, {folder}/worker"):
        process_keys(None, folder, "worker")
    with pytest.raises(ConfigError, match="transport keys of a frontend, and this is a worker"):
        read_transport_keys(folder / "frontend/transport.keys", "worker")
    (folder / "worker/transport.keys").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        process_keys(None, folder / "worker", "worker")


def test_the_admin_key_of_the_folder_counts_unless_another_is_named(folder: Path, tmp_path: Path) -> None:
    common = {"model": "m", "listen": "tcp://127.0.0.1:1"}

    def path(**keys: Path) -> Path | None:
        return admin_key_file(fill(WorkerSettings, {**common, **keys}))

    ours, other = folder / "worker", tmp_path / "admin"
    assert path(key_dir=ours) == ours / "admin.key"
    assert path(key_dir=ours, admin_key_file=other) == other
    assert path(key_file=tmp_path / "fleet.key") is None
    (ours / "admin.key").unlink()
    assert path(key_dir=ours) is None


def test_an_api_key_is_hashed_as_the_keyring_reads_it_and_comes_over_standard_input() -> None:
    """On a command line other users of the machine would see it."""
    secret = "sk-0123456789abcdef"
    line = key("hash", "acme", text=f"{secret}\n")
    assert secret not in line
    tenant, hashed = line.split()
    assert Keyring([(tenant, hashed)]).tenant(secret) == "acme"
    for wrong in ("", "short\n", "with a blank in the middle of it\n"):
        with pytest.raises(ConfigError, match="no API key"):
            key("hash", "acme", text=wrong)


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """Files are for all to read, unless somebody says otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def refused(*words: object, text: str = "") -> str:
    """What the error of a command says."""
    with pytest.raises(ConfigError) as raised:
        key(*words, text=text)
    return str(raised.value)


@pytest.mark.usefixtures("usual_umask")
def test_an_api_key_is_added_and_revoked_in_a_file_that_frontends_take(tmp_path: Path) -> None:
    """Control: the file that one writes by hand and moves is refused, so that the revoked key stays in force."""
    path = tmp_path / "keys"
    acme, umbra = (key("api-add", path, tenant).strip() for tenant in ("acme", "umbra"))
    new = key("api-add", path, "acme").strip()
    ring = read_api_keys(ApiKeySettings(api_keys_file=path))
    assert [ring.tenant(one) for one in (acme, umbra, new)] == ["acme", "umbra", "acme"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not [one for one in (acme, umbra, new) if one in path.read_text()], "only hashes are stored"
    key("api-remove", path, "acme", "--key-from-stdin", text=f"{acme}\n")
    ring.replace(read_api_keys(ApiKeySettings(api_keys_file=path)))
    assert [ring.tenant(one) for one in (acme, umbra, new)] == [None, "umbra", "acme"]
    assert path.stat().st_mode & 0o777 == 0o600

    by_hand = tmp_path / "by-hand"
    by_hand.write_text(path.read_text())
    by_hand.replace(path)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_api_keys(ApiKeySettings(api_keys_file=path))


def test_what_is_not_of_the_tenant_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("# of production\numbra umbra-0123456789abcdef # by hand\n\nacme acme-0123456789abcdef\n")
    key("api-remove", path, "acme")
    assert path.read_text() == "# of production\numbra umbra-0123456789abcdef # by hand\n\n"


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    key("api-add", tmp_path / "real", "acme")
    (tmp_path / "keys").symlink_to(tmp_path / "real")
    made = key("api-add", tmp_path / "keys", "acme").strip()
    assert (tmp_path / "keys").is_symlink()
    assert read_api_keys(ApiKeySettings(api_keys_file=tmp_path / "real")).tenant(made) == "acme"


def test_what_would_leave_a_key_in_force_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    made = key("api-add", path, "acme").strip()
    before = path.read_text()
    assert "would have no keys" in refused("api-remove", path, "acme")
    assert "no such key" in refused("api-remove", path, "umbra")
    assert "no such key" in refused("api-remove", path, "acme", "--key-from-stdin", text="k" * 20 + "\n")
    path.chmod(0o644)
    assert "chmod 600" in refused("api-remove", path, "acme")
    path.chmod(0o600)
    assert path.read_text() == before
    assert read_api_keys(ApiKeySettings(api_keys_file=path)).tenant(made) == "acme"


def test_no_error_of_api_keys_shows_a_key(tmp_path: Path) -> None:
    path, secret = tmp_path / "keys", "secret-0123456789abcdef"
    path.touch(mode=0o600)
    for text in (f"acme {secret} more", f"{secret} acme", f"acme {secret}\numbra {secret}", f"acme {secret}é", secret):
        path.write_text(text)
        for words in (("api-add", path, "umbra"), ("api-remove", path, "acme")):
            assert secret not in refused(*words)
    path.write_text(f"acme {secret}\numbra {secret}2")
    for words in (("api-add", path, f"{secret}!"), ("api-remove", path, secret), ("api-remove", path, f"{secret}!")):
        assert secret not in refused(*words)
    assert secret not in refused("api-add", tmp_path / "none" / "keys", "acme")


def test_a_key_that_cannot_be_stored_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("semel.cli.keys.os.fsync", full)
    done = invoke("key", "api-add", str(tmp_path / "keys"), "acme")
    assert isinstance(done.exception, ConfigError)
    assert done.output == ""
    assert not (tmp_path / "keys").exists()
