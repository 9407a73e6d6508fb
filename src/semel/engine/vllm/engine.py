"""vLLM's `AsyncLLM` as semel's engine.

The order of three things is kept: a submission is validated, its items go into vLLM's item cache, it is added
(`request_intake`). vLLM mirrors that cache in its engine core and trusts both copies to see the same order, so the last
two happen under one lock; and since a request that vLLM refuses after its items went in would leave the copies apart,
vLLM's own validation and admission run before. Should they be apart all the same, the engine core gives up on a request
that refers to what it lacks; that is raised as `FeatureMissing`, and the same request with its features brings them
together.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from msgspec import UNSET

from semel.core import Contract, Digest, Feature, FeatureInfo, Modality, Submission
from semel.engine.progress import StepWatch
from semel.engine.protocol import ItemCacheWatcher
from semel.engine.vllm.adapters import VllmAdapters, tower_class
from semel.engine.vllm.arguments import configuration_refusals, create_config
from semel.engine.vllm.caches import EngineCaches
from semel.engine.vllm.compat.internals import skip_grammar_checks
from semel.engine.vllm.contract import build_contract
from semel.engine.vllm.control import VllmControl
from semel.engine.vllm.grammars.content import constrained_field
from semel.engine.vllm.grammars.limits import GrammarLimits
from semel.engine.vllm.grammars.trial import Grammars
from semel.engine.vllm.model.encoder_size import log_encoder_cache
from semel.engine.vllm.model.identity import encoder_identity
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.model.rendering import model_aliases
from semel.engine.vllm.model.self_test import SelfTest
from semel.engine.vllm.proof import INJECTION_REFUSAL, UNTESTED, prove
from semel.engine.vllm.requests.intake import RequestIntake
from semel.engine.vllm.requests.item_builder import ItemBuilder
from semel.engine.vllm.requests.item_cache import ItemCache
from semel.engine.vllm.requests.item_delivery import ItemDelivery
from semel.engine.vllm.requests.params import ParamsBuilder, PreparedSubmission
from semel.engine.vllm.requests.parsing import ParserFlags, Parsers
from semel.engine.vllm.requests.pooling import PoolingStream, describe_pooling
from semel.engine.vllm.requests.progress import StepCounter, kill_processes
from semel.engine.vllm.requests.sampling import sampling_params
from semel.engine.vllm.requests.stream import VllmStream, failures
from semel.engine.vllm.tier.host import HostTier
from semel.engine.vllm.tier.prefetch_params import set_prefetched
from semel.engine.vllm.warmup import SHORT_PROMPT, Warmup
from semel.errors import ConfigError, FeatureRejected, ModelNotFound, RequestError
from semel.fairness.turns import EngineWindow
from semel.processing import find_folder
from semel.processing.processor import ProcessorKind, load_processor

__all__ = ["VllmEngine", "VllmStream", "engine_window"]

_NO_PARSERS: Final = ParserFlags()
_GRAMMAR_LIMITS: Final = GrammarLimits()
_NO_SAMPLES: Final[Mapping[Modality, Feature]] = {}

logger = logging.getLogger(__name__)


class VllmEngine:
    """An engine that is vLLM, in processes of its own."""

    def __init__(
        self,
        llm: Any,
        model: VllmModel,
        contract: Contract,
        item_cache: ItemCache,
        parsers: Parsers,
        grammars: GrammarLimits = _GRAMMAR_LIMITS,
        samples: Mapping[Modality, Feature] = _NO_SAMPLES,
        tier: HostTier | None = None,
    ) -> None:
        self._llm = llm
        self._model = model
        self._contract = contract
        self._items = item_cache
        self._samples = samples
        compiling = None if model.is_encoder_decoder else self._compile  # no prompt without an item
        self._grammars = Grammars(llm.vllm_config, llm.input_processor.tokenizer, grammars, compiling)
        self._compiling = itertools.count()
        self._params = ParamsBuilder(llm.vllm_config, parsers, self._grammars)
        self._steps = StepCounter(llm)
        self._order = asyncio.Lock()
        self._builder = ItemBuilder(contract, model, item_cache)
        self._delivery = ItemDelivery(llm, model, item_cache, self._order)
        self._intake = RequestIntake(llm, item_cache, self._builder, self._delivery, self._order)
        self._caches = EngineCaches(llm, item_cache, model, self._order)
        self._tier = tier
        self.control = VllmControl(llm, self._caches, tier)
        self.adapters = None
        if llm.vllm_config.lora_config is not None:
            tower = tower_class(llm.vllm_config)
            self.adapters = VllmAdapters(llm, (contract.model, *contract.aliases), tower=tower)
            self.adapters.watchers.append(self._note_adapters)
            self._note_adapters()
        self.capabilities = UNTESTED
        if tier is not None:
            tier.fence = llm.is_sleeping

    @classmethod
    def start(
        cls,
        arguments: Any,
        *,
        processor: ProcessorKind = "auto",
        parsers: ParserFlags = _NO_PARSERS,
        grammars: GrammarLimits = _GRAMMAR_LIMITS,
    ) -> Self:
        """Start vLLM with its own `AsyncEngineArgs` (`parse_engine_flags` makes them of flags). Takes half a minute."""
        from vllm.v1.engine.async_llm import AsyncLLM

        from semel.engine.vllm.statistics import stat_loggers

        config = create_config(arguments)
        with configuration_refusals(arguments):
            llm = AsyncLLM.from_vllm_config(
                config,
                enable_log_requests=arguments.enable_log_requests,
                disable_log_stats=arguments.disable_log_stats,
                stat_loggers=stat_loggers(arguments),
            )
        log_encoder_cache(llm)
        names = model_aliases(arguments)
        return cls.embed(llm, processor=processor, parsers=parsers, grammars=grammars, aliases=names)

    @classmethod
    def embed(
        cls,
        llm: Any,
        *,
        processor: ProcessorKind = "auto",
        parsers: ParserFlags = _NO_PARSERS,
        grammars: GrammarLimits = _GRAMMAR_LIMITS,
        aliases: tuple[str, ...] = (),
    ) -> Self:
        """Use an `AsyncLLM` that is running; its features come from this kind of processor.

        `aliases` are names that clients may call the model by besides the one that vLLM has.
        """
        model = VllmModel.from_llm(llm)
        item_cache = ItemCache.from_llm(llm)
        folder = find_folder(llm.model_config.model, model.target.rendering)
        loaded = load_processor(processor, folder, model.target)
        contract = build_contract(llm, model, loaded, folder, parsers, cache_bytes=item_cache.capacity, aliases=aliases)
        verdict = SelfTest(loaded, model.processor, model, contract).run()
        contract = verdict.admitted(contract)
        tier = HostTier.from_config(llm.vllm_config)
        if tier is not None:
            tier.identify = partial(encoder_identity, llm.vllm_config, folder)
        return cls(llm, model, contract, item_cache, Parsers.from_llm(llm, parsers), grammars, verdict.features, tier)

    @property
    def contract(self) -> Contract:
        """The features and prompts that this engine expects."""
        return self._contract

    @property
    def progress(self) -> StepWatch:
        """Its steps; of an engine that does not report all of them, none and no request."""
        return self._steps.watch

    @property
    def item_cache(self) -> ItemCache:
        """vLLM's item cache, as this process mirrors it, and its totals."""
        return self._items

    @property
    def tier(self) -> HostTier | None:
        """The host's memory for encoder outputs; None if nobody wants to fetch into it or publish from it."""
        return self._tier

    @property
    def grammars(self) -> Grammars:
        """The trial of the schemas and grammars of requests."""
        return self._grammars

    @property
    def injection_refusal(self) -> str:
        """Why no item can be injected; empty if it can."""
        return INJECTION_REFUSAL if self.capabilities["injection"] == "off" else self._items.refusal

    @property
    def window(self) -> EngineWindow:
        """The sequences and tokens that vLLM takes at a time."""
        return engine_window(self._llm.vllm_config)

    def count_items(self, queries: int, hits: int) -> None:
        """Count lookups of the item cache in vLLM's own counters."""
        from semel.engine.vllm.statistics import count_items

        count_items(self._llm, queries, hits)

    async def log_statistics(self) -> None:
        """Log what vLLM's server does, as often, for ever: throughput, queues, hit rates."""
        from vllm import envs

        while True:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            await self._llm.do_log_stats()

    async def warm(self) -> None:
        """Let the engine do what it does for the first time, before a client's request makes it."""
        await self._describe_pooling()
        has_none = (
            self._contract.pooling is not UNSET
            or self._model.is_encoder_decoder
            or self._llm.input_processor.tokenizer is None
        )
        grammars = None if has_none else self._grammars  # no prompt without an item, or no grammars
        await Warmup(self, self._samples, self._delivery, grammars, self._tier).run()
        self.capabilities = await prove(self, self._llm, self._samples, self._tier)
        if self.capabilities["embedding_store"] == "off":
            self._tier = None

    async def load_adapters(self, modules: Sequence[Any]) -> None:
        """Load the adapters of the command line, which are vLLM's `LoRAModulePath`."""
        if self.adapters is not None:
            await self.adapters.load_modules(modules)
        elif modules:
            raise ConfigError("--lora-modules needs --enable-lora")

    def holds(self, digest: Digest) -> bool:
        """Return whether vLLM's item cache holds the item."""
        return digest in self._items

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return what is known of an item that is held."""
        return self._items.holding(digest)

    def watch(self, watcher: ItemCacheWatcher) -> None:
        """Tell the watcher of everything that is held, and from now on of every change."""
        self._items.watch(watcher)

    async def prepare(self, submission: Submission) -> Submission:
        """Compile what the answer is held to, before the request has a place in the engine."""
        return await self._params.prepare(submission)

    async def submit(self, submission: Submission) -> VllmStream:
        """Check a submission and submit it to vLLM. It owns its prefetched outputs from then on, even on errors."""
        if self._tier is None or not submission.prefetched_outputs:
            return await self._submit(submission)
        self._tier.submit(submission.prefetched_outputs)
        try:
            return await self._submit(submission)
        except BaseException:
            self._tier.end(submission.prefetched_outputs)
            raise

    async def _submit(self, submission: Submission) -> VllmStream:
        salt = self._caches.salt(submission.cache_salt)
        salted = submission if salt == submission.cache_salt else replace(submission, cache_salt=salt)
        built = await self._builder.build(salted)
        params, reader = await self._params.build(submission)
        if not submission.pools:
            set_prefetched(params, () if self._tier is None else submission.prefetched_outputs)
        options: dict[str, Any] = {
            "trace_headers": None if submission.trace is None else submission.trace.headers,
            "priority": submission.priority,
            **({} if reader is None else reader.engine),
        }
        if submission.adapter is not None:
            options["lora_request"] = self._adapter(submission.adapter)
        with failures():
            collector, admission = await self._intake.add(submission, built, params, options)
        if admission.queries:
            self.count_items(admission.queries, admission.hits)
        self._steps.review()
        kind = PoolingStream if submission.pools else VllmStream
        stream = kind(self._llm, collector, self._items, admission.referred, reader, self._steps)
        if not submission.pools and params.structured_outputs is not None:
            stream.form = constrained_field(submission) or "structured_outputs"
            stream.has_drafts = self._llm.vllm_config.speculative_config is not None
        if self._tier is not None and submission.prefetched_outputs:
            stream.on_close = partial(self._tier.end, submission.prefetched_outputs)
        return stream

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        """Put an item into vLLM's item cache, by a request that is dropped before it is scheduled."""
        items = {digest: feature}
        submission = Submission(
            f"inject-{digest.hex()}", self._delivery.shortest_prompt(items), items, self._delivery.sampling
        )
        with failures():
            try:
                prompt = (await self._builder.build(submission)).prompt
                request = await self._delivery.validate(submission, prompt)
            except RequestError as error:
                raise FeatureRejected(f"no prompt can have the {feature.modality} feature: {error}") from error
            async with self._order:
                if digest in self._items or not self._items.fits(feature):
                    return False
                await self._delivery.show(submission, prompt, request)
        return True

    async def reset(self) -> None:
        """Forget all cached items, embeddings and prefixes."""
        with failures():
            await asyncio.shield(self._caches.reset())  # half a reset would leave the item cache and its mirror apart

    def kill(self) -> None:
        """End the engine's processes at once, also stopped ones."""
        if self._llm is not None:
            kill_processes(self._llm)

    def share(self) -> None:
        """Let vLLM's own route use the engine next to this one; called on the engine's event loop."""
        self._items.share(self._llm)

    async def release(self) -> None:
        """Stop using the engine, which runs on: it is another's."""
        self._llm = None
        self._builder.close()
        await self._grammars.close()

    async def close(self) -> None:
        """End the engine and its processes. Closing twice does no harm."""
        llm = self._llm
        await self.release()
        if llm is not None:
            if llm.output_handler is not None and not llm.output_processor.has_unfinished_requests():
                llm.output_handler.cancel()  # or it takes processes that end slowly for dead ones, and logs that
            await asyncio.to_thread(llm.shutdown)

    def _note_adapters(self) -> None:
        if self.adapters is not None:
            self._contract = self._builder.contract = replace(self._contract, adapters=self.adapters.loaded)

    def _adapter(self, name: str) -> Any:
        """Return vLLM's request for an adapter."""
        if self.adapters is None:
            raise ModelNotFound.of("model", "the worker takes no adapters (--enable-lora)")
        return self.adapters.request(name)

    async def _describe_pooling(self) -> None:
        """Put into the contract what the model pools: its engine core says so only when it runs."""
        config, tasks = self._llm.model_config, await self._llm.get_supported_tasks()
        folder = find_folder(config.model, self._model.target.rendering)
        if (pooling := describe_pooling(config, tasks, folder)) is not None:
            self._contract = self._builder.contract = replace(self._contract, pooling=pooling)
            self._delivery.sampling = {"task": pooling.task}

    async def _compile(self, outputs: Any, cache_salt: str | None) -> None:
        """Let the engine compile a grammar into its cache, by a request of one token of the tenant with this salt."""
        submission = Submission(f"grammar-{next(self._compiling)}", SHORT_PROMPT, {}, cache_salt=cache_salt)
        params = sampling_params({"max_tokens": 1})
        params.structured_outputs = outputs
        skip_grammar_checks(params)
        stream = await self.submit(PreparedSubmission.from_submission(submission, params, None))
        try:
            async for _ in stream:
                pass
        finally:
            await asyncio.shield(stream.close())


def engine_window(config: Any) -> EngineWindow:
    """Return what an engine with this configuration of vLLM's takes at a time."""
    scheduler = config.scheduler_config
    return EngineWindow(
        sequences=scheduler.max_num_active_seqs or scheduler.max_num_seqs,
        step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        max_sequences=scheduler.max_num_queued_reqs,
        max_prompt_tokens=scheduler.max_num_queued_tokens,
    )
