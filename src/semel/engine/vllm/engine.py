"""vLLM's `AsyncLLM` as semel's engine.

The order of three things is kept: a submission is validated, its items go into vLLM's item cache, it is added. vLLM
mirrors that cache in its engine core and trusts both copies to see the same order, so the last two happen under one
lock; and since a request that vLLM refuses after its items went in would leave the copies apart, vLLM's own
validation runs before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from semel.core import Contract, Prompt
from semel.engine.protocol import Output, Submission
from semel.engine.vllm.inputs import engine_input
from semel.engine.vllm.model import VllmModel
from semel.errors import EngineDead, EngineFailed, InvalidRequest
from semel.processing import HfProcessor, find_folder

__all__ = ["VllmEngine", "VllmStream"]

logger = logging.getLogger(__name__)


class VllmEngine:
    """An engine that is vLLM, in processes of its own."""

    def __init__(self, llm: Any, model: VllmModel, contract: Contract) -> None:
        self._llm = llm
        self._model = model
        self._contract = contract
        self._defaults: Mapping[str, object] = llm.model_config.get_diff_sampling_param()
        self._order = asyncio.Lock()

    @classmethod
    def start(cls, arguments: Any) -> Self:
        """Start vLLM with its own `AsyncEngineArgs` (`parse_engine_flags` makes them of flags). Takes half a minute."""
        from vllm.v1.engine.async_llm import AsyncLLM

        return cls.embed(AsyncLLM.from_engine_args(arguments))

    @classmethod
    def embed(cls, llm: Any) -> Self:
        """Use an `AsyncLLM` that is running."""
        config = llm.model_config
        model = VllmModel.of(llm)
        folder = find_folder(config.model, revision=config.revision)
        return cls(
            llm,
            model,
            Contract(
                model=config.served_model_name or config.model,
                fingerprint=HfProcessor.load(folder, model.target).fingerprint,
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

    async def submit(self, submission: Submission) -> VllmStream:
        """Check a submission and hand it to vLLM."""
        params = _sampling_params({**self._defaults, **submission.sampling})
        prompt = engine_input(submission, self._contract, self._model)
        with _failures():
            tasks = await self._llm.get_supported_tasks()
            with _refusals():  # vLLM's own checks, which leave no trace
                self._llm.input_processor.process_inputs(submission.request_id, prompt, params, tasks)
            async with self._order:
                injected = self._inject(submission.prompt, prompt)
                try:
                    collector = await self._llm.add_request(submission.request_id, prompt, params)
                except BaseException:
                    self._take_back(injected)
                    await asyncio.shield(self._llm.abort(submission.request_id))
                    raise
        return VllmStream(self._llm, collector)

    async def reset(self) -> None:
        """Forget all cached items, embeddings and prefixes."""
        async with self._order:
            await self._llm.reset_mm_cache()
            await self._llm.reset_encoder_cache()
            self._model.known.forget()
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineFailed("the engine did not reset its prefix cache; try again when fewer requests run")

    async def close(self) -> None:
        """End the engine and its processes. Closing twice does no harm."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

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


class VllmStream:
    """The answer to one submission."""

    def __init__(self, llm: Any, collector: Any) -> None:
        self._llm = llm
        self._collector = collector
        self._finished = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs as they are generated."""
        with _failures():
            while not self._finished:
                result = self._collector.get_nowait() or await self._collector.get()
                self._finished = result.finished
                for output in _outputs(result):
                    yield output

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        self._collector.close()
        if not self._finished:
            self._finished = True
            await self._llm.abort(self._collector.request_id, internal=True)


def _sampling_params(sampling: Mapping[str, object]) -> Any:
    """vLLM's sampling parameters, decoded as its engine core will: a wrong type that is found only there is fatal."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    with _refusals():
        params = SamplingParams(**{**sampling, "output_kind": RequestOutputKind.DELTA})
        return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)


@contextmanager
def _refusals() -> Iterator[None]:
    """What vLLM refuses is the request's fault; of its words only those that it wrote for clients are passed on."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, msgspec.ValidationError) as error:
        raise InvalidRequest(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        logger.info("vLLM refused a request: %r", error)
        raise InvalidRequest("the engine refuses the sampling parameters: check their types and ranges") from error


@contextmanager
def _failures() -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("the engine has died; its log says why, and it has to be started again") from error


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
