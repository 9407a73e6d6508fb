"""Every name of vLLM that only `semel.vllm_plugin` uses. The door stays shut with a vLLM that lacks one of them."""

from __future__ import annotations

from typing import Final

from semel.engine.vllm.compat.names import Name
from semel.engine.vllm.compat.names import names_of as _of

__all__ = ["DOOR_NAMES"]

DOOR_NAMES: Final[tuple[Name, ...]] = (
    # Lazy images.
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
    # Engine parts.
    *_of("engine.arg_utils", "EngineArgs", "engine parts by default", "create_engine_config(usage_context)"),
    # A worker of a fleet.
)
