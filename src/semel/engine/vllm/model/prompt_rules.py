"""Rules by which the items of a model enter its prompts, read from the processor that vLLM registers for it.

No family is named here. What a processor overrides of vLLM's base class says whether it has rules of its own, and what
it does with one small item, made up by vLLM itself, says what it replaces or where it inserts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

from semel.core import AssemblyKind, Modality
from semel.engine.vllm.model.item import make_items
from semel.processing import Family

__all__ = ["PromptRule", "has_own_prompt", "item_part", "overrides", "prompt_rules", "supported_modalities"]

_MODALITIES: Final[tuple[Modality, ...]] = ("audio", "image", "video")
_PROBE_SIDE: Final = 112
_PROBE_FRAMES: Final = 4
_PROBE_SAMPLES: Final = 16_000
_PROMPT_METHODS: Final = (
    *("apply", "_apply_prompt_updates", "_apply_prompt_updates_via_text", "_apply_token_matches"),
    *("_apply_token_matches_with_placeholders", "_bind_and_group_updates", "_find_mm_placeholders"),
    *("_get_mm_prompt_updates", "_iter_text_matches", "_matched_updates_from_result", "_maybe_apply_prompt_updates"),
    *("_merge_mm_kwargs", "_postprocess_prompt", "_recompute_cached_prompt_update"),
)
"""The methods of vLLM's base class that decide what a prompt with items looks like."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptRule:
    """The rule by which the items of one modality enter a prompt."""

    kind: AssemblyKind
    text: str | None
    """The placeholder of an item in the prompt's text: a token, or several. None where an item is inserted.

    If items are numbered in the text, it is the part before the number.
    """

    updates: tuple[Any, ...] = ()
    """vLLM's prompt updates of a small item, of which one is applied. Another item's differ in their content only."""

    before: tuple[int, ...] = ()
    """The tokens of an update's content before the item's own."""

    behind: tuple[int, ...] = ()
    stub: Any = None
    """The small item, as vLLM's parser takes it; it stands for any other in a prompt that is assembled."""

    is_numbered: bool = False
    """True if the number of an item in its prompt is written among its own tokens."""


def supported_modalities(processor: Any) -> tuple[Modality, ...]:
    """Return what a processor takes."""
    supported = processor.info.supported_mm_limits
    return tuple(modality for modality in _MODALITIES if supported.get(modality, 0) != 0)


def overrides(processor: Any, method: str) -> bool:
    """Return whether a processor has a method of its own, and not that of vLLM's base class."""
    from vllm.multimodal.processing import BaseMultiModalProcessor

    return getattr(type(processor), method, None) is not getattr(BaseMultiModalProcessor, method, None)


def has_own_prompt(processor: Any) -> bool:
    """Return whether a processor has rules of its own for the whole prompt."""
    return any(overrides(processor, method) for method in _PROMPT_METHODS)


def item_part(processor: Any, family: Family, config: Mapping[str, Any], content: Any) -> slice:
    """Return which tokens of an update's content are the item's own, and not text around it.

    Where a processor looks for its items in the finished prompt itself, their first and last tokens may have merged
    with the text. These are text then: an item's own tokens reach from its first embedding to its last.
    """
    if _cuts_items(family) or content.is_embed is None or not overrides(processor, "_find_mm_placeholders"):
        return family.item_tokens(config, content.full)
    positions = content.is_embed(content.full).nonzero().flatten().tolist()
    return slice(positions[0], positions[-1] + 1) if positions else slice(None)


def prompt_rules(processor: Any, family: Family, config: Mapping[str, Any]) -> Mapping[Modality, PromptRule]:
    """Return the rule of each modality. One whose items cannot enter a prompt is missing, and a warning says why."""
    found = {modality: _rule(processor, family, config, modality) for modality in supported_modalities(processor)}
    rules = {modality: rule for modality, rule in found.items() if rule is not None}
    texts = [rule.text for rule in rules.values() if rule.text is not None]
    if len(set(texts)) == len(texts):
        return rules
    # Modalities that share a placeholder: vLLM decides whose it is.
    return {modality: replace(rule, kind="apply") for modality, rule in rules.items()}


def _rule(processor: Any, family: Family, config: Mapping[str, Any], modality: Modality) -> PromptRule | None:
    try:
        stub = _dummy(processor, modality)
        updates = _updates(processor, modality, stub)
    except Exception as error:  # noqa: BLE001 - foreign code: a modality that it cannot do must not take the others along
        logger.warning("vLLM makes nothing of its own dummy %s (%r): its dummy text has to tell", modality, error)
        return _rule_of_text(processor, family, modality)
    text = _text(processor, updates)
    content = updates[0].content
    part = item_part(processor, family, config, content)
    start, end, _ = part.indices(len(content.full))
    return PromptRule(
        kind="splice" if _is_plain(processor, family, updates, text) else "apply",
        text=text,
        updates=updates,
        before=tuple(content.full[:start]),
        behind=tuple(content.full[end:]),
        stub=stub,
        is_numbered=_renumbered(processor, updates[0]).content.full != content.full,
    )


def _rule_of_text(processor: Any, family: Family, modality: Modality) -> PromptRule | None:
    """Return a rule without an item to see it on: only a placeholder of one token can be replaced."""
    tokenizer = processor.info.get_tokenizer()
    text = processor.dummy_inputs.get_dummy_text({modality: 1})
    if len(tokenizer.encode(text, add_special_tokens=False)) == 1 and _has_plain_prompt(processor, family):
        return PromptRule("splice", text)
    logger.warning("vLLM puts %s in place of %r, which is not one token: prompts cannot have any", modality, text)
    return None


def _text(processor: Any, updates: tuple[Any, ...]) -> str | None:
    targets = [updates[0].target, _renumbered(processor, updates[0]).target]
    if not all(isinstance(target, list) and target for target in targets) or not _replaces(updates[0]):
        return None
    tokenizer = processor.info.get_tokenizer()
    first, second = (tokenizer.decode(target, skip_special_tokens=False) for target in targets)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(one for one, _ in same) or None


def _is_plain(processor: Any, family: Family, updates: tuple[Any, ...], text: str | None) -> bool:
    """Return whether replacing one placeholder token by the item's own tokens is all that happens."""
    target, tokenizer = updates[0].target, processor.info.get_tokenizer()
    return (
        _has_plain_prompt(processor, family)
        and len(updates) == 1
        and _replaces(updates[0])
        and isinstance(target, list)
        and len(target) == 1
        and tokenizer.encode(text, add_special_tokens=False) == target
    )


def _has_plain_prompt(processor: Any, family: Family) -> bool:
    """Return a family of ours that cuts items out of their content writes the text around them itself."""
    return _cuts_items(family) or not has_own_prompt(processor)


def _cuts_items(family: Family) -> bool:
    return type(family).item_tokens is not Family.item_tokens


def _replaces(update: Any) -> bool:
    from vllm.multimodal.processing.processor import UpdateMode

    return bool(update.mode == UpdateMode.REPLACE)


def _renumbered(processor: Any, update: Any) -> Any:
    """Return the update of the same item as the second of its prompt."""
    return processor._recompute_cached_prompt_update(update, 1)


def _updates(processor: Any, modality: Modality, stub: Any) -> tuple[Any, ...]:
    """Return what the only item of a prompt puts in place of what, or inserts where."""
    items = processor.info.parse_mm_data({modality: [stub]}, validate=False)
    built = make_items(processor, modality, items, {})
    return tuple(processor._get_mm_prompt_updates(items, {}, built)[modality][0])


def _dummy(processor: Any, modality: Modality) -> Any:
    from vllm.config.multimodal import AudioDummyOptions, ImageDummyOptions, MultiModalDummyOptions, VideoDummyOptions

    sides = {"width": _PROBE_SIDE, "height": _PROBE_SIDE}
    sizes = MultiModalDummyOptions(
        audio=AudioDummyOptions(length=_PROBE_SAMPLES),
        image=ImageDummyOptions(**sides),
        video=VideoDummyOptions(num_frames=_PROBE_FRAMES, **sides),
    )
    length = processor.info.ctx.model_config.max_model_len
    data = processor.dummy_inputs.get_dummy_mm_data(length, {modality: 1}, sizes)[modality]
    return data[0] if isinstance(data, list) else data
