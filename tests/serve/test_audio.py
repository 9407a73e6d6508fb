"""`semel serve` with an audio model: clips over HTTP, answered as by bare vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engine.parity import audio_part, clip, random_chat, running
from tests.serve.http_parity import compare_over_http
from tests.serve.served import serving


@pytest.mark.engine
@pytest.mark.timeout(400)
async def test_clips_are_answered_as_by_bare_vllm_with_sixteen_requests_at_a_time(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(0)
    chats = [random_chat(rng, [audio_part(clip(rng)) for _ in range(index % 4)]) for index in range(20)]
    async with running(tiny("qwen2-audio"), max_model_len=4_096) as rig:
        expected = [await rig.bare(chat) for chat in chats]
    with serving(tiny("qwen2-audio"), tmp_path_factory.mktemp("audio")) as served:
        await compare_over_http(served, chats, expected)
