"""Faults that a test plants in vLLM's worker processes: what a comparison of answers has to find.

`SEMEL_SHIM_PLANTS` makes `plant` a method of semel's worker; `collective_rpc("plant", args=(name,))` calls it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PLANTS", "plant"]


def plant(worker: Any, name: str) -> None:
    """From now on, err in this way."""
    PLANTS[name](worker)


def swap_encoder_outputs(worker: Any) -> None:
    """In the last of the worker processes, two items of one batch that are of one size get each other's embeddings."""
    config = worker.vllm_config.parallel_config
    if worker.rank != config.world_size - 1:
        return
    model = worker.model_runner.model
    embed = model.embed_multimodal

    def embed_multimodal(*args: Any, **kwargs: Any) -> Any:
        outputs = list(embed(*args, **kwargs))
        if len(outputs) > 1 and outputs[0].shape == outputs[1].shape:
            outputs[:2] = outputs[1::-1]
        return outputs

    model.embed_multimodal = embed_multimodal


def delay_late_items(_: Any) -> None:
    """What travels with the step that encodes it arrives one step after that."""
    from semel.engine.vllm.plugins import worker as worker

    receive: Any = worker.receive
    waiting: list[Any] = []

    def receive_late(worker: Any, step: Any) -> None:
        for old in waiting:
            try:
                receive(worker, old)
            except KeyError:
                continue  # its request has ended
        waiting[:] = [step]

    worker.receive = receive_late  # type: ignore[assignment]


def flip_saved_bit(_: Any) -> None:
    """The embedding tier saves every output with one bit that is wrong."""
    import torch
    from vllm.distributed.ec_transfer import get_ec_transfer

    copies: Any = get_ec_transfer()._copies
    save = copies.save

    def save_wrong(step: Any, key: str, output: Any) -> None:
        wrong = output.clone()
        wrong.view(-1).view(torch.uint8)[-1] ^= 1
        save(step, key, wrong)

    copies.save = save_wrong


PLANTS = {"swapped": swap_encoder_outputs, "late": delay_late_items, "flipped": flip_saved_bit}
