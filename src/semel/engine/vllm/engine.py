"""vLLM's `AsyncLLM` as semel's engine.

The order of three things is kept: a submission is validated, its items go into vLLM's item cache, it is added. vLLM
mirrors that cache in its engine core and trusts both copies to see the same order, so the last two happen under one
lock; and since a request that vLLM refuses after its items went in would leave the copies apart, vLLM's own
validation runs before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from semel.core import Contract, Prompt
from semel.engine.protocol import Output, Submission
from semel.engine.vllm.inputs import engine_input
from semel.engine.vllm.model import VllmModel
from semel.errors import EngineDead, EngineFailed, InvalidRequest
from semel.processing import HfProcessor, find_folder

__all__ = ["VllmEngine"]

logger = logging.getLogger(__name__)


class VllmEngine:
    """An engine that is vLLM, in processes of its own."""

    def __init__(self, llm: Any, model: VllmModel, contract: Contract) -> None:
        self._llm = llm
        self._model = model
        self._contract = contract
        self._order = asyncio.Lock()

    @classmethod
    async def start(cls, model: str, **engine_args: Any) -> Self:
        """Start vLLM. Every argument of vLLM's `AsyncEngineArgs` is taken under its own name."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return cls.embed(AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **engine_args)))

    @classmethod
    def embed(cls, llm: Any) -> Self:
        """Use an `AsyncLLM` that is running."""
        config = llm.model_config
        model = VllmModel.of(llm)
        return cls(
            llm,
            model,
            Contract(
                model=config.served_model_name or config.model,
                fingerprint=HfProcessor.load(find_folder(config.model), model.target).fingerprint,
                target=model.target,
                fields={modality: model.fields(modality) for modality in model.max_items},
                max_items=model.max_items,
                max_embeds=llm.input_processor.mm_encoder_cache_size,
                max_tokens=config.max_model_len,
            ),
        )

    @property
    def contract(self) -> Contract:
        """What this engine expects."""
        return self._contract

    async def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        """Stream the answer; closing the iterator aborts the request."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            collector = await self._submit(submission)
            finished = False
            try:
                while not finished:
                    result = collector.get_nowait() or await collector.get()
                    finished = result.finished
                    for output in _outputs(result):
                        yield output
            finally:
                if not finished:
                    await self._llm.abort(collector.request_id, internal=True)
                collector.close()
        except EngineDeadError as error:
            raise EngineDead("the engine has died; its log says why, and it has to be started again") from error

    async def reset(self) -> None:
        """Forget all cached items, embeddings and prefixes."""
        async with self._order:
            await self._llm.reset_mm_cache()
            await self._llm.reset_encoder_cache()
            await self._llm.reset_prefix_cache()

    async def close(self) -> None:
        """End the engine and its processes."""
        await asyncio.to_thread(self._llm.shutdown)

    async def _submit(self, submission: Submission) -> Any:
        params = _sampling_params(submission)
        prompt = engine_input(submission, self._contract, self._model)
        tasks = await self._llm.get_supported_tasks()
        self._validate(submission.request_id, prompt, params, tasks)
        async with self._order:
            injected = self._inject(submission.prompt, prompt)
            try:
                return await self._llm.add_request(submission.request_id, prompt, params)
            except BaseException:
                self._take_back(injected)
                raise

    def _validate(self, request_id: str, prompt: Mapping[str, Any], params: Any, tasks: Any) -> None:
        """vLLM's own checks of a request, without a trace."""
        with _refusals():
            self._llm.input_processor.process_inputs(request_id, prompt, params, tasks)

    def _inject(self, prompt: Prompt, engine_prompt: Mapping[str, Any]) -> list[str]:
        """Put the items into vLLM's item cache; those that its engine core holds leave the prompt.

        In the order in which the engine core does it: touch all, then take them as they stand in the prompt.
        """
        cache = self._llm.renderer.mm_processor_cache
        if cache is None or not prompt.items:
            return []
        decoder = engine_prompt.get("decoder_prompt", engine_prompt)
        positions = dict.fromkeys(decoder["mm_kwargs"], 0)
        hashes = [item.digest.hex() for item in prompt.items]
        fresh = [name for name in dict.fromkeys(hashes) if not cache.is_cached_item(name)]
        for name in hashes:
            cache.touch_sender_cache_item(name)
        for item, name in zip(prompt.items, hashes, strict=True):
            items = decoder["mm_kwargs"][item.modality]
            index = positions[item.modality]
            items[index], _ = cache.get_and_update_item((items[index], []), name)
            positions[item.modality] += 1
        self._llm.renderer.update_mm_cache_stats()
        return fresh

    def _take_back(self, injected: list[str]) -> None:
        cache = self._llm.renderer.mm_processor_cache
        for name in injected:
            cache.invalidate(name)


def _sampling_params(submission: Submission) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    with _refusals():
        return SamplingParams(**{**submission.sampling, "output_kind": RequestOutputKind.DELTA})


@contextmanager
def _refusals() -> Iterator[None]:
    """What vLLM refuses is the request's fault. Its messages speak of parameters and their values only."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, ValueError, TypeError) as error:
        raise InvalidRequest(str(error)) from error


def _outputs(result: Any) -> list[Output]:
    outputs = []
    for part in result.outputs:
        if part.finish_reason == "error":
            raise EngineFailed("the engine gave up on the request; sending it again may succeed")
        logprobs = part.logprobs and tuple(
            {id_: entry.logprob for id_, entry in step.items()} for step in part.logprobs
        )
        outputs.append(Output(part.index, part.text, tuple(part.token_ids), logprobs or None, part.finish_reason))
    return outputs
