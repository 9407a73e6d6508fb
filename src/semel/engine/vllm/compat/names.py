"""Every name of vLLM that semel uses, in one table: where it is, how it is called, since when, and what for.

vLLM promises none of them. They are looked up in its source before an engine loads (`versions.check_vllm`), and
`scripts/compat VERSION --static` compares them between versions. A name that a version lacks has its `since` or its
`until`, and what stands in for it is in `compat`. A test finds every name that semel imports or uses and holds it
against this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["NAMES", "Name", "names_of", "to_release"]

_FIRST: Final = "0.31"


@dataclass(frozen=True, slots=True)
class Name:
    """A name of vLLM that semel uses."""

    module: str
    path: str
    """In the module: a name, or one and an attribute of it."""

    parameters: tuple[str, ...]
    """Those that semel passes or overrides, by name; an attribute has none."""

    purpose: str
    since: str = _FIRST
    """The first release with it, of those that semel runs with."""

    until: str = ""
    """The last release with it, if later ones have none."""

    def __str__(self) -> str:
        call = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.module}.{self.path}{call}"

    def is_in(self, release: str) -> bool:
        """Return whether a release, such as 0.32, has it."""
        number = _number(release)
        return _number(self.since) <= number and (not self.until or number <= _number(self.until))


def to_release(version: str) -> str:
    """Return the release of a version: 0.32 of 0.32.1+cpu."""
    return ".".join(version.split(".")[:2])


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def names_of(
    module: str, owner: str, purpose: str, *entries: str, since: str = _FIRST, until: str = ""
) -> Iterator[Name]:
    """Yield names of a module, or attributes of one of its classes: `name` or `name(parameter, parameter)`."""
    for entry in entries:
        name, _, rest = entry.partition("(")
        parameters = tuple(rest.rstrip(")").split(", ")) if rest else ()
        yield Name(
            f"vllm.{module}".rstrip("."), f"{owner}.{name}" if owner else name, parameters, purpose, since, until
        )


_of = names_of

NAMES: Final[tuple[Name, ...]] = (
    # Flags and configuration.
    *_of("entrypoints.launchers.cli_args", "", "the server's flags", "FrontendArgs", "make_arg_parser", since="0.32"),
    *_of("entrypoints.launchers.cli_args", "", "adapters", "LoRAParserAction", since="0.32"),
    *_of("engine.arg_utils", "", "the engine's flags", "AsyncEngineArgs"),
    *_of(
        *("engine.arg_utils", "AsyncEngineArgs", "the engine's flags"),
        *("add_cli_args(parser)", "from_cli_args(args)", "create_engine_config(usage_context)", "data_parallel_rank"),
        *("data_parallel_size", "ec_manager_config", "scheduler_cls", "worker_cls", "runner", "disable_log_stats"),
        *("structured_outputs_config", "otlp_traces_endpoint", "media_io_kwargs", "hf_overrides", "served_model_name"),
        *("enable_mm_embeds", "enable_prompt_embeds", "hf_config_path", "mm_processor_device", "skip_tokenizer_init"),
        *("model_class_overrides", "video_pruning_method", "video_pruning_rate", "enable_log_requests"),
    ),
    *_of("engine.arg_utils", "", "the engine's flags, read from the source", "EngineArgs"),
    *_of("tool_parsers", "", "the names of parsers", "_TOOL_PARSERS_TO_REGISTER", since="0.32"),
    *_of("reasoning", "", "the names of parsers", "_REASONING_PARSERS_TO_REGISTER", since="0.32"),
    *_of("utils.argparse_utils", "", "the engine's flags", "FlexibleArgumentParser"),
    *_of("usage.usage_lib", "", "the engine's configuration", "UsageContext"),
    *_of("platforms", "", "what differs on a CPU", "current_platform"),
    *_of("platforms.interface", "Platform", "what differs on a CPU", "is_cpu"),
    *_of("platforms.interface", "Platform", "the encoder's identity", "get_device_name", "get_device_capability"),
    *_of("plugins", "", "models that plug-ins add", "load_general_plugins"),
    *_of("utils.import_utils", "", "the worker of this platform", "resolve_obj_by_qualname(qualname)"),
    *_of("transformers_utils.repo_utils", "", "models in Mistral's own format", "any_pattern_in_repo_files"),
    *_of("transformers_utils.repo_utils", "", "models in Mistral's own format", "is_mistral_model_repo"),
    *_of("model_executor.model_loader", "", "how a model writes its items", "get_model_architecture(model_config)"),
    *_of("config", "", "a model without an engine", "ModelConfig"),
    *_of(
        *("config", "ModelConfig", "what the contract says"),
        *("runner_type", "is_moe", "get_diff_sampling_param", "generation_config", "override_generation_config"),
        *("max_model_len", "hf_config", "get_multimodal_config", "is_encoder_decoder", "is_multimodal_model"),
        *("is_multimodal_raw_input_only_model", "served_model_name", "tokenizer", "tokenizer_mode", "code_revision"),
        *("config_format", "model_impl", "tokenizer_revision", "trust_remote_code", "revision", "dtype"),
        *("supports_multimodal_inputs", "get_inputs_embeds_size"),
        "quantization",
    ),
    *_of(
        *("config", "VllmConfig", "what the engine does"),
        *("model_config", "scheduler_config", "parallel_config", "structured_outputs_config", "ec_manager_config"),
        *("ec_transfer_config", "use_v2_model_runner", "load_config"),
    ),
    *_of(
        *("config", "SchedulerConfig", "what the engine takes at a time"),
        *("max_num_active_seqs", "max_num_seqs", "max_num_scheduled_tokens", "max_num_batched_tokens", "policy"),
        *("max_num_queued_reqs", "max_num_queued_tokens", "async_scheduling", "disable_chunked_mm_input"),
        "encoder_cache_size",
    ),
    *_of(
        *("config", "ParallelConfig", "whether items can be shipped late"),
        *("worker_cls", "distributed_executor_backend", "pipeline_parallel_size", "data_parallel_index"),
        *("tensor_parallel_size", "prefill_context_parallel_size", "rank"),
    ),
    *_of(
        *("config.multimodal", "MultiModalConfig", "what features are made for"),
        *("mm_device_do_normalize", "mm_processor_kwargs", "media_io_kwargs", "interleave_mm_strings"),
        *("enable_mm_embeds", "allow_missing_mm_embeddings"),
    ),
    *_of(
        *("config.multimodal", "MultiModalConfig", "the encoder's identity", "compute_hash", "mm_encoder_attn_backend"),
        *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_tp_mode", "video_pruning_rate"),
        since="0.32",
    ),
    *_of(
        *("config", "CompilationConfig", "the encoder's identity", "mode", "backend", "custom_ops"),
        *("compile_mm_encoder", "cudagraph_mm_encoder"),
        since="0.32",
    ),
    *_of("model_executor.models.utils", "WeightsMapper", "the encoder's identity", "map_name(key)", since="0.32"),
    *_of("config.multimodal", "", "items that vLLM makes up", "AudioDummyOptions(length)"),
    *_of("config.multimodal", "", "items that vLLM makes up", "ImageDummyOptions(width, height)"),
    *_of("config.multimodal", "", "items that vLLM makes up", "VideoDummyOptions(num_frames, width, height)"),
    *_of("config.multimodal", "", "items that vLLM makes up", "MultiModalDummyOptions"),
    # Adapters.
    *_of("v1.engine.async_llm", "AsyncLLM", "adapters", "add_lora(lora_request)", "remove_lora(lora_id)", since="0.32"),
    *_of("v1.engine.async_llm", "AsyncLLM", "adapters", "add_request(lora_request)", since="0.32"),
    *_of(
        "lora.request",
        "",
        "adapters",
        "LoRARequest(lora_name, lora_int_id, lora_path, is_3d_lora_weight)",
        since="0.32",
    ),
    *_of("lora.utils", "", "adapters", "get_adapter_absolute_path(lora_path)", since="0.32"),
    *_of("lora.utils", "", "adapters", "parse_fine_tuned_lora_name(name, weights_mapper)", since="0.32"),
    *_of(
        *("v1.engine.input_processor", "InputProcessor", "adapters"),
        "_get_mm_identifier(mm_hash, lora_request)",
        since="0.32",
    ),
    *_of("config.vllm", "VllmConfig", "adapters", "lora_config", since="0.32"),
    *_of("config.lora", "LoRAConfig", "adapters", "enable_tower_connector_lora", "default_mm_loras", since="0.32"),
    # The engine.
    *_of("v1.engine.async_llm", "", "the engine", "AsyncLLM"),
    *_of("v1.engine.async_llm", "AsyncLLM", "what came for a request that the engine never got", "is_sleeping"),
    *_of(
        *("v1.engine.async_llm", "AsyncLLM", "the engine"),
        "from_vllm_config(vllm_config, usage_context, enable_log_requests, disable_log_stats, stat_loggers)",
        "add_request(request_id, prompt, params, trace_headers, priority, reasoning_ended, reasoning_parser_kwargs)",
        *("abort(request_id, internal)", "check_admission(n, request_id)", "get_supported_tasks", "shutdown"),
        *("reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache", "model_config", "vllm_config", "renderer"),
        *("input_processor", "engine_core", "output_handler", "output_processor", "log_stats"),
        *("do_log_stats", "logger_manager"),
    ),
    *_of(
        *("v1.engine.async_llm", "AsyncLLM", "pause, sleep and new weights"),
        *("pause_generation(mode, clear_cache)", "resume_generation", "is_paused", "sleep(level, mode)"),
        *("wake_up(tags)", "release_kv_cache_memory", "collective_rpc(method, timeout, args, kwargs)"),
        *("init_weight_transfer_engine(request)", "shutdown_weight_transfer_engine", "start_weight_update"),
        *("start_draft_weight_update", "update_weights(request)", "finish_weight_update(weight_version)"),
        *("update_weight_version(new_version)", "get_weight_version", "compute_weight_checksums"),
        "reset_prefix_cache(reset_connector)",
        since="0.32",
    ),
    *_of(
        *("distributed.weight_transfer.base", "", "new weights", "WeightTransferInitRequest(init_info)"),
        "WeightTransferUpdateRequest(update_info)",
        since="0.32",
    ),
    *_of("outputs", "CompletionOutput", "answers name their weights", "weight_versions", since="0.32"),
    *_of("v1.request", "Request", "new weights", "skip_reading_prefix_cache", "num_preemptions", since="0.32"),
    *_of("", "", "how often statistics are logged", "envs"),
    *_of("v1.metrics.loggers", "", "statistics", "PrometheusStatLogger"),
    *_of("v1.metrics.loggers", "StatLoggerManager", "statistics", "engine_indexes"),
    *_of(
        *("v1.metrics.loggers", "StatLoggerManager", "statistics"),
        "record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    ),
    *_of("v1.metrics.stats", "", "statistics", "MultiModalCacheStats"),
    *_of("v1.metrics.stats", "MultiModalCacheStats", "statistics", "record(num_queries, num_hits)"),
    *_of("parser.metrics", "", "statistics", "init_parser_metrics(model_name)"),
    *_of(
        *("v1.engine.input_processor", "InputProcessor", "vLLM's checks of a request"),
        *("process_inputs(request_id, prompt, params, supported_tasks)", "assign_request_id(request)"),
        *("mm_encoder_cache_size", "tokenizer"),
    ),
    *_of("v1.engine.output_processor", "OutputProcessor", "the engine's end", "has_unfinished_requests"),
    *_of("v1.engine.output_processor", "RequestOutputCollector", "answers", "get", "request_id"),
    *_of("v1.engine.core_client", "AsyncMPClient", "items without a request", "add_request_async(request)"),
    *_of("v1.engine.core_client", "AsyncMPClient", "a hung engine is noticed", "get_output_async"),
    *_of("v1.engine.core_client", "AsyncMPClient", "pauses are no hangs", "_call_utility_async(method)"),
    *_of("v1.engine.core_client", "AsyncMPClient", "the engine's processes", "resources"),
    *_of("v1.engine.core_client", "BackgroundResources", "the engine's processes", "engine_manager"),
    *_of("v1.engine.utils", "CoreEngineProcManager", "the engine's processes", "processes"),
    *_of("v1.engine", "", "items without a request", "EngineCoreRequest(abort_immediately)"),
    *_of("v1.engine.exceptions", "", "what the engine raises", "EngineDeadError"),
    *_of("exceptions", "", "what vLLM refuses", "VLLMClientError", "MaxQueuedTokensError", "QueueOverflowError"),
    *_of("outputs", "RequestOutput", "answers", "num_cached_tokens", "num_cache_creation_tokens", "prompt_logprobs"),
    *_of("outputs", "RequestOutput", "answers", "prompt_token_ids", "outputs"),
    *_of("renderers.base", "BaseRenderer", "the engine's item cache and tokenizer", "mm_processor_cache", "tokenizer"),
    *_of("inputs", "", "prompts", "tokens_input(prompt_token_ids, cache_salt)"),
    *_of("inputs", "", "prompts", "mm_input(prompt_token_ids, mm_kwargs, mm_hashes, mm_placeholders, cache_salt)"),
    # Sampling, grammars, parsers of answers.
    *_of("sampling_params", "", "sampling", "SamplingParams", "RequestOutputKind", "StructuredOutputsParams"),
    *_of("sampling_params", "", "sampling", "RepetitionDetectionParams"),
    *_of("sampling_params", "SamplingParams", "sampling", "from_optional(skip_clone, stream_interval)"),
    *_of("sampling_params", "SamplingParams", "sampling", "_all_stop_token_ids"),
    *_of("sampling_params", "SamplingParams", "grammars are checked once", "_validate_structured_outputs"),
    *_of(
        "entrypoints.generate.base.protocol",
        "",
        "grammars",
        "validate_structured_outputs_structural_tag(structured_outputs)",
    ),
    *_of("v1.structured_output.utils", "", "grammars", "choice_as_grammar(choice)", "grammar_is_likely_lark"),
    # Pooling.
    *_of("pooling_params", "", "pooling", "PoolingParams", since="0.32"),
    *_of("pooling_params", "PoolingParams", "pooling", "task", "dimensions", "use_activation", since="0.32"),
    *_of("config", "ModelConfig", "pooling", "get_pooling_task(supported_tasks)", "pooler_config", since="0.32"),
    *_of("config", "ModelConfig", "pairs that are scored", "use_sep_token", since="0.32"),
    *_of("config", "PoolerConfig", "pooling", "enable_chunked_processing", since="0.32"),
    *_of("outputs", "PoolingRequestOutput", "pooling", "outputs", "finished", "error", since="0.32"),
    *_of("outputs", "PoolingRequestOutput", "pooling", "num_cached_tokens", since="0.32"),
    *_of("outputs", "PoolingOutput", "pooling", "data", since="0.32"),
    *_of("v1.engine", "", "failures of requests that pool", "FinishReason", since="0.32"),
    *_of("v1.engine", "", "failures of requests that pool", "EngineCoreOutput(pooling_output)", since="0.32"),
    *_of("parser", "", "tools and reasoning", "ParserManager"),
    *_of(
        *("parser", "ParserManager", "tools and reasoning"),
        "get_parser(tool_parser_name, reasoning_parser_name, enable_auto_tools, tool_strict_level, model_name, "
        "is_harmony)",
    ),
    *_of("parser", "ParserManager", "a tokenizer that no parser takes", "get_parser(tokenizer)", since="0.32"),
    *_of(
        *("parser.abstract_parser", "Parser", "tools and reasoning"),
        *("adjust_request(request)", "count_reasoning_tokens(token_ids)", "reasoning_parser", "tool_parser_cls"),
        *("parse(model_output, request, enable_auto_tools, model_output_token_ids)", "reasoning_parser_cls"),
        *("parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished)", "is_reasoning_end"),
    ),
    *_of(
        "parser.abstract_parser",
        "Parser",
        "tools and reasoning",
        "set_prompt_token_ids(prompt_token_ids)",
        since="0.32",
    ),
    *_of("parser.abstract_parser", "Parser", "tools and reasoning", "always_adjust_request", since="0.32"),
    *_of("reasoning", "", "parsers of the operator's", "ReasoningParserManager"),
    *_of("tool_parsers", "", "parsers of the operator's", "ToolParserManager"),
    *_of("renderers.chat_utils", "", "the ids of tool calls", "make_tool_call_id", since="0.32"),
    *_of("entrypoints.chat_utils", "", "the ids of tool calls", "make_tool_call_id", until="0.31"),
    *_of("entrypoints.openai.chat_completion.protocol", "", "tools and reasoning", "ChatCompletionRequest"),
    *_of(
        *("entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest", "tools and reasoning"),
        *("build_chat_params", "extract_structured_outputs", "include_reasoning", "_grammar_from_parser"),
    ),
    *_of(
        *("entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest", "tools and reasoning"),
        "resolve_reasoning_ended(parser, prompt_token_ids)",
        since="0.32",
    ),
    # A model's processor.
    *_of("multimodal", "", "a model's processor", "MULTIMODAL_REGISTRY", "video"),
    *_of(
        "multimodal.registry", "MultiModalRegistry", "a model's processor", "create_processor(model_config, tokenizer)"
    ),
    *_of("multimodal.processing", "", "a model's processor", "BaseMultiModalProcessor"),
    *_of(
        *("multimodal.processing", "BaseMultiModalProcessor", "items and prompts"),
        *("apply(inputs, timing_ctx)", "info", "dummy_inputs", "data_parser", "_get_prompt_updates"),
        *("_apply_hf_processor_main", "_get_mm_fields_config", "_get_mm_prompt_updates", "_find_mm_placeholders"),
        *("_recompute_cached_prompt_update", "_cached_apply_hf_processor", "_merge_mm_kwargs"),
        *("_apply_prompt_updates", "_apply_prompt_updates_via_text", "_apply_token_matches", "_iter_text_matches"),
        *("_apply_token_matches_with_placeholders", "_bind_and_group_updates", "_matched_updates_from_result"),
        *("_maybe_apply_prompt_updates", "_postprocess_prompt"),
    ),
    *_of(
        *("multimodal.processing.context", "BaseProcessingInfo", "items and prompts"),
        *("allowed_mm_limits", "supported_mm_limits", "parse_mm_data(mm_data, validate)", "get_tokenizer"),
        *("get_hf_processor", "ctx"),
    ),
    *_of("multimodal.processing.context", "InputProcessingContext", "items and prompts", "get_mm_config"),
    *_of("multimodal.processing.context", "", "items and prompts", "TimingContext(enabled)"),
    *_of("multimodal.processing.inputs", "", "items and prompts", "ProcessorInputs(cache)"),
    *_of("multimodal.processing.dummy_inputs", "BaseDummyInputsBuilder", "items that vLLM makes up", "get_dummy_text"),
    *_of(
        "multimodal.processing.dummy_inputs", "BaseDummyInputsBuilder", "items that vLLM makes up", "get_dummy_mm_data"
    ),
    *_of("multimodal.processing", "", "prompts", "PromptUpdateDetails(full, is_embed)"),
    *_of("multimodal.processing.processor", "", "prompts", "UpdateMode", "iter_token_matches"),
    *_of("multimodal.parse", "", "items", "MultiModalDataItems"),
    *_of(
        *("multimodal.inputs", "", "items"),
        *("MultiModalBatchedField", "MultiModalSharedField", "MultiModalFieldElem(data, field)", "PlaceholderRange"),
        *("MultiModalKwargsItem", "MultiModalKwargsItems"),
    ),
    *_of("multimodal.inputs", "MultiModalKwargsItems", "items", "from_hf_inputs(hf_inputs, config_by_key)"),
    *_of("multimodal.inputs", "MultiModalFieldConfig", "items", "build_elems", "modality"),
    *_of("multimodal.inputs", "BaseMultiModalField", "what of an item is shipped late", "keep_on_cpu"),
    *_of("multimodal.inputs", "PlaceholderRange", "items", "offset", "length", "is_embed", "get_num_embeds"),
    *_of("multimodal.inputs", "MultiModalFeatureSpec", "items", "data", "modality", "identifier", "mm_position"),
    *_of("multimodal.utils", "", "an encoder's output has its width", "group_and_batch_mm_kwargs(device)"),
    *_of("multimodal.encoder_budget", "MultiModalBudget", "an encoder's output has its width", "processor"),
    *_of("multimodal.media", "", "videos", "ImageMediaIO", "VideoMediaIO", "MediaConnector(media_io_kwargs)"),
    *_of("multimodal.media", "VideoMediaIO", "videos", "video_loader", "num_frames", "kwargs"),
    *_of("multimodal.media", "VideoMediaIO", "videos", "merge_kwargs(default_kwargs, runtime_kwargs)"),
    *_of("multimodal.media", "VideoMediaIO", "videos", "load_base64(media_type, data)"),
    *_of("multimodal.video", "", "videos", "VideoLoader", "decode_video", "get_video_loader_backend_for_processor"),
    *_of(
        "multimodal.video", "VideoLoader", "videos", "_prepare_source(source)", "load_bytes(num_frames)", "read_frames"
    ),
    *_of("multimodal.video", "VideoLoader", "videos", "compute_frames_index_to_sample(source, target)"),
    *_of("multimodal.video_decoders", "", "videos", "VideoSourceMetadata"),
    *_of("transformers_utils.processor", "", "videos", "get_video_processor_cls_name"),
    # The item cache.
    *_of("multimodal.cache.base", "", "what the engine holds", "MultiModalCache"),
    *_of("multimodal.cache.base", "MultiModalCache", "what the engine holds", "get_item_size(value)"),
    *_of(
        *("multimodal.cache.lru", "LruKeyReplicatedSenderCache", "what the engine holds"),
        *("_cache", "touch_sender_cache_item(mm_hash)", "get_and_update_item(mm_item, mm_hash)", "invalidate"),
    ),
    *_of("utils.cache", "LRUCache", "what the engine holds no more", "_on_remove(key, value)"),
    # The plug-ins: encoder cache, schedulers, worker.
    *_of("v1.core.encoder_cache_manager", "", "the encoder cache", "EncoderCacheManager", "EncoderDecoderCacheManager"),
    *_of(
        *("v1.core.encoder_cache_manager", "EncoderCacheManager", "the encoder cache"),
        *("create_manager(cache_size, vllm_config)", "reset", "check_and_update_cache(request, input_id)"),
        "can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)",
        *("get_cached_num_encoder_embeds", "allocate(request, input_id)", "get_cached_input_ids(request)"),
        *("free_encoder_input(request, input_id)", "free(request)", "get_freed_mm_hashes", "cache_size", "cached"),
        *("freeable", "freed", "num_embeds_by_hash", "num_free_slots", "num_freeable_slots"),
    ),
    *_of("config.ec_manager_config", "", "items that are shipped late", "EncoderCacheManagerMetadata"),
    *_of(
        *("config.ec_manager_config", "EncoderCacheManagerConfig", "the encoder cache"),
        *("encoder_cache_manager_cls", "manager_config"),
    ),
    # The proof at start.
    *_of("v1.engine.core", "", "the proof at start", "EngineCore"),
    *_of("v1.engine.core", "EngineCore", "the proof at start", "scheduler"),
    *_of("v1.engine.core_client", "AsyncMPClient", "the proof at start", "call_utility_async(method)"),
    *_of("v1.engine.async_llm", "AsyncLLM", "the proof at start", "collective_rpc(method, timeout, args)"),
    *_of("v1.core.sched.scheduler", "Scheduler", "the proof at start", "max_num_scheduled_tokens"),
    *_of("v1.worker.gpu.mm.encoder_cache", "EncoderCache", "the proof at start", "encoder_outputs"),
    # The embedding tier.
    *_of("distributed.ec_transfer", "", "the embedding tier", "get_ec_transfer", since="0.32"),
    *_of(
        *("distributed.ec_transfer.ec_connector.base", "", "the embedding tier", "ECConnectorBase"),
        *("ECConnectorMetadata", "ECConnectorRole", "ECConnectorWorkerMetadata"),
        since="0.32",
    ),
    *_of(
        *("distributed.ec_transfer.ec_connector.base", "ECConnectorBase", "the embedding tier"),
        *("ensure_cache_available(request, num_computed_tokens)", "has_cache_item(identifier)"),
        *("update_state_after_alloc(request, index)", "build_connector_meta(scheduler_output)"),
        "request_finished(request)",
        *("update_connector_output(connector_output)", "start_load_caches(encoder_cache)", "shutdown"),
        *("save_caches(encoder_cache, mm_hash)", "build_connector_worker_meta", "_connector_metadata"),
        "has_pending_push_work",
        since="0.32",
    ),
    *_of(
        *("config", "ECTransferConfig", "the embedding tier", "ec_connector", "ec_connector_module_path", "ec_role"),
        "ec_connector_extra_config",
        since="0.32",
    ),
    *_of("v1.outputs", "ECConnectorOutput", "the embedding tier", "ec_connector_worker_meta", since="0.32"),
    *_of("v1.outputs", "", "copies that end without a request", "ECConnectorOutput", since="0.32"),
    *_of("v1.outputs", "ModelRunnerOutput", "copies that end without a request", "with_ec_conn_output", since="0.32"),
    *_of(
        *("v1.core.sched.output", "SchedulerOutput", "the embedding tier", "ec_connector_metadata"),
        since="0.32",
    ),
    *_of(
        *("distributed.ec_transfer.ec_connector.cpu.worker", "ECCPUWorker", "the embedding tier on GPUs"),
        *("save_caches(encoder_cache, mm_hash, connector_metadata)", "flush_saves", "build_connector_worker_meta"),
        *("start_load_caches(encoder_cache, connector_metadata)", "shutdown", "_region", "_is_save_rank"),
        since="0.32",
    ),
    *_of(
        *("distributed.ec_transfer.ec_connector.cpu.ec_shared_region", "ECSharedRegion", "the embedding tier on GPUs"),
        *("_is_creator", "_mmap_path", "_fd"),
        since="0.32",
    ),
    *_of(
        *("distributed.ec_transfer.ec_connector.cpu.worker", "", "the embedding tier on GPUs", "ECCPUWorker"),
        since="0.32",
    ),
    *_of(
        *("distributed.ec_transfer.ec_connector.cpu.common", "", "the embedding tier on GPUs"),
        "ECCPUConnectorMetadata(saves, loads)",
        since="0.32",
    ),
    *_of("v1.core.sched.scheduler", "Scheduler", "new weights reach the embedding tier", "reset_encoder_cache"),
    *_of("v1.core.sched.scheduler", "", "lazy transfer and planning", "Scheduler"),
    *_of("v1.core.sched.async_scheduler", "", "lazy transfer and planning", "AsyncScheduler"),
    *_of(
        *("v1.core.sched.scheduler", "Scheduler", "lazy transfer and planning"),
        *("schedule", "update_from_output(scheduler_output, model_runner_output)", "encoder_cache_mismatch_reqs"),
        "_try_schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, encoder_compute_budget, "
        "shift_computed_tokens)",
        *("_free_encoder_inputs(request)", "_free_encoder_input", "_reject_on_encoder_cache_embed_mismatch"),
        *("num_prefill_lookahead", "ec_connector", "kv_cache_manager", "requests", "encoder_cache_manager"),
        *("is_encoder_decoder", "scheduler_config", "vllm_config"),
    ),
    *_of(
        *("v1.core.sched.scheduler", "Scheduler", "what grammars cost in the engine core"),
        *("add_request(request)", "get_grammar_bitmask(scheduler_output)", "_handle_blocked_waiting_request(request)"),
        *("structured_output_manager", "current_step"),
    ),
    *_of(
        *("v1.structured_output", "StructuredOutputManager", "what grammars cost in the engine core"),
        *("_grammar_bitmask", "fill_bitmask_parallel_threshold"),
    ),
    *_of("v1.structured_output.request", "StructuredOutputRequest", "what grammars cost in the engine core", "grammar"),
    *_of("v1.structured_output.backend_types", "", "what grammars cost in the engine core", "StructuredOutputGrammar"),
    *_of(
        *("v1.structured_output.backend_types", "StructuredOutputGrammar", "what grammars cost in the engine core"),
        *("accept_tokens(request_id, tokens)", "validate_tokens(tokens)", "rollback(num_tokens)", "reset"),
        *("fill_bitmask(bitmask, batch_index)", "is_terminated"),
    ),
    *_of(
        *("v1.request", "Request", "what grammars cost in the engine core"),
        *("structured_output_request", "cache_salt", "next_decode_eligible_step"),
    ),
    *_of("v1.core.sched.output", "SchedulerOutput", "grammars in a step", "has_structured_output_requests"),
    *_of("config", "VllmConfig", "whether there are drafts", "speculative_config"),
    *_of(
        "v1.core.sched.scheduler",
        "Scheduler",
        "planning: a step's inputs come with those that repeat one of them",
        "_allocate_encoder_inputs(request, input_ids, duplicate_input_ids)",
        since="0.32",
    ),
    *_of(
        "v1.core.kv_cache_manager", "KVCacheManager", "wrong prefixes", "coordinator", "get_block_ids", "evict_blocks"
    ),
    *_of("v1.core.kv_cache_coordinator", "KVCacheCoordinator", "wrong prefixes", "single_type_managers"),
    *_of("v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", "wrong prefixes", "block_size"),
    *_of(
        *("v1.core.sched.output", "SchedulerOutput", "lazy transfer and planning"),
        *("ec_manager_metadata", "finished_req_ids", "scheduled_new_reqs", "scheduled_encoder_inputs"),
        *("num_scheduled_tokens", "free_encoder_mm_hashes"),
    ),
    *_of("v1.core.sched.output", "NewRequestData", "lazy transfer", "mm_features", "req_id"),
    *_of("v1.request", "", "planning", "RequestStatus"),
    *_of(
        *("v1.request", "Request", "planning"),
        *("mm_features", "num_computed_tokens", "num_output_placeholders", "status", "request_id"),
    ),
    *_of("v1.request", "Request", "what came for a request", "ec_transfer_params", since="0.32"),
    *_of("v1.outputs", "", "items that do not fit", "ModelRunnerOutput", "AsyncModelRunnerOutput"),
    *_of("v1.outputs", "AsyncModelRunnerOutput", "items that do not fit", "get_output"),
    *_of(
        *("v1.outputs", "ModelRunnerOutput", "items that do not fit"),
        *("prompt_logprobs_dict", "prompt_token_id_logprobs_dict", "req_id_to_index", "sampled_token_ids"),
        "pooler_output",
    ),
    *_of("v1.worker.cpu_worker", "", "the worker", "CPUWorker"),
    *_of("v1.worker.gpu_worker", "", "the worker", "Worker"),
    *_of(
        *("v1.worker.gpu_worker", "Worker", "the worker"),
        *("model_runner", "use_v2_model_runner", "init_device", "execute_model(scheduler_output)"),
        *("sample_tokens(grammar_output)", "get_model"),
    ),
    *_of(
        *("model_executor.models.interfaces", "SupportsMRoPE", "prompts in which no text follows an item"),
        "get_mrope_input_positions(input_tokens, mm_features)",
    ),
    *_of(
        *("v1.worker.gpu_model_runner", "GPUModelRunner", "items that do not fit, seeds on a CPU"),
        *("_execute_mm_encoder(scheduler_output)", "_cache_encoder_output", "encoder_cache", "requests", "mm_budget"),
        *("input_batch", "discard_request_mask", "model", "device"),
    ),
    *_of("v1.worker.gpu_input_batch", "InputBatch", "seeds on a CPU", "generators", "num_reqs"),
)
"""Names that a worker uses."""
