"""A worker process of vLLM whose encoder outputs are copied by vLLM's own worker for GPUs, over a late device."""

from __future__ import annotations

from typing import Any, Final
from unittest.mock import patch

from semel.engine.vllm.plugins.worker import GuardedWorker
from semel.engine.vllm.tier import connector
from semel.engine.vllm.tier.copies import DeviceCopies
from tests.engine.late_device import LateWorker

__all__ = ["LATE_WORKER", "LateDeviceWorker"]

LATE_WORKER: Final = f"{__name__}.LateDeviceWorker"


class LateDeviceWorker(GuardedWorker):
    """The worker of `--worker-cls`."""

    def init_device(self) -> None:
        """Make the model runner, and before it the connector."""
        with patch.object(connector, "create_copies", _create_copies):
            super().init_device()


def _create_copies(vllm_config: Any, block_bytes: int) -> DeviceCopies:
    return DeviceCopies.over(LateWorker(vllm_config), vllm_config, block_bytes)
