"""Whether workers answer alike: what of their contracts has to be the same within one fleet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from semel.core import Contract

__all__ = ["first_difference"]

_MAY_DIFFER: Final = frozenset({"cache_bytes"})
"""What changes no answer; every other field does, also one that is added to contracts later."""

_REMEDIES: Final[Mapping[str, str]] = {
    "model": "serve the same model, or give it the same --served-model-name",
    "fingerprint": "start both with the same model folder, --processor and versions of transformers, torch and pillow",
    "target": "start both with the same --dtype, --mm-processor-kwargs and flags that change rendering",
    "aliases": "give both the same --served-model-name",
    "fields": "serve the same model",
    "max_items": "start both with the same --limit-mm-per-prompt",
    "max_embeds": "start both with the same --max-num-batched-tokens",
    "max_tokens": "start both with the same --max-model-len",
}


def first_difference(fleet: Contract, worker: Contract) -> str | None:
    """Why a worker may not serve beside the fleet's others; None if it answers as they do."""
    for name in (field.name for field in fields(Contract) if field.name not in _MAY_DIFFER):
        ours, its = getattr(fleet, name), getattr(worker, name)
        if ours != its:
            remedy = _REMEDIES.get(name, "start both with the same flags")
            return f"its {name} is {_excerpt(its)}, the fleet's is {_excerpt(ours)}: {remedy}"
    return None


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
