"""The unmodified `cohere` client embeds with semel and with vLLM's server: the same prompts, parameters and answers.

Neither has an engine core: what would get the prompt notes its tokens, and gives zeros.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from semel.compose import compose_pipeline
from semel.core import Key, PoolingModel, Submission
from semel.lab.testing.engine import EchoEngine, EchoStream
from tests.conftest import Folder
from tests.engine.coreless import without_core
from tests.engine.parity import draw_image, image_part
from tests.engine.test_pooling import INSTRUCTIONS, START, as_cohere
from tests.engine.vllm_server import vllm_client
from tests.frontend.rig import CONTRACT
from tests.frontend.rig import rig as frontend_rig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Sent = list[tuple[list[int], Any]]
NUMBERS = 16
EMBED = PoolingModel("embed", ("embed",), scores=True, instructions=INSTRUCTIONS)


class NotingEngine(EchoEngine):
    """Notes the tokens and dimensions of what it gets."""

    sent: Sent

    async def submit(self, submission: Submission) -> EchoStream:
        self.sent.append((list(submission.prompt.token_ids), submission.sampling.get("dimensions")))
        return await super().submit(submission)


def bare_engine(folder: Path, sent: Sent) -> Any:
    """vLLM's engine without a core, which notes the same."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.outputs import PoolingOutput, PoolingRequestOutput
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    words = ["--model", str(folder), *START.common, *START.flags]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    with without_core():
        llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))

    async def tasks() -> tuple[str, ...]:
        return "embed", "token_embed"

    async def encode(prompt: Any, pooling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        tokens = list(prompt["prompt_token_ids"])
        sent.append((tokens, pooling_params.dimensions))
        pooled = PoolingOutput(torch.zeros(NUMBERS))
        yield PoolingRequestOutput(
            request_id=request_id, outputs=pooled, prompt_token_ids=tokens, num_cached_tokens=0, finished=True
        )

    llm.get_supported_tasks, llm.encode = tasks, encode
    return llm


def calls() -> list[dict[str, Any]]:
    image = image_part(draw_image(np.random.default_rng(40)))["image_url"]["url"]
    mixed = {"content": [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": image}}]}
    long = ["what is red " * 500]
    return [
        {"texts": ["what is red", "12"], "input_type": "search_document"},
        {"texts": ["what is red"], "input_type": "search_query"},
        {"images": [image], "input_type": "search_document"},
        {"inputs": [mixed], "input_type": "search_query"},
        {"texts": ["what is red"], "input_type": "search_document", "output_dimension": 32},
        {"texts": ["été 你好"], "input_type": "search_document", "embedding_types": ["float", "ubinary"]},
        {"texts": long, "input_type": "search_document", "max_tokens": 64, "truncate": "START"},
        {"texts": long, "input_type": "search_document", "max_tokens": 64},
    ]


async def test_the_cohere_client_has_the_prompts_and_members_of_vllms_server(tiny: Folder, tmp_path: Path) -> None:
    folder = tiny(START.model)
    theirs, ours = Sent(), Sent()
    llm = bare_engine(folder, theirs)

    def make_engine(contract: Any) -> EchoEngine:
        engine = NotingEngine(replace(contract, cache_bytes=1 << 30, pooling=EMBED))
        engine.sent, engine.pooled_shape = ours, (NUMBERS,)
        return engine

    rig: Any = SimpleNamespace(folder=folder, llm=llm, engine=SimpleNamespace(contract=CONTRACT))
    pipeline = compose_pipeline(folder, CONTRACT.target, Key(bytes(32)))
    try:
        async with (
            vllm_client(rig, START) as vllm,
            frontend_rig(tmp_path, pipeline, make_engine=make_engine) as app,
        ):
            for call in calls():
                theirs.clear()
                ours.clear()
                expected = await as_cohere(vllm).v2.embed(model="tiny", **call)
                found = await as_cohere(app.client).v2.embed(model="tiny", **call)
                assert sorted(ours) == sorted(theirs), call
                assert (found.texts, found.response_type) == (expected.texts, expected.response_type)
                assert found.meta == expected.meta
            theirs.clear()
            ours.clear()
            cut: dict[str, Any] = {"texts": ["what is red " * 500], "input_type": "search_query", "max_tokens": 64}
            for client in (vllm, app.client):
                await as_cohere(client).v2.embed(model="tiny", **cut)
            assert ours != theirs, "the control, and documented: semel does not cut what a chat template has written"
    finally:
        llm.shutdown()
