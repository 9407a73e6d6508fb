"""What a process of the pool sees of its frontend's environment: not the credentials of a media store (threats)."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.processing.pool import process as process_module
from semel.processing.pool.process import PoolProcess

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "GOOGLE_SERVICE_ACCOUNT_KEY")


def environment_of(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)


async def environment_of_a_child(*, in_background: bool) -> dict[str, str]:
    """As the kernel says: what it does with it later changes nothing of it."""
    child = await PoolProcess.spawn(1 << 20, in_background=in_background)
    try:
        return environment_of(child.pid)
    finally:
        await child.end(within_s=0)
        await child.release()


@pytest.mark.parametrize("in_background", [False, True])
async def test_a_child_has_no_credentials_of_a_media_store(
    monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HF_HOME", "/models")
    seen = await environment_of_a_child(in_background=in_background)
    assert "secret" not in seen.values()
    assert (seen["HF_HOME"], seen["OMP_NUM_THREADS"]) == ("/models", "1")


async def test_mutant_a_child_that_inherits_everything_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_CREDENTIALS", ())
    monkeypatch.setenv(CREDENTIALS[0], "secret")
    assert "secret" in (await environment_of_a_child(in_background=False)).values()
