"""Settings: what flags fill, key files, and what the environment says."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from semel.core import Keyring
from semel.core.flag import Flag, fill, flags_of
from semel.errors import ConfigError
from semel.media.fetch.fetch import FetchOptions
from semel.settings.environment import default_variable, trace_collector
from semel.settings.frontend import ApiKeySettings, FrontendSettings, ServingSettings
from semel.settings.secrets import api_key_warnings, create_key, has_api_keys, read_api_keys, read_key
from semel.settings.serve import ServeSettings
from semel.settings.worker import WorkerSettings
from semel.telemetry.tracing import Collector


def test_a_key_is_read_as_it_was_made(tmp_path: Path) -> None:
    made = create_key(tmp_path / "k")
    assert read_key(tmp_path / "k") == made


def unreadable(tmp_path: Path, fault: str, patch: pytest.MonkeyPatch) -> Path:
    """A key file that cannot be read."""
    path = tmp_path / "k"
    if fault == "EISDIR":
        path.mkdir()
    elif fault == "not ASCII":
        path.write_bytes(b"00\xff0")
    elif fault != "ENOENT":
        number = getattr(errno, fault)

        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(Path, "open", refuse)
    return path


UNREADABLE = {
    "ENOENT": "No such file or directory; `semel key fleet {path}` makes one",
    "EACCES": "Permission denied",
    "EISDIR": "Is a directory",
    "EMFILE": "Too many open files",
    "not ASCII": "it has other characters than ASCII, the first at byte 2",
}


def check_reason(tmp_path: Path, fault: str, patch: pytest.MonkeyPatch) -> None:
    path = unreadable(tmp_path, fault, patch)
    with pytest.raises(ConfigError) as caught:
        read_key(path)
    assert str(caught.value) == f"cannot read the key file {path}: {UNREADABLE[fault].format(path=path)}"


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_key_file_that_cannot_be_read_says_why_and_a_missing_one_how_to_make_it(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_reason(tmp_path, fault, monkeypatch)


@pytest.mark.parametrize("fault", UNREADABLE)
def test_mutant_one_message_for_all_of_them_is_found(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mutant(path: Path, *, remedy: str) -> str:
        raise ConfigError(f"cannot read the key file {path}; {remedy}")

    monkeypatch.setattr("semel.settings.secrets._read_secret", mutant)
    with pytest.raises(AssertionError):
        check_reason(tmp_path, fault, monkeypatch)


AS_OTHER = """
import codecs, os, sys
from pathlib import Path
from semel.errors import ConfigError
from semel.settings.secrets import read_key
codecs.lookup("ascii")  # who we become cannot read our libraries
os.setgroups([int(sys.argv[2])]); os.setgid(10001); os.setuid(10001)
try:
    read_key(Path(sys.argv[1]))
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root's and of other groups are made by root")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "fault"),
    [
        (0, 10_002, 0o440, None),  # how Kubernetes mounts a secret for a pod with an fsGroup
        (0, 10_001, 0o440, None),
        (10_001, 10_001, 0o400, None),
        (0, 10_002, 0o444, "can be read by others"),
        (0, 10_002, 0o460, "can be read by others"),
        (10_001, 10_002, 0o440, "can be read by others"),
        (0, 10_003, 0o440, "/k: Permission denied\n"),
    ],
)
def test_a_key_file_of_roots_that_our_group_reads_is_taken(
    owner: int, group: int, mode: int, fault: str | None
) -> None:
    """Control: with only 0400 and 0600 taken, a pod that is not root's could read no secret at all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k"
        create_key(path)
        os.chown(path, owner, group)
        path.chmod(mode)
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", AS_OTHER, str(path), "10002"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode == 0) == (fault is None), done.stderr
    assert (fault or "") in done.stderr


@pytest.mark.parametrize("content", [b"", b"abc", b"00" * 31, b"zz" * 32, b"\xff" * 64])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "k"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="key file"):
        read_key(path)


def keys_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def read_keys(path: Path) -> Keyring:
    return read_api_keys(ApiKeySettings(api_keys_file=path))


def test_api_keys_are_read_with_their_tenants(tmp_path: Path) -> None:
    ring = read_keys(keys_file(tmp_path, f"# ours\nacme {'a' * 16}  # until May\n\numbra {'b' * 16}\n"))
    assert [ring.tenant("a" * 16), ring.tenant("b" * 16), ring.tenant("c" * 16)] == ["acme", "umbra", None]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no keys"),
        ("acme\n", "line 1: must be a tenant"),
        (f"acme {'a' * 16}\nac/me {'b' * 16}\n", "line 2: must be a tenant"),
        ("acme short\n", r"key 1 is too short \(5 of 16 characters\)"),
        (f"acme {'a' * 16}\numbra {'a' * 16}\n", "same key"),
    ],
)
def test_a_file_of_api_keys_with_a_fault_says_which(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_keys(keys_file(tmp_path, text))


def test_a_key_of_a_flag_may_be_short_with_a_warning_that_does_not_show_it() -> None:
    given = ApiKeySettings(api_keys=("token-abc123", "b" * 16))
    ring = read_api_keys(given)
    assert [ring.tenant("token-abc123"), ring.tenant("b" * 16), ring.tenant("c" * 16)] == ["default", "default", None]
    (warning,) = api_key_warnings(given)
    assert "12 characters" in warning
    assert "abc123" not in warning
    assert not [*api_key_warnings(ApiKeySettings(api_keys=("b" * 16,)))]


@pytest.mark.parametrize("key", ["", "with blank", "naïve-key-of-sixteen"])
def test_a_key_that_no_client_could_send_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="no client could send it") as caught:
        read_api_keys(ApiKeySettings(api_keys=(key,)))
    assert not key or key not in str(caught.value)


def test_vllms_variable_is_a_key_unless_a_flag_or_a_file_has_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is a server without the variable, which is open; the wrong implementation was open with it."""
    assert not has_api_keys(ApiKeySettings())
    monkeypatch.setenv("VLLM_API_KEY", "v" * 16)
    assert has_api_keys(ApiKeySettings())
    assert read_api_keys(ApiKeySettings()).tenant("v" * 16) == "default"
    by_flag = read_api_keys(ApiKeySettings(api_keys=("f" * 16,)))
    assert [by_flag.tenant("v" * 16), by_flag.tenant("f" * 16)] == [None, "default"]
    of_file = ApiKeySettings(api_keys_file=keys_file(tmp_path, f"acme {'a' * 16}"))
    assert read_api_keys(of_file).tenant("v" * 16) is None
    assert "VLLM_API_KEY is set and not used" in "".join(api_key_warnings(of_file))
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert not has_api_keys(ApiKeySettings())


def test_spans_go_by_the_protocol_that_opentelemetrys_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace_collector(None) is None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    assert trace_collector("http://c:4318") == Collector("http://c:4318/v1/traces", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert trace_collector("http://c:4317") == Collector("http://c:4317", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert trace_collector("http://c:4318") == Collector("http://c:4318/v1/traces", "http/protobuf")


def test_a_variable_has_its_default_for_a_while_unless_somebody_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMEL_TESTS", raising=False)
    with default_variable("SEMEL_TESTS", "ours"):
        assert os.environ["SEMEL_TESTS"] == "ours"
    assert "SEMEL_TESTS" not in os.environ
    monkeypatch.setenv("SEMEL_TESTS", "theirs")
    with default_variable("SEMEL_TESTS", "ours"):
        assert os.environ["SEMEL_TESTS"] == "theirs"


@pytest.mark.parametrize("kind", [FrontendSettings, WorkerSettings, ServeSettings])
def test_every_flag_fills_its_own_field_and_no_other(kind: type) -> None:
    flags = flags_of(kind)
    required = {one.key: _other(one) for one in flags if one.is_required}
    defaults: Any = fill(kind, required)
    for one in flags:
        value = _other(one)
        filled: Any = fill(kind, required | {one.key: value})
        expected = int(value * one.scale) if one.scale != 1 else value
        assert _at(filled, one.path) == expected
        others = [other.path for other in flags if other is not one]
        assert [_at(filled, path) for path in others] == [_at(defaults, path) for path in others]


def _other(one: Flag) -> Any:
    """A value that is not the flag's default."""
    if one.choices:
        return next(choice for choice in one.choices if choice != one.default)
    if one.is_list:
        return ("a", "b")
    if one.kind is bool:
        return True
    if one.kind is Path:
        return Path("/somewhere/else")
    if one.kind is str:
        return "something else"
    return (one.default or 0) // 2 + 3 if one.kind is int else (one.default or 0.0) + 1.5


def _at(settings: Any, path: tuple[str, ...]) -> Any:
    return reduce(getattr, path, settings)


def test_without_flags_every_section_has_the_defaults_that_its_component_has() -> None:
    assert fill(ServingSettings, {one.key: one.default for one in flags_of(ServingSettings)}) == ServingSettings()
    assert FetchOptions.of(ServingSettings().fetch) == FetchOptions()
