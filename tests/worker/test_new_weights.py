"""New weights end the sharing of encoder outputs: in the process of the engine, and in the worker for good."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from semel.lab.testing.embedding_store import MemoryBlobs
from semel.telemetry import metrics
from tests.worker.test_embedding_sync import Host, running


async def test_a_worker_never_shares_again_after_new_weights(caplog: pytest.LogCaptureFixture) -> None:
    """A reset alone has it share under other names: the control."""
    async with running(Host(MemoryBlobs())) as host:
        await host.until_up()
        host.page.reset(new_weights=False)
        host.sync._review()
        assert await host.sync._usable_store() is not None
        host.page.reset(new_weights=True)
        host.sync._review()
        assert await host.sync._usable_store() is None
        assert host.total(metrics.EMBEDDING_STORE_UP) == 0
    assert "the engine has new weights" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("call", ["reload_weights", "update_weights"])
def test_the_process_of_an_engine_tells_its_tier_of_new_weights(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import ec_transfer

    from semel.engine.vllm.plugins import worker

    done: list[str] = []
    (above,) = worker.GuardedWorker.__bases__
    monkeypatch.setattr(above, call, lambda *_: done.append("new weights"), raising=False)
    monkeypatch.setattr(worker, "has_tier", lambda _: True)
    tier = SimpleNamespace(forget_saved=lambda: done.append("forgotten"))
    monkeypatch.setattr(ec_transfer, "get_ec_transfer", lambda: tier)
    guarded: Any = object.__new__(worker.GuardedWorker)
    guarded.vllm_config = None
    getattr(guarded, call)()
    assert done == ["new weights", "forgotten"]
