"""Quirks of model families, found by the `model_type` of a model's `config.json`.

To add a family whose HF processor tells its replacements: nothing. To teach semel a quirk: a subclass of `Family`, and
a line in the table at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from semel.core import VIDEO_OPTIONS, Feature, Layout, Mask, Modality
from semel.errors import ConfigError
from semel.processing.patches import PatchWriter
from semel.processing.tensors import to_torch

__all__ = ["FAMILIES", "Family", "Gemma3", "Idefics3", "Llava", "Qwen2Audio", "Qwen2VL", "Whisper", "family_of"]


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
        | {"num_crops", "size", *VIDEO_OPTIONS}
    )
    """The `mm_processor_kwargs` that a request may set."""

    video_fps: float | None = None
    """How many frames of a second of video the fast path looks at, as vLLM's loader does; None where it takes none."""

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Return whether a model of this `model_type` is of the family; one that is not has no family of its own."""
        del config
        return True

    def insertion(self, modality: Modality, index: int, placeholder: str) -> str:
        """Return the text for the index-th item (from 1) of a modality in a prompt whose chat template takes none."""
        del modality, index
        return placeholder

    def placeholder_text(self, modality: Modality, placeholder: str) -> str:
        """Return what stands in a prompt's text where the chat template has written the placeholder token."""
        del modality
        return placeholder

    def arguments(self, modality: Modality) -> Mapping[str, object]:
        """Further keyword arguments for the HF processor."""
        return {"truncation": True} if modality == "audio" else {}

    def quicken(self, processor: Any) -> None:
        """Replace steps of a loaded HF processor by faster ones that give the same, bit for bit."""
        del processor

    def write_into(self, processor: Any, memory: memoryview) -> None:
        """Have a quickened HF processor make the largest tensor in this memory, if it can, where a feature has it."""
        del processor, memory

    def tensors(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an item's tensors as the engine takes them, from the HF processor's, which are torch's."""
        return output

    def item_tokens(self, config: Mapping[str, Any], replacement: Sequence[int]) -> slice:
        """Select the item's tokens, not the text's, of those that the processor puts in a placeholder's place."""
        del config, replacement
        return slice(None)

    def layout(self, config: Mapping[str, Any], replacement: Sequence[int]) -> Layout:
        """Return the layout, from the tokens that the HF processor puts in a placeholder's place.

        The embedding token is the one that the replacement repeats most; without any other token there is no mask.
        """
        tokens = replacement[self.item_tokens(config, replacement)]
        counts = {token: tokens.count(token) for token in set(tokens)}
        embedding = max(counts, key=lambda token: counts[token], default=None)
        mask = Mask(token == embedding for token in tokens) if len(counts) > 1 else None
        return Layout(tuple(tokens), mask)

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Return what is wrong with a feature's values, if anything, that names, dtypes and shapes cannot tell."""
        del config, feature
        return None


class Gemma3(Family):
    """A layout reaches from mark to mark; the blank lines around it belong to the text.

    Newlines before and behind an image become one token with its blank lines, and two images share the lines between
    them. So the lines are written before the prompt is tokenised, as transformers does.
    """

    separates_text = True
    layout_from_size = True
    batched = frozenset({"num_patches"})

    options = Family.options - {"do_pan_and_scan"}
    """Crops would come with words before the image; vLLM advises against them, and its contract admits one size."""

    def placeholder_text(self, modality: Modality, placeholder: str) -> str:
        """Return the placeholder between blank lines."""
        del modality
        return f"\n\n{placeholder}\n\n"

    def tensors(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the pixels, and of how many images they are."""
        import torch

        return {**output, "num_patches": torch.tensor([len(output["pixel_values"])])}

    def item_tokens(self, config: Mapping[str, Any], replacement: Sequence[int]) -> slice:
        """From the start mark to the end mark."""
        start, end = config["boi_token_index"], config["eoi_token_index"]
        if list(replacement[1:2]) != [start] or list(replacement[-2:-1]) != [end]:
            raise ConfigError("an image is not between blank lines: start the engine without do_pan_and_scan")
        return slice(1, -1)

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Images that are not counted right, or that give another number of embeddings than the layout."""
        images = feature.tensors["pixel_values"].shape[0]
        if (count := int(to_torch(feature.tensors["num_patches"]))) != images:
            return f"num_patches is {count}, pixel_values has {images} images"
        embeds = images * int(config["mm_tokens_per_image"])
        if embeds != feature.layout.num_embeds:
            return f"pixel_values gives {embeds:,} embeddings, {feature.layout!r} has others"
        return None


class Idefics3(Family):
    """An item's tiles travel with their number; every tile has the same number of embeddings."""

    separates_text = True
    layout_from_size = True
    batched = frozenset({"num_patches"})

    def tensors(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tiles of the one image, without the dimension of a batch, and how many they are."""
        import torch

        tiles = {name: value[0] for name, value in output.items()}
        return {**tiles, "num_patches": torch.tensor([len(tiles["pixel_values"])])}

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Tiles that are not counted right, that the encoder would drop, or in which it would see nothing."""
        import torch

        pixels, mask, count = (to_torch(feature.tensors[name]) for name in _TILES)
        if int(count) != len(pixels) or len(mask) != len(pixels):
            return f"num_patches is {int(count)}, pixel_values has {len(pixels)} tiles, the mask {len(mask)}"
        if not bool(pixels.flatten(1).any(dim=1).all()):
            return "pixel_values has a tile of nothing but zeros, which the encoder leaves out"
        rows, columns = mask[:, :, :1], mask[:, :1, :]
        if not torch.equal(mask, rows * columns) or not bool(_leading(rows[..., 0]) and _leading(columns[:, 0])):
            return "pixel_attention_mask does not show one rectangle of each tile, from its upper left corner"
        tower = config["vision_config"]
        embeds = len(pixels) * (tower["image_size"] // tower["patch_size"] // config["scale_factor"]) ** 2
        if embeds != feature.layout.num_embeds:
            return f"pixel_values gives {embeds:,} embeddings, {feature.layout!r} has others"
        return None


_TILES = ("pixel_values", "pixel_attention_mask", "num_patches")


def _leading(lines: Any) -> bool:
    """Return whether every line is a run of ones, at least one, followed by zeros."""
    return bool((lines[:, 0] == 1).all() and (lines[:, 1:] <= lines[:, :-1]).all() and (lines >= 0).all())


_CLASS_TOKENS: Final[Mapping[str, int]] = {"clip_vision_model": 1, "siglip_vision_model": 0}


class Llava(Family):
    """Images whose number of embeddings follows from their pixels, which vLLM does not report by itself."""

    separates_text = True
    layout_from_size = True
    batched = frozenset({"pixel_values"})

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Not if the tower is Pixtral's, whose images are of any size."""
        return config.get("vision_config", {}).get("model_type", "clip_vision_model") in _CLASS_TOKENS

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Pixels that give another number of embeddings than the layout."""
        tower = config["vision_config"]
        embeds = _CLASS_TOKENS[tower["model_type"]]
        *_, height, width = feature.tensors["pixel_values"].shape
        embeds += (height // tower["patch_size"]) * (width // tower["patch_size"])
        if config.get("vision_feature_select_strategy", "default") == "default":
            embeds -= 1
        if embeds != feature.layout.num_embeds:
            return f"pixel_values gives {embeds:,} embeddings, {feature.layout!r} has others"
        return None


class Qwen2Audio(Family):
    """Clips are numbered in the prompt; how many embeddings a clip has follows from its mask."""

    separates_text = True
    batched = frozenset({"feature_attention_mask", "input_features"})

    def insertion(self, modality: Modality, index: int, placeholder: str) -> str:
        """Return the line that the family's own template writes for a clip, without its end."""
        del modality
        return f"Audio {index}: <|audio_bos|>{placeholder}<|audio_eos|>"

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Describe a mask with holes, or one that gives another number of embeddings than the layout."""
        del config
        mask = to_torch(feature.tensors["feature_attention_mask"])
        frames = int(mask.sum())
        if not bool((mask[:frames] == 1).all()) or bool(mask[frames:].any()):
            return "feature_attention_mask is not a run of ones followed by zeros"
        embeds = ((frames - 1) // 2 + 1 - 2) // 2 + 1  # two convolutions of the tower: stride 2, then pooling by 2
        if embeds != feature.layout.num_embeds:
            return f"feature_attention_mask gives {embeds} embeddings, {feature.layout!r} has others"
        return None


class Qwen2VL(Family):
    """The placeholder stands between two marks; the grid has to fit the patches, or the encoder fails."""

    separates_text = True
    layout_from_size = True
    video_fps = 2.0
    batched = frozenset({"image_grid_thw", "second_per_grid_ts", "video_grid_thw"})

    def insertion(self, modality: Modality, index: int, placeholder: str) -> str:
        """Return the placeholder with the marks that the family's own template writes around it."""
        del modality, index
        return f"<|vision_start|>{placeholder}<|vision_end|>"

    def quicken(self, processor: Any) -> None:
        """Move whole pixels of an image, and write its patches once."""
        PatchWriter.install(processor.image_processor)

    def write_into(self, processor: Any, memory: memoryview) -> None:
        """Have patches written into this memory."""
        if isinstance(writer := getattr(processor.image_processor, "patchify", None), PatchWriter):
            writer.write_into(memory)

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Describe a grid that does not tile into merged patches, or that does not count the patches that are there."""
        name, pixels = _GRIDS[feature.modality]
        merge = int(config["vision_config"].get("spatial_merge_size", 2))
        frames, height, width = to_torch(feature.tensors[name]).tolist()
        rows = feature.tensors[pixels].shape[0]
        if min(frames, height, width) < 1 or height % merge or width % merge:
            return f"{name} is {(frames, height, width)}, which does not tile into patches merged {merge}×{merge}"
        if frames * height * width != rows:
            return f"{name} counts {frames * height * width:,} patches, {pixels} has {rows:,}"
        if frames * height * width // merge**2 != feature.layout.num_embeds:
            return f"{name} gives {frames * height * width // merge**2:,} embeddings, {feature.layout!r} has others"
        if (steps := feature.tensors.get("second_per_grid_ts")) is not None:
            seconds = float(to_torch(steps))
            if not 0 < seconds * frames <= _MAX_VIDEO_S:  # positions follow it, and their table has an end
                return f"second_per_grid_ts is {seconds:g}, which makes a video of {seconds * frames:g} s"
        return None


_MAX_VIDEO_S = 4 * 3_600
_GRIDS: Mapping[Modality, tuple[str, str]] = {
    "image": ("image_grid_thw", "pixel_values"),
    "video": ("video_grid_thw", "pixel_values_videos"),
}


class Whisper(Family):
    """Every clip is padded or cut to the encoder's length, so every layout is the same."""

    encoder_decoder = True
    batched = frozenset({"input_features"})

    def layout(self, config: Mapping[str, Any], replacement: Sequence[int]) -> Layout:
        """Return the encoder's positions; it has no tokens of its own, and 0 stands for each."""
        del replacement
        return Layout((0,) * int(config["max_source_positions"]))

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Another number of positions than the encoder has."""
        if len(feature.layout) != config["max_source_positions"] or feature.layout.mask is not None:
            return f"{feature.layout!r}, the encoder has {config['max_source_positions']} positions"
        return None


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "gemma3": Gemma3(),
        "idefics3": Idefics3(),
        "llava": Llava(),
        "qwen2_5_vl": Qwen2VL(),
        "qwen2_audio": Qwen2Audio(),
        "qwen2_vl": Qwen2VL(),
        "whisper": Whisper(),
    }
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a model, from its `config.json`; one without quirks has the defaults."""
    family = FAMILIES.get(config.get("model_type", ""))
    return family if family is not None and family.describes(config) else Family()
