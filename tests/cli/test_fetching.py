"""The flags for fetching, as a user gives them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from semel.cli import fetching
from semel.cli.app import frontend
from semel.cli.flags import as_arguments
from semel.media.fetch.download import FetchLimits
from semel.media.fetch.fetch import FetchOptions
from semel.settings import create_key
from tests.cli.test_app import semel


def test_the_defaults_of_the_flags_are_those_of_the_code() -> None:
    assert FetchLimits(max_bytes=fetching.MAX_BYTES, total_s=fetching.TIMEOUT_S) == FetchLimits()
    default = inspect.signature(frontend).parameters["media_cache_gb"].default
    assert int(default * 1024**3) == FetchOptions().cache_bytes


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--allowed-media-domains", "*.example.com"),
        ("--allowed-media-networks", "10.0.0.1/8"),
        ("--allowed-local-media-path", "/nowhere/at/all"),
    ],
)
def test_a_flag_that_makes_no_sense_is_named_at_the_start(tmp_path: Path, flag: str, value: str) -> None:
    create_key(tmp_path / "key")
    worker, key_file = f"ipc://{tmp_path}/w.sock", str(tmp_path / "key")
    done = semel("frontend", "tiny", "--worker", worker, "--key-file", key_file, flag, value)
    assert done.returncode == 2
    assert flag in done.stderr
    assert value in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_hands_them_on_to_its_frontend() -> None:
    given = as_arguments(
        {
            "allowed_media_domains": ["a.example", ".b.example:8443"],
            "allow_media_http": True,
            "allowed_media_networks": None,
            "max_media_bytes": 5,
        }
    )
    assert given == [
        "--allowed-media-domains=a.example",
        "--allowed-media-domains=.b.example:8443",
        "--allow-media-http",
        "--max-media-bytes=5",
    ]
    shown = semel("serve", "--help").stdout
    for flag in ("--allowed-media-domains", "--allow-media-http", "--allowed-media-networks", "--media-cache-gb"):
        assert flag[:20] in shown
