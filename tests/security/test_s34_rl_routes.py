"""Routes that stop an engine and change its weights: off, and then for the operator alone (S34)."""

from __future__ import annotations

import pytest

from semel.errors import ConfigError
from semel.settings.environment import DEV_MODE, is_dev_mode
from semel.worker.admin import admin_document
from tests.worker.test_control_routes import KEY, PATHS, operated

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("key", "presented", "status"), [(KEY, "another-key-0123456789", 401), (None, KEY, 403)])
def test_nothing_is_switched_without_the_admin_key_S34(key: str | None, presented: str, status: int) -> None:
    with operated(key) as (worker, client):
        for path in PATHS:
            method = "GET" if "get" in admin_document(has_control=True)["paths"][path] else "POST"
            headers = {"Authorization": f"Bearer {presented}"}
            assert client.request(method, path, headers=headers).status_code == status, path
        assert worker.engine.calls == []


def test_without_vllms_dev_mode_there_are_no_such_routes_S34() -> None:
    with operated(has_control=False) as (_, client):
        assert {client.post(path).status_code for path in PATHS} == {404}
        assert not PATHS & client.get("/openapi.json").json()["paths"].keys()


@pytest.mark.parametrize(("presented", "expected"), [(None, False), ("0", False), ("1", True)])
def test_the_mode_is_vllms_variable_and_off_without_it_S34(
    monkeypatch: pytest.MonkeyPatch, presented: str | None, expected: bool
) -> None:
    monkeypatch.delenv(DEV_MODE, raising=False)
    if presented is not None:
        monkeypatch.setenv(DEV_MODE, presented)
    assert is_dev_mode() is expected


def test_a_variable_that_is_no_number_is_named_S34(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEV_MODE, "yes")
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE is 'yes': set it to 0 or 1"):
        is_dev_mode()
