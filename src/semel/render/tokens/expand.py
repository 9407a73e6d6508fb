"""From token ids to a prompt: the layout of each item replaces its placeholder token.

Pure, and linear in tokens plus items (threats S16). The k-th placeholder token of a modality belongs to the k-th item
of that modality. If their numbers differ, a text became a placeholder or the template lost one, and the request is
refused (S14).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from semel.core import Item, Layout, Modality, Placeholder, Prompt, Timeline
from semel.errors import InvalidRequest

__all__ = ["expand", "expand_encoder"]


def expand(
    token_ids: Sequence[int],
    *,
    placeholder_ids: Mapping[int, Modality],
    items: Sequence[Item],
    layouts: Sequence[Layout],
) -> Prompt:
    """The prompt of a decoder: `layouts[i]` replaces the placeholder of `items[i]`. Its items are in timeline order."""
    positions = [position for position, token in enumerate(token_ids) if token in placeholder_ids]
    modalities = [placeholder_ids[token_ids[position]] for position in positions]
    _check_counts(Counter(modalities), Counter(item.modality for item in items))

    pairs = list(zip(items, layouts, strict=True))
    waiting = {kind: iter([pair for pair in pairs if pair[0].modality == kind]) for kind in set(modalities)}

    expanded: list[int] = []
    placeholders: list[Placeholder] = []
    placed: list[Item] = []
    copied = 0
    for position, modality in zip(positions, modalities, strict=True):
        item, layout = next(waiting[modality])
        expanded += token_ids[copied:position]
        placeholders.append(Placeholder(len(expanded), len(layout), layout.mask))
        placed.append(item)
        expanded += layout.token_ids
        copied = position + 1
    expanded += token_ids[copied:]
    return Prompt(expanded, Timeline.decoder(placeholders), tuple(placed))


def expand_encoder(decoder_token_ids: Sequence[int], *, item: Item, layout: Layout) -> Prompt:
    """The prompt of an encoder-decoder: the item fills the encoder's side, and the decoder's tokens stay (A6)."""
    timeline = Timeline.encoder([Placeholder(0, len(layout), layout.mask)])
    return Prompt(decoder_token_ids, timeline, (item,), encoder_token_ids=layout.token_ids)


def _check_counts(found: Counter[Modality], expected: Counter[Modality]) -> None:
    for modality in sorted(found.keys() | expected.keys()):
        if found[modality] != expected[modality]:
            raise InvalidRequest(
                f"the prompt has {found[modality]} placeholder tokens for {expected[modality]} {modality} items: "
                "either neighbouring texts spell a placeholder token together, or the chat template leaves an item out "
                "or shows it twice; change the messages"
            )
