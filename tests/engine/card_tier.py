"""The embedding tier for items without their large tensors, as far as a spike needs it (`test_cards.py`)."""

from __future__ import annotations

from typing import Any, Final

from semel.engine.vllm.tier.connector import EmbeddingTier

__all__ = ["CARD", "LOST", "CardTier", "TrustingCardTier"]

CARD: Final = "card/"
"""What the name of such an item in vLLM's item cache begins with. Its identifier is that of the whole item."""


LOST: Final = "lost"
"""Requests whose names begin so find that their outputs are not there any more."""


class TrustingCardTier(EmbeddingTier):
    """The naive way: a card's output is there, since it was there when the request came."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        self._is_lost = request.request_id.startswith(LOST)
        return super().ensure_cache_available(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return not self._is_lost and super().has_cache_item(identifier)


class CardTier(TrustingCardTier):
    """Ends a request with an error whose card has no output that can be loaded, before a step encodes it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unavailable: set[str] = set()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        super().ensure_cache_available(request, num_computed_tokens)
        for feature in request.mm_features:
            place = feature.mm_position
            is_due = place.offset + place.length > num_computed_tokens
            if is_due and feature.mm_hash.startswith(CARD) and not self.has_cache_item(feature.identifier):
                self._unavailable.add(request.request_id)
                return False
        return True

    def take_unavailable_requests(self) -> set[str]:
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable
