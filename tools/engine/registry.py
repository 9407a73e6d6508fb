"""What semel will do with each multimodal architecture that vLLM registers, read from the classes."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from semel.engine.vllm.model.prompt_rules import _PROMPT_METHODS

__all__ = ["REASONS", "table", "treatment"]

REASONS: Final[Mapping[str, str]] = {
    "splice": "its items replace tokens and it overrides no rule of a prompt: semel puts them in if the placeholder is "
    "one token, else vLLM's `apply` does",
    "apply": "its processor has prompt rules of its own, or inserts items: vLLM's `apply` makes the prompts",
    "limited": "an item depends on the others of its prompt: the worker finds at start how many it can take, and takes "
    "no more",
    "refused": "it has no multimodal processor that a chat could use, or only Mistral's own format",
    "unknown": "its class cannot be imported where this table was made",
}
"""Every treatment and why."""

_COMPANY: Final = "_cached_apply_hf_processor"
_MISTRAL: Final = ("PixtralForConditionalGeneration", "VoxtralForConditionalGeneration", "VoxtralRealtimeGeneration")


def treatment(name: str, processor: Any, base: type) -> str:
    """What semel does with a model of this processor: a key of `REASONS`."""
    if processor is None or name in _MISTRAL:
        return "refused"
    if not isinstance(processor, type):  # a function that chooses among classes: the worker sees the one it chose
        return "splice"

    def overrides(method: str) -> bool:
        return getattr(processor, method, None) is not getattr(base, method, None)

    if overrides(_COMPANY):
        return "limited"
    if any(map(overrides, _PROMPT_METHODS)) or _inserts(processor):
        return "apply"
    return "splice"


def _inserts(processor: type) -> bool:
    try:
        return "PromptInsertion" in inspect.getsource(processor._get_prompt_updates)  # type: ignore[attr-defined]
    except OSError:
        return False


def architectures() -> Iterator[tuple[str, str]]:
    """Every architecture of the registry that takes media, with its treatment."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, ModelRegistry
    from vllm.multimodal.processing import BaseMultiModalProcessor

    for name in sorted(_MULTIMODAL_MODELS):
        try:
            model: Any = ModelRegistry.models[name].load_model_cls()
        except Exception:  # noqa: BLE001 - foreign modules fail in many ways, most for a package that is missing
            yield name, "unknown"
            continue
        factory = getattr(model, "_processor_factory", None)
        yield name, treatment(name, None if factory is None else factory.processor, BaseMultiModalProcessor)


def table(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The lines of the table, by treatment."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, kind in found:
        groups[kind].append(name)
    yield "| semel | why | architectures |"
    yield "|---|---|---|"
    for kind, why in REASONS.items():
        if names := groups.get(kind):
            yield f"| {kind} ({len(names)}) | {why} | {', '.join(f'`{name}`' for name in names)} |"
