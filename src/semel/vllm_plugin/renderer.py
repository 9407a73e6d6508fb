"""The level `renderer`: items are preprocessed in semel's sandboxed processes instead of vLLM's one thread."""

from __future__ import annotations

import inspect
from hashlib import sha256
from typing import Final

from semel.vllm_plugin.levels import LevelOff

__all__ = ["install"]

_STOCK: Final = ("vllm.renderers.hf", "HfRenderer")
_OURS: Final = ("semel.vllm_plugin.pool_renderer", "PoolRenderer")
_REPEATED: Final = "369b3977aa18a822"
"""The digest of the function of vLLM whose first half `PoolRenderer` repeats; the same in 0.31 and 0.32."""


def install() -> str:
    """Register the renderer in place of vLLM's, which it extends."""
    from vllm.renderers.base import BaseRenderer
    from vllm.renderers.registry import RENDERER_REGISTRY

    from semel.vllm_plugin.pool_items import num_processes

    renderers = RENDERER_REGISTRY.renderers
    if renderers["hf"] not in (_STOCK, _OURS):
        raise LevelOff(f"{'.'.join(renderers['hf'])} is the renderer already")
    if sha256(inspect.getsource(BaseRenderer._process_multimodal).encode()).hexdigest()[:16] != _REPEATED:
        raise LevelOff("vLLM's _process_multimodal is not as it was tested")
    renderers["hf"] = _OURS
    return f"items are preprocessed in {num_processes()} sandboxed processes"
