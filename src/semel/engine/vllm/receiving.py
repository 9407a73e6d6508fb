"""The worker processes' side of `shipping`: a worker of vLLM that takes late items before it runs a step.

vLLM makes one in each of its worker processes, by the name in `--worker-cls`. Without late items it does nothing, so it
may run under any scheduler.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from semel.engine.vllm.compat import received_features, worker_of
from semel.engine.vllm.shipping import LateItems

__all__ = ["ReceivingWorker", "receive"]

_Worker: Any = resolve_obj_by_qualname(worker_of(current_platform))


class ReceivingWorker(_Worker):  # type: ignore[misc]
    """The worker that vLLM would use on this platform, and late items."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        receive(self, scheduler_output)
        return super().execute_model(scheduler_output)


def receive(worker: Any, scheduler_output: Any) -> None:
    """Put a step's late items in the places of the partial ones, where the model runner finds them."""
    late = scheduler_output.ec_manager_metadata
    if not isinstance(late, LateItems):
        return
    for request_id, items in late.items.items():
        features = received_features(worker, request_id)
        for index, item in items.items():
            features[index] = item
