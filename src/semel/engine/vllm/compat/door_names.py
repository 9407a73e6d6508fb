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
        *("VLLM_IMAGE_FETCH_TIMEOUT", "VLLM_VIDEO_FETCH_TIMEOUT"),
    ),
    # The renderer.
    # Repair.
    # Engine parts.
    *_of("engine.arg_utils", "EngineArgs", "engine parts by default", "create_engine_config(usage_context)"),
    # A worker of a fleet.
)
