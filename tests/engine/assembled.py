"""Prompts by vLLM's own `apply` on real media, and the same prompts assembled from layouts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from semel.core import Digest, Item, Layout, Mask, Modality, Prompt
from semel.engine.vllm.model.assembly import Assembler, company_limits
from semel.processing import Family, family_of, read_config

__all__ = ["Bench", "Drawn", "Places"]

Places = tuple[list[int], list[tuple[Modality, int, tuple[bool, ...]]]]
"""The tokens of a prompt; for each item in order the modality, the first position, and where it takes embeddings."""

_WORDS: Final = ("What", " is", "\n", " <", "imag", ">", "\n\n", " this", "?", " a", ".", " end", " 7", "\n\n\n")


@dataclass(frozen=True)
class Drawn:
    """A random prompt: its tokens before the items are put in, and the media in the order of the request."""

    token_ids: list[int]
    media: list[tuple[Modality, Any]]


class Bench:
    """A model's registered processor, as an engine has it, with real media of random sizes."""

    def __init__(self, folder: Path, family: Family | None = None) -> None:
        self.processor = create_processor(folder)
        self.config = read_config(folder)
        self.family = family or family_of(self.config)
        self.assembler = Assembler.from_processor(self.processor, self.family, self.config)

    @property
    def texts(self) -> Mapping[Modality, str | None]:
        """What stands for an item of each modality."""
        return {modality: rule.text for modality, rule in self.assembler.rules.items()}

    def splices(self, drawn: Drawn) -> bool:
        """Whether replacing one token per item is all that semel would do, without any text of its own around it."""
        rules = [self.assembler.rules[modality] for modality, _ in drawn.media]
        return all(rule.kind == "splice" and not rule.before for rule in rules)

    def some_modalities(self, rng: np.random.Generator, most: int) -> list[Modality]:
        """One to `most` modalities, no more of each than the model takes."""
        limits = {**self.processor.info.supported_mm_limits, **company_limits(self.processor, self.family, self.config)}
        names: list[Modality] = [*self.assembler.rules]
        drawn = [names[index] for index in rng.integers(0, len(names), rng.integers(1, most + 1))]
        left = {name: most if limits[name] is None else limits[name] for name in names}
        return [name for index, name in enumerate(drawn) if drawn[:index].count(name) < left[name]]

    def draw(self, rng: np.random.Generator, modalities: Sequence[Modality]) -> Drawn:
        """A random text with an item of each of these modalities, in this order."""
        tokenizer = self.processor.info.get_tokenizer()
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        text = self._words(rng)
        for modality in modalities:
            text += (self.texts[modality] or "") + self._words(rng)
        token_ids = begin + tokenizer.encode(text, add_special_tokens=False)
        return Drawn(token_ids, [(modality, self._medium(rng, modality)) for modality in modalities])

    def by_vllm(self, drawn: Drawn) -> Places:
        """What vLLM makes of a prompt and its media, with no cache."""
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        media: dict[Modality, list[Any]] = {}
        for modality, medium in drawn.media:
            media.setdefault(modality, []).append(medium)
        items = self.processor.info.parse_mm_data(media, validate=False)
        made = self.processor.apply(ProcessorInputs([*drawn.token_ids], items), TimingContext(enabled=False))
        places = [(modality, one) for modality, its in made["mm_placeholders"].items() for one in its]
        return list(made["prompt_token_ids"]), [
            (modality, *_bounds(one.offset, one.length, None if one.is_embed is None else one.is_embed.tolist()))
            for modality, one in sorted(places, key=lambda pair: pair[1].offset)
        ]

    def by_layouts(self, drawn: Drawn) -> Places:
        """The same from the layouts of the items, each of which was made alone."""
        layouts = [(modality, self.layout(modality, medium)) for modality, medium in drawn.media]
        return places_of(self.assemble(drawn.token_ids, layouts))

    def assemble(self, token_ids: Sequence[int], layouts: Sequence[tuple[Modality, Layout]]) -> Prompt:
        """A prompt from its items' layouts."""
        items = [Item(modality, Digest(bytes([index]) * 32)) for index, (modality, _) in enumerate(layouts)]
        return self.assembler.assemble(token_ids, layouts).prompt(items, [layout for _, layout in layouts])

    def layout(self, modality: Modality, medium: Any) -> Layout:
        """The layout of an item that is alone in its prompt."""
        from semel.engine.vllm.model.prompt_rules import _updates

        content = _updates(self.processor, modality, medium)[0].content
        part = self.assembler.own_part(modality, content, self.family, self.config)
        mask = None if content.is_embed is None else Mask(content.is_embed(content.full)[part].tolist())
        return Layout(tuple(content.full[part]), None if mask is None or mask.count == len(mask) else mask)

    def _words(self, rng: np.random.Generator) -> str:
        return "".join(rng.choice(_WORDS) for _ in range(rng.integers(0, 6)))

    def _medium(self, rng: np.random.Generator, modality: Modality) -> Any:
        from PIL import Image

        width, height = (int(side) for side in rng.integers(56, 400, 2))
        if modality == "image":
            return Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8))
        if modality == "audio":
            return rng.normal(0, 0.1, int(rng.integers(8_000, 64_000))).astype(np.float32)
        frames = int(rng.integers(2, 9))
        pixels = rng.integers(0, 255, (frames, height, width, 3), np.uint8)
        if not self.processor.data_parser.video_needs_metadata:
            return pixels
        metadata = {"total_num_frames": frames, "fps": 2.0, "duration": frames / 2, "video_backend": "opencv"}
        return pixels, {**metadata, "frames_indices": list(range(frames)), "do_sample_frames": False}


def places_of(prompt: Prompt) -> Places:
    """A prompt of ours in the same form."""
    return list(prompt.token_ids), [
        (item.modality, *_bounds(place.offset, place.length, None if place.mask is None else [*place.mask.bits]))
        for item, place in zip(prompt.items, prompt.timeline, strict=True)
    ]


def _bounds(offset: int, length: int, mask: Sequence[bool | int] | None) -> tuple[int, tuple[bool, ...]]:
    return offset, tuple(map(bool, mask)) if mask is not None else (True,) * length


def create_processor(folder: Path) -> Any:
    """vLLM's processor of a model folder, also if the folder has code of its own."""
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = ModelConfig(
        str(folder),
        dtype="float32",
        trust_remote_code=any(folder.glob("configuration_*.py")),
        mm_device_do_normalize=False,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 99, "audio": 99, "video": 99},
    )
    return MULTIMODAL_REGISTRY.create_processor(config)
