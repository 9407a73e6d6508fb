"""Seeds on a CPU: the generator of a row whose token is dropped rests; an engine that would die of one refuses it.

That an engine outlives seeded requests in chunks, and answers as vLLM does alone, is in `test_encoder_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from semel.core import Prompt, Submission, Timeline
from semel.engine.vllm.engine import VllmEngine
from semel.errors import InvalidRequest
from tests.engine.sink import Sink

pytestmark = pytest.mark.slow


def test_the_generators_of_rows_whose_token_is_dropped_rest_while_others_draw() -> None:
    import torch

    from semel.engine.vllm.plugins.worker import resting_generators

    generators = {row: torch.Generator().manual_seed(row) for row in (0, 1, 3)}
    before = {row: generator.get_state() for row, generator in generators.items()}
    mask = SimpleNamespace(np=np.array([False, True, True, True, True]))
    batch = SimpleNamespace(generators=generators, num_reqs=4)
    worker = SimpleNamespace(model_runner=SimpleNamespace(input_batch=batch, discard_request_mask=mask))
    with resting_generators(worker):
        for generator in batch.generators.values():
            torch.randint(0, 9, (1,), generator=generator)
    assert batch.generators is generators, "the sampler has the same"
    assert {row: torch.equal(generators[row].get_state(), before[row]) for row in (0, 1, 3)} == {
        0: False,
        1: True,
        3: True,
    }
    with pytest.raises(ZeroDivisionError), resting_generators(worker):
        raise ZeroDivisionError
    assert generators.keys() == {0, 1, 3}


@pytest.mark.parametrize("flags", [(), ("--worker-cls", "their.Own")])
async def test_where_the_worker_is_another_one_a_seed_is_refused_unless_nothing_is_drawn(
    tiny: Callable[[str], Path], flags: tuple[str, ...]
) -> None:
    engine = VllmEngine.embed(Sink.of(tiny("qwen2-vl"), *flags))
    prompt = Prompt((1, 2, 3), Timeline.decoder(()), ())
    await engine.submit(Submission("greedy", prompt, {}, {"seed": 1, "temperature": 0.0}))
    await engine.submit(Submission("unseeded", prompt, {}, {"temperature": 1.0}))
    seeded = Submission("seeded", prompt, {}, {"seed": 1, "temperature": 1.0})
    if not flags:
        await engine.submit(seeded)
        return
    with pytest.raises(InvalidRequest, match=r"^seed: this engine would not outlive it"):
        await engine.submit(seeded)
