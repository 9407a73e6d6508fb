"""Every name of vLLM that only `semel.vllm_plugin` uses. The door stays shut with a vLLM that lacks one of them."""

from __future__ import annotations

from typing import Final

from semel.engine.vllm.compat.names import Name
from semel.engine.vllm.compat.names import names_of as _of

__all__ = ["DOOR_NAMES"]

DOOR_NAMES: Final[tuple[Name, ...]] = (
    # Lazy images.
    *_of("multimodal.media", "", "lazy images", "MEDIA_CONNECTOR_REGISTRY", "AudioMediaIO", "ImageMediaIO"),
    *_of("multimodal.media", "", "lazy images", "MediaConnector", "VideoMediaIO"),
    *_of("multimodal.media", "", "lazy images", "MediaWithBytes(media, original_bytes, io_config)"),
    *_of("utils.registry", "ExtensionManager", "lazy images", "register(name)", "name2class"),
    *_of(
        *("multimodal.media", "MediaConnector", "lazy images", "allowed_media_domains", "connection"),
        *("load_from_url(url, media_io)", "load_from_url_async(url, media_io)"),
    ),
    *_of(
        *("multimodal.media", "ImageMediaIO", "lazy images"),
        *("load_bytes(data)", "image_mode", "rgba_background_color"),
    ),
    *_of(
        *("multimodal.media", "VideoMediaIO", "decoded media are remembered"),
        *("load_bytes(data)", "video_loader", "num_frames", "kwargs"),
    ),
    *_of(
        *("multimodal.media", "AudioMediaIO", "decoded media are remembered"),
        *("load_bytes(data)", "audio_backend", "kwargs"),
    ),
    *_of("connections", "HTTPConnection", "the fetch policy", "get_bytes(url, timeout, max_bytes)"),
    *_of("connections", "HTTPConnection", "the fetch policy", "async_get_bytes(url, timeout, max_bytes)"),
    *_of("exceptions", "", "the fetch policy", "VLLMUnprocessableEntityError(message, parameter, value)"),
    *_of(
        *("envs", "", "the fetch policy", "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "VLLM_MEDIA_URL_ALLOW_REDIRECTS"),
        *("VLLM_IMAGE_FETCH_TIMEOUT", "VLLM_VIDEO_FETCH_TIMEOUT", "VLLM_AUDIO_FETCH_TIMEOUT"),
    ),
    # The renderer.
    *_of("renderers.registry", "", "the renderer", "RENDERER_REGISTRY"),
    *_of("renderers.registry", "RendererRegistry", "the renderer", "renderers"),
    *_of("renderers", "", "the renderer", "hf"),
    *_of("renderers.hf", "", "the renderer", "HfRenderer(config, tokenizer)"),
    *_of("renderers.base", "", "the renderer", "BaseRenderer"),
    *_of(
        *("renderers.base", "BaseRenderer", "the renderer"),
        *("_process_multimodal(prompt, mm_data, mm_uuids, mm_processor_kwargs, media_io_kwargs, skip_mm_cache)",),
        *("_process_multimodal_async", "_process_mm_uuids(mm_data, mm_data_items, mm_uuid_items, mm_req_id)"),
        *("_mm_executor", "_mm_processor_cache", "_mm_processor_only_cache", "_mm_req_counter", "_mm_timing_registry"),
        *("_resources", "api_process_rank", "get_mm_processor", "mm_processor", "start_mm_warmup_in_background"),
        *("update_mm_cache_stats", "warmup(chat_params)"),
    ),
    *_of("config.parallel", "ParallelConfig", "the renderer", "_api_process_count"),
    *_of("utils.torch_utils", "", "the renderer", "set_default_torch_num_threads"),
    *_of("multimodal.parse", "", "items for the pool", "parse_mm_uuids(mm_uuids)", "AudioProcessorItems"),
    *_of("multimodal.parse", "", "items for the pool", "ImageProcessorItems", "VideoProcessorItems"),
    *_of("multimodal.parse", "ImageProcessorItems", "items for the pool", "data", "get_image_size(item_idx)"),
    *_of("multimodal.media", "", "items for the pool", "MediaWithBytes(media, original_bytes, io_config)"),
    *_of("multimodal.media", "ImageMediaIO", "items for the pool", "load_bytes(data)"),
    *_of("multimodal.processing.inputs", "ProcessorInputs", "hashes", "get_mm_hashes(model_id, hash_algorithm)"),
    *_of("multimodal.processing", "BaseMultiModalProcessor", "hashes", "_get_mm_hashes(inputs)", since="0.32"),
    *_of(
        *("multimodal.processing", "BaseMultiModalProcessor", "options of one item"),
        "_get_cache_missing_processor_kwargs(inputs, mm_is_cached)",
        since="0.32",
    ),
    *_of(
        *("multimodal.processing", "BaseMultiModalProcessor", "no work for no items"),
        *("_apply_hf_processor_main(mm_items, hf_kwargs)", "_get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)"),
        "_get_mm_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
        since="0.32",
    ),
    *_of(
        *("multimodal.cache", "BaseMultiModalProcessorCache", "vLLM's cache with items that are made"),
        *("is_cached_item(mm_hash)", "get_and_update_item(mm_item, mm_hash)", "touch_sender_cache_item(mm_hash)"),
    ),
    *_of("entrypoints.common", "", "batches of LLM", "offline", since="0.32"),
    *_of(
        *("entrypoints.common.offline", "OfflineInferenceMixin", "batches of LLM", "_render_and_add_requests(prompts)"),
        since="0.32",
    ),
    *_of("entrypoints", "", "batches of LLM", "offline_utils", until="0.31"),
    # Repair.
    *_of("renderers.base", "", "lost items are made again", "BaseRenderer"),
    *_of(
        *("renderers.base", "BaseRenderer", "lost items are made again", "_mm_executor"),
        "process_for_engine(prompt, arrival_time, skip_mm_cache)",
        "process_for_engine_async(prompt, arrival_time, skip_mm_cache)",
    ),
    *_of("v1.engine.async_llm", "AsyncLLM", "pauses end repairs", "pause_generation(mode)", "sleep(level, mode)"),
    *_of("v1.engine.input_processor", "", "requests know their media", "InputProcessor"),
    *_of("v1.engine.llm_engine", "", "lost items under `LLM`", "LLMEngine"),
    *_of("v1.engine.llm_engine", "LLMEngine", "lost items under `LLM`", "step", "engine_core", "output_processor"),
    *_of("v1.engine.core_client", "SyncMPClient", "lost items under `LLM`", "add_request(request)"),
    *_of("v1.engine.output_processor", "", "lost items are noticed", "OutputProcessor"),
    *_of(
        *("v1.engine.output_processor", "OutputProcessor", "lost items are noticed", "request_states"),
        *("add_request(request)", "abort_requests(request_ids)", "process_outputs(engine_core_outputs)"),
    ),
    *_of(
        *("v1.engine.output_processor", "OutputProcessor", "repairs that fail"),
        "process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats)",
        "abort_requests(request_ids, internal)",
    ),
    *_of("v1.metrics.stats", "", "repairs that fail", "IterationStats"),
    *_of("v1.engine", "", "repairs that fail", "EngineCoreOutput", "FinishReason"),
    *_of("v1.engine", "EngineCoreOutput", "lost items are noticed", "mm_cache_miss_hashes", "request_id"),
    *_of("v1.engine", "EngineCoreRequest", "requests are sent again", "mm_features", "resumable", "request_id"),
    *_of("multimodal.inputs", "MultiModalFeatureSpec", "lost items are noticed", "mm_hash"),
    # Engine parts.
    *_of("engine.arg_utils", "EngineArgs", "engine parts by default", "create_engine_config(usage_context)"),
    *_of("engine.arg_utils", "EngineArgs", "engine parts by default", "_api_process_count", "ec_transfer_config"),
    *_of("config", "VllmConfig", "engine parts by default", "diffusion_config", since="0.32"),
    *_of("engine.arg_utils", "EngineArgs", "engine parts by default", "speculative_config"),
    # A worker of a fleet.
    *_of("", "", "vLLM's engine for frontends", "plugins"),
    *_of("plugins", "", "vLLM's engine for frontends", "load_endpoint_plugins(supported_tasks)", since="0.32"),
    *_of(
        *("plugins.endpoint_plugins.interface", "EndpointPlugin", "vLLM's engine for frontends"),
        *("name", "required_tasks", "attach_router(app)", "init_state(engine_client, state, args)"),
        since="0.32",
    ),
    *_of("config", "VllmConfig", "time to drain", "shutdown_timeout", since="0.32"),
    *_of("engine.arg_utils", "EngineArgs", "the kind of the item cache", "mm_processor_cache_type"),
    *_of("utils.cache", "LRUCache", "two writers of the item cache", "touch(key)"),
    *_of("utils.cache", "LRUCache", "two writers of the item cache", "put_if_fits(key, value)", since="0.32"),
    *_of(
        *("multimodal.cache.base", "MultiModalProcessorCacheItemMetadata", "two writers of the item cache"),
        "prompt_updates",
    ),
)
