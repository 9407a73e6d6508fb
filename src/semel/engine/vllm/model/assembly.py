"""Prompts with items, assembled by vLLM's own `apply`.

vLLM finds every item in its cache, and takes the prompt updates from there. So nothing is processed, a small
stub stands for each medium, and what an item puts into the prompt is its layout, which a frontend always has. All
that a model does to a prompt is then vLLM's doing: replacements, insertions, newlines that merge, numbers. What comes
of it is checked: every item stands in the prompt exactly as its layout says, or the prompt is refused.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from semel.core import Assembly, Layout, LruMap, Modality
from semel.engine.vllm.model.prompt_rules import PromptRule, item_part, overrides, prompt_rules
from semel.errors import ConfigError, InvalidRequest, ServiceError
from semel.processing import Family
from semel.processing.tensors import is_out_of_memory

__all__ = ["Assembler", "company_limits"]

_MAX_COMPANY: Final = 8
_REMEMBERED: Final = 64
_MAX_REMEMBERED_ITEMS: Final = 64

logger = logging.getLogger(__name__)

_Items = Sequence[tuple[Modality, Layout]]


@dataclass(frozen=True, slots=True)
class Assembler:
    """The assembler of one model's prompts with items. Used by one thread at a time."""

    processor: Any
    rules: Mapping[Modality, PromptRule]
    _stubs: LruMap[tuple[tuple[Modality, int], ...], Any] = field(
        default_factory=lambda: LruMap(_REMEMBERED), repr=False, compare=False
    )

    @classmethod
    def from_processor(cls, processor: Any, family: Family, config: Mapping[str, Any]) -> Self:
        """Read the rules of a model's processor."""
        options = processor.info.ctx.get_mm_config().mm_processor_kwargs or {}
        if options.get("use_audio_in_video"):
            raise ConfigError(
                "use_audio_in_video puts a clip and a video into the same positions of a prompt, which semel does not "
                "support: leave it out of --mm-processor-kwargs, and send the sound as an item of its own"
            )
        return cls(processor, prompt_rules(processor, family, config))

    def own_part(self, modality: Modality, content: Any, family: Family, config: Mapping[str, Any]) -> slice:
        """Find the item's own tokens in an update's content; the tokens around them must be the same for all."""
        part = item_part(self.processor, family, config, content)
        if (rule := self.rules.get(modality)) is not None and rule.updates:
            start, end, _ = part.indices(len(content.full))
            if (tuple(content.full[:start]), tuple(content.full[end:])) != (rule.before, rule.behind):
                raise InvalidRequest(f"the model writes other text around this {modality} than around another one")
        return part

    def assemble(self, token_ids: Sequence[int], items: _Items) -> Assembly:
        """Return the prompt of a text with these items, in the order of the request."""
        text = list(token_ids)
        updates = self._updates(items)
        self._check_targets(text, updates)
        result = self._apply(text, updates)
        return self._checked(result, items, updates)

    def _updates(self, items: _Items) -> Mapping[Modality, list[list[Any]]]:
        """vLLM's updates of each item, as if it had processed it as the only one of its prompt."""
        updates: dict[Modality, list[list[Any]]] = defaultdict(list)
        made: dict[tuple[Modality, int], list[Any]] = {}  # by the layout's identity: most items of a prompt share one
        for modality, layout in items:
            if (its := made.get((modality, id(layout)))) is None:
                if (rule := self.rules.get(modality)) is None or not rule.updates:
                    raise InvalidRequest(f"this model's prompts cannot have any {modality}")
                content = _content(rule, layout)
                its = made[modality, id(layout)] = [replace(update, content=content) for update in rule.updates]
            updates[modality].append(its)
        return dict(updates)

    def _check_targets(self, text: list[int], updates: Mapping[Modality, list[list[Any]]]) -> None:
        """Refuse a text that has more or fewer placeholders than items, before vLLM takes one for another (S14)."""
        decoded: str | None = None
        for targets, modalities in self._targets(updates).items():
            expected = len(modalities)
            found = sum(_count(text, target) for target in set(targets))
            if found < expected and max(map(len, targets)) > 1:  # vLLM looks for it in the decoded text then
                tokenizer = self.processor.info.get_tokenizer()
                decoded = tokenizer.decode(text) if decoded is None else decoded
                found = sum(decoded.count(spelled) for spelled in {tokenizer.decode([*target]) for target in targets})
            if found != expected:
                names = " and ".join(sorted(set(modalities)))
                raise InvalidRequest(
                    f"the prompt has {found} placeholders for {expected} {names} items: "
                    "either a text spells a placeholder, or the chat template leaves an item out or shows it twice; "
                    "change the messages"
                )

    def _targets(
        self, updates: Mapping[Modality, list[list[Any]]]
    ) -> Mapping[tuple[tuple[int, ...], ...], list[Modality]]:
        """Return the tokens that items replace, with the modality of every such item."""
        found: dict[tuple[tuple[int, ...], ...], list[Modality]] = defaultdict(list)
        for modality, its in updates.items():
            for index, alternatives in enumerate(its):
                numbered = [self.processor._recompute_cached_prompt_update(update, index) for update in alternatives]
                if targets := tuple(tuple(one.target) for one in numbered if _is_replacement(one)):
                    found[targets].append(modality)
        return found

    def _apply(self, text: list[int], updates: Mapping[Modality, list[list[Any]]]) -> Any:
        try:
            return self.processor.apply(*self._inputs(text, updates))
        except Exception as error:  # noqa: BLE001 - foreign code, on a client's text, may raise anything
            if isinstance(error, MemoryError) or is_out_of_memory(error):
                raise MemoryError from None
            logger.info("%s refused a prompt: %r", _name(self.processor), error)
            raise InvalidRequest(
                "the model's processor finds no place in the prompt for an item: the chat template leaves it out, or "
                "puts it where the model does not take it; change the messages"
            ) from None

    def _inputs(self, text: list[int], updates: Mapping[Modality, list[list[Any]]]) -> tuple[Any, Any]:
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        uuids = {modality: [f"{modality} {index}" for index in range(len(its))] for modality, its in updates.items()}
        known = {uuid: updates[modality][index] for modality in uuids for index, uuid in enumerate(uuids[modality])}
        counts = tuple((modality, len(its)) for modality, its in updates.items())
        inputs = ProcessorInputs(text, self._stub_items(counts), uuids, cache=_KnownItems(known))
        return inputs, TimingContext(enabled=False)

    def _stub_items(self, counts: tuple[tuple[Modality, int], ...]) -> Any:
        if (items := self._stubs.get(counts)) is None:
            data = {modality: [self.rules[modality].stub] * count for modality, count in counts}
            items = self.processor.info.parse_mm_data(data, validate=False)
            if sum(count for _, count in counts) <= _MAX_REMEMBERED_ITEMS:
                self._stubs.put(counts, items)
        return items

    def _checked(self, result: Any, items: _Items, updates: Mapping[Modality, list[list[Any]]]) -> Assembly:
        """Return the assembled prompt without its items, if each stands in it as its layout says."""
        token_ids: list[int] = result["prompt_token_ids"]
        ranges = {modality: iter(places) for modality, places in result["mm_placeholders"].items()}
        contents = {
            modality: iter([alternatives[0].content for alternatives in its]) for modality, its in updates.items()
        }
        spans: list[tuple[int, int, int]] = []
        for index, (modality, layout) in enumerate(items):
            place = next(ranges.get(modality, iter(())), None)
            rule = self.rules[modality]
            if place is None or _differs(token_ids, place, rule, layout, next(contents[modality])):
                logger.error(
                    "%s does not put %s %d where it should: %r", _name(self.processor), modality, index, layout
                )
                raise ServiceError(f"vLLM puts {modality} {index} into the prompt in another form than it was made in")
            start = place.offset + len(rule.before)
            spans.append((start, start + len(layout), index))
        return _without(token_ids, sorted(spans))


@dataclass(frozen=True, slots=True)
class _KnownItems:
    """A processor cache for vLLM that has every item of a prompt, but for its tensors."""

    updates: Mapping[str, list[Any]]

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        return [True] * len(mm_hashes)

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> tuple[None, list[Any]]:
        del mm_item
        return None, self.updates[mm_hash]

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        pass

    def release_sender_touches(self) -> None:
        pass


def company_limits(processor: Any, family: Family, config: Mapping[str, Any]) -> Mapping[Modality, int]:
    """Return how many items of a modality a prompt may have, where an item depends on the others of its prompt.

    vLLM's own cache assumes that it does not, and a processor for which that is wrong goes past the cache. So it is
    seen how many items it still takes from there, in their order: none, if they are not a function of their media. An
    item that has its number among its tokens can only be the first.
    """
    passes_by = overrides(processor, "_cached_apply_hf_processor")
    if not passes_by and not overrides(processor, "_recompute_cached_prompt_update"):
        return {}
    assembler = Assembler(processor, prompt_rules(processor, family, config))
    limits: dict[Modality, int] = {}
    for modality, rule in assembler.rules.items():
        limit = _cached_items(assembler, modality) if passes_by and rule.updates else _MAX_COMPANY
        if rule.is_numbered:
            limit = min(limit, 1)
        if passes_by or rule.is_numbered:
            logger.warning(
                "%s makes another item of the same %s if a prompt has more of them: at most %d in a prompt",
                *(_name(processor), modality, limit),
            )
            limits[modality] = limit
    return limits


def _cached_items(assembler: Assembler, modality: Modality) -> int:
    """Return how many items of a prompt a processor takes from a cache that has them all."""
    rule = assembler.rules[modality]
    for count in range(1, _MAX_COMPANY + 1):
        inputs, timing = assembler._inputs([], {modality: [list(rule.updates) for _ in range(count)]})
        try:
            result = assembler.processor._cached_apply_hf_processor(inputs, timing)
        except Exception as error:  # noqa: BLE001 - foreign code: what it cannot do with stubs, it does past the cache
            logger.info("%s takes no %d %s from a cache: %r", _name(assembler.processor), count, modality, error)
            return count - 1
        is_cached = all(item is None for item in result.kwargs[modality])
        if not is_cached or result.hashes[modality] != inputs.mm_uuid_items[modality]:
            return count - 1
    return _MAX_COMPANY


def _name(processor: Any) -> str:
    return type(processor).__name__


def _content(rule: PromptRule, layout: Layout) -> Any:
    """Return what an item with this layout puts into a prompt."""
    import torch
    from vllm.multimodal.processing import PromptUpdateDetails

    full = [*rule.before, *layout.token_ids, *rule.behind]
    if layout.mask is None and len(full) == len(layout):
        return PromptUpdateDetails(full)
    bits = layout.mask.bits if layout.mask is not None else b"\x01" * len(layout)
    mask = torch.frombuffer(bytearray(bytes(len(rule.before)) + bits + bytes(len(rule.behind))), dtype=torch.bool)
    return PromptUpdateDetails(full, lambda _: mask)


def _is_replacement(update: Any) -> bool:
    from vllm.multimodal.processing.processor import UpdateMode

    return update.mode == UpdateMode.REPLACE and isinstance(update.target, list)


def _count(token_ids: list[int], target: tuple[int, ...]) -> int:
    if len(target) == 1:
        return token_ids.count(target[0])
    from vllm.multimodal.processing.processor import iter_token_matches

    return sum(1 for _ in iter_token_matches(token_ids, [*target]))


def _differs(token_ids: list[int], place: Any, rule: PromptRule, layout: Layout, content: Any) -> bool:
    start = place.offset + len(rule.before)
    if place.length != len(content.full):
        return True
    if tuple(token_ids[start : start + len(layout)]) != layout.token_ids:
        return True
    expected = None if content.is_embed is None else content.is_embed(content.full)
    if place.is_embed is None or expected is None:  # every position, as a mask of nothing else says too
        return not all(mask is None or bool(mask.all()) for mask in (place.is_embed, expected))
    return not place.is_embed.equal(expected)


def _without(token_ids: list[int], spans: Sequence[tuple[int, int, int]]) -> Assembly:
    text: list[int] = []
    places: list[tuple[int, int]] = []
    copied = 0
    for start, end, index in spans:
        if start < copied:
            raise ServiceError(f"vLLM puts two items of this prompt into the same positions, from {start:,} on")
        text += token_ids[copied:start]
        places.append((index, len(text)))
        copied = end
    return Assembly(text + token_ids[copied:], places)
