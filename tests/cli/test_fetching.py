"""The flags for fetching, as a user gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.cli.flags import Call
from semel.media.fetch.settings import FetchSettings
from semel.settings import ServingSettings, create_key
from tests.commands import run_main


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
    command = ("frontend", "tiny", "--skip-checks", "--worker", worker, "--fleet-key-file", key_file, flag, value)
    code, printed = run_main(*command)
    assert code == 2
    assert flag in printed
    assert value in printed
    assert "Traceback" not in printed


def test_serve_hands_them_on_to_its_frontend() -> None:
    values = {
        "allowed_media_domains": ("a.example", ".b.example:8443"),
        "allow_media_http": True,
        "allowed_media_networks": (),
        "allowed_local_media_path": None,
        "max_media_bytes": 5,
        "media_cache_gb": 0.3,
        "rate": 1.0,
    }
    call = Call(FetchSettings(), values)
    assert call.arguments(ServingSettings, but=("media_cache_gb",)) == [
        "--allowed-media-domains=a.example",
        "--allowed-media-domains=.b.example:8443",
        "--allow-media-http",
        "--max-media-bytes=5",
    ]
