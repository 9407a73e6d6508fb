"""A feature from media, through the multimodal processor that vLLM registers for a model.

For any model that vLLM knows, without an engine and without a GPU. Media are decoded by semel, under its limits; the
processor is given one item alone, and the layout is what it says that item's placeholder gives way to, but for what a
family of ours counts as text. The tensors are those of vLLM's own item, as `VllmModel` takes them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from semel.core import Assembly, AssemblyKind, Feature, Layout, Media, Modality, Target, split_options
from semel.engine.vllm.compat.versions import check_processor
from semel.engine.vllm.model.assembly import Assembler
from semel.engine.vllm.model.header_layouts import HeaderLayouts
from semel.engine.vllm.model.item import lay_out, make_item, parse, to_tensors
from semel.engine.vllm.model.prompt_rules import supported_modalities
from semel.engine.vllm.model.video import VideoLoader
from semel.errors import ConfigError, InvalidRequest, MediaDegenerate, MediaUndecodable
from semel.media import DecodeLimits, Pieces, cut_audio, decode_audio, image_of, image_size
from semel.processing import Family, family_of, read_config
from semel.processing.fingerprint import Within, fingerprint
from semel.processing.folder import code_files, find_tokenizer, runs_code
from semel.processing.options import check_options, to_origin
from semel.processing.tensors import is_out_of_memory

__all__ = ["VllmProcessor"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VllmProcessor:
    """vLLM's registered processor of one model folder, made to produce what one engine expects."""

    processor: Any
    model: Any
    """The model's class: it knows how its items are written into a prompt."""

    config: Mapping[str, Any]
    family: Family
    """The model's family; the defaults if semel does not know it."""

    limits: DecodeLimits
    assembler: Assembler
    """Puts items into prompts; for an encoder-decoder it has no rules."""

    header_layouts: HeaderLayouts
    """Tells layouts of images from their sizes, where that is proven."""

    fingerprint: str

    @classmethod
    def load(cls, folder: Path, target: Target, limits: DecodeLimits | None = None) -> Self:
        """Load a model folder's processor; nothing is fetched."""
        rendering = target.rendering
        tokenizer = find_tokenizer(folder, rendering)
        config = read_config(folder)
        version = check_processor()
        try:
            from vllm.model_executor.model_loader import get_model_architecture
            from vllm.multimodal import MULTIMODAL_REGISTRY

            model_config = _model_config(folder, tokenizer, target)
            processor = MULTIMODAL_REGISTRY.create_processor(model_config)
            hf_processor = processor.info.get_hf_processor()
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(
                f"vLLM {version} has no multimodal processor for the folder {folder}; if transformers has one, start "
                f"every worker and frontend with --processor hf. vLLM says: {' '.join(str(error).split())}"
            ) from error
        if "video" in (rendering.media_io_kwargs or {}):
            VideoLoader.from_config(model_config).check()
        within = Within("vllm", version, type(processor).__qualname__)
        own_config = model_config.hf_config.to_dict() if rendering.hf_overrides else config
        model_type = {**config, **(rendering.hf_overrides or {})}.get("model_type", "")
        family = family_of({**own_config, "model_type": model_type})
        assembler = (
            Assembler(processor, {})
            if model_config.is_encoder_decoder
            else Assembler.from_processor(processor, family, own_config)
        )
        part_of = partial(assembler.own_part, "image", family=family, config=own_config)
        return cls(
            processor=processor,
            model=get_model_architecture(model_config)[0],
            config=own_config,
            family=family,
            limits=limits or DecodeLimits(),
            assembler=assembler,
            header_layouts=HeaderLayouts(processor, part_of),
            fingerprint=fingerprint(
                hf_processor,
                config,
                target,
                tokenizer / "tokenizer.json",
                within=within,
                code=_code(folder) if runs_code(folder, rendering) else None,
            ),
        )

    @property
    def hf_processor(self) -> Any:
        """The processor of transformers that vLLM's calls."""
        return self.processor.info.get_hf_processor()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that vLLM has for this model."""
        return self.processor.info.get_tokenizer()

    @property
    def encoder_decoder(self) -> bool:
        """True if items go to an encoder's own prompt instead of taking positions in the decoder's."""
        return bool(self.processor.info.ctx.model_config.is_encoder_decoder)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """The modalities that the processor takes."""
        return supported_modalities(self.processor)

    @property
    def placeholders(self) -> Mapping[Modality, str]:
        """The text of an item by modality in the prompt's text; none where items are inserted."""
        rules = self.assembler.rules
        return {modality: rule.text for modality, rule in rules.items() if rule.text is not None}

    @property
    def assembly(self) -> Mapping[Modality, AssemblyKind]:
        """The assembler of prompts with items."""
        return {modality: rule.kind for modality, rule in self.assembler.rules.items()}

    def insertion(self, modality: Modality, index: int) -> str:
        """Return the text for the index-th item (from 1) of a modality in a prompt whose chat template takes none."""
        try:
            text: str | None = self.model.get_placeholder_str(modality, index)
        except ValueError:  # how a model says that it has no words for a modality
            text = None
        return text or self.placeholders.get(modality, "")

    def placeholder_text(self, modality: Modality) -> str:
        """Return what stands in a prompt's text where the chat template has written a modality's placeholder."""
        return self.family.placeholder_text(modality, self.placeholders[modality])

    def assemble(self, token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]]) -> Assembly:
        """Return the prompt of a text with these items, by the model's own rules."""
        return self.assembler.assemble(token_ids, items)

    def write_into(self, memory: memoryview) -> None:
        """Nothing to do: vLLM's processors return tensors of their own."""

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        """Return the feature of one item; `options` are the request's `mm_processor_kwargs`."""
        options, reading = split_options(options)
        self._check(media, options)
        modality = media.modality
        decoded = self._decode(media, reading)
        items, item = self._call(modality, decoded, options)
        layout = self._layout(modality, items, item, options)
        pixels, metadata = decoded if isinstance(decoded, tuple) else (decoded, None)
        if modality == "image":
            self.header_layouts.remember(pixels.size, options, layout)
        return Feature(modality, to_tensors(item), layout, to_origin(modality, pixels, options, metadata))

    def lay_out(self, media: Media, options: Mapping[str, object] | None = None) -> Layout:
        """Return the layout of the feature that `process` would make, of an image by its header if that tells it."""
        self._check(media, split_options(options)[0])
        if (layout := self.lay_out_header(media, options)) is not None:
            return layout
        return self.process(media, options).layout

    def lay_out_header(self, media: Media, options: Mapping[str, object] | None = None) -> Layout | None:
        """Return the layout of an image, if its header tells it; nothing is decoded then or otherwise."""
        if media.modality != "image" or (size := image_size(media, self.limits)) is None:
            return None
        return self.header_layouts.find(size, options or {})

    def cut(self, media: Media) -> Pieces:
        """Return a clip in pieces that the model's encoder takes, each of which can be processed."""
        extractor = self.processor.info.get_feature_extractor()
        return cut_audio(media.data, self.limits, sampling_rate=extractor.sampling_rate, max_s=extractor.chunk_length)

    def _check(self, media: Media, options: Mapping[str, object]) -> None:
        if media.modality not in self.modalities:
            raise InvalidRequest(f"this model takes no {media.modality}; it takes {', '.join(self.modalities)}")
        check_options(options, self.family.options, max_value=self.limits.max_image_pixels)

    def _decode(self, media: Media, reading: Mapping[str, Any] = MappingProxyType({})) -> Any:
        if media.modality == "image":
            return image_of(media, self.limits)
        if media.modality == "audio":
            rate = self.processor.data_parser.audio_resampler.target_sr
            rate = rate or self.processor.info.get_feature_extractor().sampling_rate
            return decode_audio(media.data, self.limits, sampling_rate=int(rate))
        loader = VideoLoader.from_config(self.processor.info.ctx.model_config, reading)
        return loader.load(media.data, self.limits)

    def _call(self, modality: Modality, decoded: Any, options: Mapping[str, object]) -> tuple[Any, Any]:
        """Return the medium as vLLM parses it, and the item that it makes of it."""
        try:
            items = parse(self.processor, modality, decoded)
            return items, make_item(self.processor, modality, items, options)
        except Exception as error:  # noqa: BLE001 - foreign code, given a client's options, may raise anything
            cause = error.__cause__ or error  # vLLM's own words show the whole item
            if isinstance(cause, MemoryError) or is_out_of_memory(cause):
                raise MemoryError from None
            logger.info("%s refused an item: %r", type(self.processor).__name__, cause)
            raise MediaUndecodable(
                f"the model's processor refused the {modality}; check its proportions and `mm_processor_kwargs`"
            ) from None

    def _layout(self, modality: Modality, items: Any, item: Any, options: Mapping[str, object]) -> Layout:
        layout = None
        try:
            layout = lay_out(self.processor, modality, items, item, options, partial(self._part, modality))
        except (ArithmeticError, ValueError) as error:
            logger.info("%s has no place for an item: %r", type(self.processor).__name__, error)
        if layout is None or not layout.num_embeds:
            raise MediaDegenerate(f"the {modality} is too small or too short for this model to see anything of it")
        return layout

    def _part(self, modality: Modality, content: Any) -> slice:
        """Return what is the item's of that which vLLM puts in its place."""
        return self.assembler.own_part(modality, content, self.family, self.config)


def _code(folder: Path) -> Mapping[str, bytes]:
    """Return the model's code, by the names of its files."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in code_files(folder)}


def _model_config(folder: Path, tokenizer: Path, target: Target) -> Any:
    """vLLM's description of a model as an engine of this target has it; no cache, and the limits are the contract's."""
    from vllm.config import ModelConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as an engine does: they may add models
    by_engine, rendering = target.normalisation == "engine", target.rendering
    config = ModelConfig(
        str(folder),
        tokenizer=str(tokenizer),
        tokenizer_mode=rendering.tokenizer_mode,
        trust_remote_code=rendering.trust_remote_code,
        code_revision=rendering.code_revision,
        config_format=rendering.config_format,
        model_impl=rendering.model_impl,
        hf_overrides=dict(rendering.hf_overrides or {}),
        media_io_kwargs={modality: dict(own) for modality, own in (rendering.media_io_kwargs or {}).items()},
        dtype=target.dtype,
        mm_device_do_normalize=by_engine,
        mm_processor_cache_gb=0,
        mm_processor_kwargs=dict(target.options or {}),
    )
    if bool(config.get_multimodal_config().mm_device_do_normalize) != by_engine:
        raise ValueError("its engine does not normalise pixels, and the target says that it does")
    return config
