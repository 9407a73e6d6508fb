"""What a process of the pool sees of its frontend's environment: variables with known names, and no secrets (S23)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.processing.pool import command as command_module
from semel.processing.pool.command import child_environment
from semel.processing.pool.process import PoolProcess

SECRETS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "GOOGLE_SERVICE_ACCOUNT_KEY", "HF_TOKEN"),
    *("HUGGING_FACE_HUB_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "SEMEL_API_KEY", "VLLM_API_KEY", "DATABASE_URL"),
)


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
async def test_a_child_has_no_secrets_and_what_its_libraries_need_S23(
    monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy:3128")
    monkeypatch.setenv("HF_HOME", "/models")
    seen = await environment_of_a_child(in_background=in_background)
    assert not [name for name, value in seen.items() if "secret" in value]
    assert (seen["HF_HOME"], seen["OMP_NUM_THREADS"]) == ("/models", "1")


async def test_mutant_a_child_that_inherits_everything_has_them_S23(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "child_environment", dict)
    monkeypatch.setenv(SECRETS[0], "secret")
    assert "secret" in (await environment_of_a_child(in_background=False)).values()


@given(st.dictionaries(st.text(st.characters(codec="ascii"), min_size=1), st.text()))
def test_whatever_else_there_is_a_child_does_not_have_it_S23(others: dict[str, str]) -> None:
    """Names that nobody has thought of are left out, unless they are of a library that is known."""
    named = {"PATH": "/bin", "HF_HOME": "/models", "http_proxy": "http://proxy", "LC_ALL": "C"}
    seen = child_environment({**others, **named})
    assert seen.items() >= named.items()
    assert not [name for name in seen if name in others and name not in named and "_" not in name and len(name) > 12]
    assert child_environment(dict.fromkeys(SECRETS, "x")) == child_environment({})
