"""The workers of vLLM that semel uses: late items, a guard around the encoder, and generators of seeds in their place.

vLLM makes one in each of its worker processes, by the name in `--worker-cls`. Late items are the worker processes' side
of `lazy_transfer`; without any it does nothing about them, so it may run under any scheduler. Of an item that does not
fit the encoder's output (`encoder_guard`) semel's schedulers end the requests; under another one the log tells of it.

On a CPU, vLLM's worker processes exchange tensors through shared memory that none of them removes. Here the names go as
soon as all of them have mapped it: nothing is left, however the processes end.

A request with a seed has a random generator of its own. While its prompt is computed in chunks, vLLM samples a token
for every chunk, drops all but the last, and winds the generator back; a CPU's generator cannot be wound back, and that
ends the engine. Here such a row draws from the common generator: its token is dropped, its own generator rests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from semel.core import hash_parts
from semel.engine.owner import end_with_owner
from semel.engine.quick_exit import exit_quickly_when_done
from semel.engine.vllm.compat.internals import (
    communicator_segments,
    default_worker,
    dropped_rows,
    received_features,
    row_generators,
)
from semel.engine.vllm.compat.probes import encoder_outputs
from semel.engine.vllm.plugins.encoder_guard import EncoderGuard, create_guard
from semel.engine.vllm.plugins.lazy_transfer import LateItems
from semel.engine.vllm.plugins.rope_positions import allow_bare_items
from semel.engine.vllm.tier.config import has_tier

__all__ = ["GuardedWorker", "LazyTransferWorker", "digest_output", "receive", "resting_generators"]

_Worker: Any = resolve_obj_by_qualname(default_worker(current_platform))


class GuardedWorker(_Worker):  # type: ignore[misc]
    """The worker that vLLM would use on this platform, with a guarded encoder."""

    _guard: EncoderGuard | None = None

    def init_device(self) -> None:
        """Make the model runner."""
        end_with_owner()
        exit_quickly_when_done()
        super().init_device()
        for segment in communicator_segments(self.rank):
            segment.unlink(missing_ok=True)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model into the model runner."""
        super().load_model(*args, **kwargs)
        if self._guard is None:
            allow_bare_items(self.get_model())
            self._guard = create_guard(self, outlives_errors=current_platform.is_cpu())

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        output = super().execute_model(scheduler_output)
        if not (scheduler_output.total_num_scheduled_tokens or self.use_v2_model_runner) and has_tier(self.vllm_config):
            output = _with_copies(output)
        return self._tell(output)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights anew. vLLM drops the encoder outputs of this process, and tells no connector."""
        super().reload_weights(*args, **kwargs)
        self._forget_saved()

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take some new weights."""
        super().update_weights(*args, **kwargs)
        self._forget_saved()

    def _forget_saved(self) -> None:
        """Let the embedding tier know that what it saved is of other weights."""
        if has_tier(self.vllm_config):
            from vllm.distributed.ec_transfer import get_ec_transfer

            get_ec_transfer().forget_saved()

    def digest_outputs(self, identifiers: Sequence[str]) -> dict[str, str]:
        """Return the hashes of those encoder outputs that are on the device, for the proof at start."""
        outputs = encoder_outputs(self)
        return {one: digest_output(outputs[one]) for one in identifiers if one in outputs}

    def replay_next(self) -> None:
        """Have the guard encode the items of the next batch alone, as if one did not fit."""
        if self._guard is not None:
            self._guard.replay.force()

    def has_replayed(self) -> bool | None:
        """Return whether that was done; None without a guard."""
        return None if self._guard is None else self._guard.replay.was_done()

    def stop_replaying(self) -> None:
        """Have the guard encode no batch again: it ends all requests of one that does not fit."""
        if self._guard is not None:
            self._guard.replay.is_on = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the tokens of a step."""
        if self.use_v2_model_runner or not current_platform.is_cpu():
            return self._tell(super().sample_tokens(grammar_output))
        with resting_generators(self):
            return self._tell(super().sample_tokens(grammar_output))

    def _tell(self, output: Any) -> Any:
        """Return what a step gives to the scheduler, now or later, with what the guard has found."""
        return output if self._guard is None else self._guard.tell(output)


class LazyTransferWorker(GuardedWorker):
    """The same, with late items."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        receive(self, scheduler_output)
        return super().execute_model(scheduler_output)


def _with_copies(output: Any) -> Any:
    """Return the output of a step without tokens with the copies that have ended: vLLM's first runner asks for none."""
    from vllm.distributed.ec_transfer import get_ec_transfer
    from vllm.v1.outputs import ECConnectorOutput

    reports = get_ec_transfer().build_connector_worker_meta()
    return output.with_ec_conn_output(output, ECConnectorOutput(ec_connector_worker_meta=reports))


def receive(worker: Any, scheduler_output: Any) -> None:
    """Put a step's late items in the places of the partial ones, where the model runner finds them."""
    late = scheduler_output.ec_manager_metadata
    if not isinstance(late, LateItems):
        return
    for request_id, items in late.items.items():
        features = received_features(worker, request_id)
        for index, item in items.items():
            features[index] = item


def digest_output(output: torch.Tensor) -> str:
    """Return the hash of an encoder output: of its form, as the tier tells it, and its bytes."""
    content = output.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hash_parts([repr((*output.shape, str(output.dtype))).encode(), memoryview(content).cast("B")]).hexdigest()


@contextmanager
def resting_generators(worker: Any) -> Iterator[None]:
    """Leave out the generators of the rows whose token is dropped, of prompts that are not computed to their end."""
    generators = row_generators(worker)
    resting = {row: generators.pop(row) for row in dropped_rows(worker) if row in generators}
    try:
        yield
    finally:
        generators.update(resting)
