"""A prompt before its items are put in: the tokens of its text, and where the items go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from semel.core.layout import Layout
from semel.core.prompt import Item, Placeholder, Prompt, Timeline

__all__ = ["Assembly", "AssemblyKind"]

AssemblyKind = Literal["splice", "apply"]
"""How the items of a modality enter a prompt.

`splice`: an item's layout replaces one placeholder token, and nothing else changes. `apply`: the model has rules of its
own, and its processor applies them: a placeholder of several tokens or none, or text that changes around an item.
"""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The tokens of a prompt without its items, and the places of the items in them."""

    token_ids: Sequence[int]
    places: Sequence[tuple[int, int]]
    """In the order of the prompt: which item of the request, and how many of the tokens stand before it."""

    def prompt(self, items: Sequence[Item], layouts: Sequence[Layout]) -> Prompt:
        """The prompt with the layout of each item at its place; raises ValueError if an item has none or several."""
        if sorted(index for index, _ in self.places) != [*range(len(items))]:
            raise ValueError(f"{len(items)} items have {len(self.places)} places")
        token_ids: list[int] = []
        placeholders: list[Placeholder] = []
        copied = 0
        for index, before in self.places:
            if not copied <= before <= len(self.token_ids):
                raise ValueError(f"item {index} is after {before} tokens: out of order, or behind the end")
            layout = layouts[index]
            token_ids += self.token_ids[copied:before]
            placeholders.append(Placeholder(len(token_ids), len(layout), layout.mask))
            token_ids += layout.token_ids
            copied = before
        token_ids += self.token_ids[copied:]
        return Prompt(token_ids, Timeline.decoder(placeholders), tuple(items[index] for index, _ in self.places))
