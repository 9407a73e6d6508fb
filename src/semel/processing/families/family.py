"""What may differ from one model family to the next, with the defaults that suit most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.core import Feature, Layout, Mask, Modality

__all__ = ["Family"]


class Family:
    """The quirks of a family. The default has none; a family overrides what is special about it and nothing else.

    `config` is the model's `config.json`. A family is stateless and answers the same in every process.
    """

    encoder_decoder: bool = False
    """Whether items go to an encoder's own prompt instead of taking positions in the decoder's."""

    separates_text: bool = False
    """Whether the HF processor is known to give the same when its text is kept apart from its tensors."""

    layout_from_size: bool = False
    """Whether the layout of an image follows from its size and the options alone."""

    batched: frozenset[str] = frozenset()
    """The tensors that the HF processor returns with a dimension of a batch; a feature has them without it."""

    options: frozenset[str] = frozenset(
        {"crop_size", "do_center_crop", "do_pan_and_scan", "do_resize", "max_dynamic_patch", "max_pixels", "min_pixels"}
        | {"num_crops", "size"}
    )
    """The `mm_processor_kwargs` that a request may set."""

    video_fps: float | None = None
    """How many frames of a second of video the fast path looks at, as vLLM's loader does; None where it takes none."""

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether a model of this `model_type` is of the family; one that is not has no family of its own."""
        del config
        return True

    def insertion(self, modality: Modality, index: int, placeholder: str) -> str:
        """What to write into a prompt whose chat template takes no items, for the index-th (from 1) of a modality."""
        del modality, index
        return placeholder

    def placeholder_text(self, modality: Modality, placeholder: str) -> str:
        """What stands in a prompt's text where the chat template has written the placeholder token."""
        del modality
        return placeholder

    def arguments(self, modality: Modality) -> Mapping[str, object]:
        """Further keyword arguments for the HF processor."""
        return {"truncation": True} if modality == "audio" else {}

    def quicken(self, processor: Any) -> None:
        """Replace steps of a loaded HF processor by faster ones that give the same, bit for bit."""
        del processor

    def tensors(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """An item's tensors as the engine takes them, from the HF processor's, which are torch's."""
        return output

    def item_tokens(self, config: Mapping[str, Any], replacement: Sequence[int]) -> slice:
        """Which tokens of those that the processor puts in a placeholder's place are the item's, and not the text's."""
        del config, replacement
        return slice(None)

    def layout(self, config: Mapping[str, Any], replacement: Sequence[int]) -> Layout:
        """The layout, from the tokens that the HF processor puts in a placeholder's place.

        The embedding token is the one that the replacement repeats most; without any other token there is no mask.
        """
        tokens = replacement[self.item_tokens(config, replacement)]
        counts = {token: tokens.count(token) for token in set(tokens)}
        embedding = max(counts, key=lambda token: counts[token], default=None)
        mask = Mask(token == embedding for token in tokens) if len(counts) > 1 else None
        return Layout(tuple(tokens), mask)

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """What is wrong with a feature's values, if anything, that names, dtypes and shapes cannot tell."""
        del config, feature
        return None
