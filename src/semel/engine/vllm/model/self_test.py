"""The self-test of a worker: what semel makes of a medium is what its engine would have made, bit by bit.

It runs before the worker is ready. Each probe is a file as a client would send it. It goes through the processor that
the pools run, over the wire, past the contract, and becomes an item. The engine's own processor gets the same file from
vLLM's own loader. Then prompts with one, two and three items are made in both ways. The first difference switches the
modality off, with one line that names it. So no family is ever served wrong silently.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from semel.core import Contract, Digest, Feature, Item, Layout, Media, Modality, Placeholder, Prompt
from semel.engine.vllm.model.item import make_item, parse, to_tensors
from semel.engine.vllm.model.model import VllmModel
from semel.errors import ConfigError, FeatureRejected, RequestError, SemelError
from semel.media.decode.warmup_media import image_file, sample_clip, video_file
from semel.processing.processor import Processor
from semel.render.tokens.expand import expand
from semel.wire.codec import FROM_FRONTEND, decode, encode, pack
from semel.wire.limits import Limits
from semel.wire.messages import Payload
from semel.wire.translation import to_feature, to_payload

__all__ = ["Assemble", "SelfTest", "Verdict", "assembling"]

_IMAGES: Final = ((56, 56), (112, 112), (640, 480), (1024, 768), (300, 900), (2000, 300), (4096, 64))
"""Widths and heights."""

_CLIPS_S: Final = (1.0, 0.4, 7.0)
_VIDEOS: Final = ((8, 112, 112), (5, 168, 112))
"""Frames, heights and widths."""

_COMPANY: Final = (1, 2, 3)
_LARGE_BYTES: Final = 64 * 1024
_WHOLE: Final = Limits(inline_bytes=1 << 30)

Assemble = Callable[[str, Sequence[Item], Sequence[Layout]], Prompt]
"""Makes the prompt of a text with items, as a frontend does."""

logger = logging.getLogger(__name__)


class _DifferenceError(Exception):
    """A difference between a feature of semel's and the engine's own."""


@dataclass(frozen=True)
class Verdict:
    """The result of a self-test."""

    faults: Mapping[Modality, str] = field(default_factory=dict)
    """The modalities that must not be served, and the first difference of each."""

    features: Mapping[Modality, Feature] = field(default_factory=dict)
    """A small feature of each modality that may be, with a tensor that lazy transfer leaves out."""

    def admitted(self, contract: Contract) -> Contract:
        """Return the contract without the modalities that failed; raises if none is left of several or of one."""
        for modality, fault in self.faults.items():
            logger.error("this worker takes no %s, because semel would not serve it as vLLM does: %s", modality, fault)
        if contract.fields and not contract.fields.keys() - self.faults:
            raise ConfigError(
                f"semel would not serve {contract.model} as vLLM does: {'; '.join(self.faults.values())}. Serve it "
                "with vLLM alone, and tell us"
            )
        kept = contract.fields.keys() - self.faults
        return replace(
            contract,
            fields={modality: fields for modality, fields in contract.fields.items() if modality in kept},
            max_items={modality: count for modality, count in contract.max_items.items() if modality in kept},
        )


@dataclass(frozen=True)
class _Probe:
    name: str
    media: Media


@dataclass(frozen=True)
class SelfTest:
    """A comparison of the pools' processor with an engine's."""

    processor: Processor
    """As the pools run it."""

    engine: Any
    """The engine's own processor, of vLLM."""

    model: VllmModel
    contract: Contract
    assemble: Assemble | None = None
    """Makes prompts; None for what `assembling` returns."""

    def run(self) -> Verdict:
        """Compare every modality of the contract."""
        faults: dict[Modality, str] = {}
        features: dict[Modality, Feature] = {}
        for modality in self.contract.fields:
            try:
                features[modality] = self._compare(modality)
            except (_DifferenceError, SemelError) as error:
                faults[modality] = str(error)
            except Exception as error:
                logger.warning("the self-test of %s failed", modality, exc_info=error)
                faults[modality] = f"its self-test failed: {error!r}"
        return Verdict(faults, features)

    def _compare(self, modality: Modality) -> Feature:
        made = {probe.name: (probe, feature) for probe in _probes(modality) if (feature := self._feature(probe))}
        if not made:
            raise _DifferenceError("the model's processor refuses every probe")
        own = {name: self._load(probe.media) for name, (probe, _) in made.items()}
        for name, (_, feature) in made.items():
            self._compare_items(name, feature, own[name])
        if not self.model.is_encoder_decoder:
            few = sorted(made, key=lambda name: len(made[name][1].layout))[:2]
            for count in _COMPANY[: self.contract.max_items[modality]]:
                names = [few[index % len(few)] for index in range(count)]
                self._compare_prompts([made[name][1] for name in names], [own[name] for name in names])
        features = [feature for _, feature in made.values()]
        large = [feature for feature in features if _largest(feature) >= _LARGE_BYTES]
        return min(large or features, key=lambda feature: len(feature.layout))

    def _feature(self, probe: _Probe) -> Feature | None:
        """Process a probe as the pools do, as a worker receives it; None if they refuse it as they would a client's."""
        try:
            from_header = self.processor.lay_out_header(probe.media)
            feature = self.processor.process(probe.media)
        except RequestError as error:
            logger.debug("the processor refuses %s: %s", probe.name, error)
            return None
        if from_header not in (None, feature.layout):
            raise _DifferenceError(f"{probe.name} has {feature.layout!r}, its header tells {from_header!r}")
        received = _sent(feature)
        try:
            self.contract.check(received)
            fault = self.model.check(received)
        except FeatureRejected as error:
            fault = str(error)
        if fault is not None:
            raise _DifferenceError(f"{probe.name} does not fit the engine's contract: {fault}")
        return received

    def _compare_items(self, name: str, feature: Feature, medium: Any) -> None:
        modality = feature.modality
        own = make_item(self.engine, modality, parse(self.engine, modality, medium), {})
        try:
            built = self.model.build(feature)
        except FeatureRejected as error:
            raise _DifferenceError(f"{name} does not fit the engine's contract: {error}") from error
        ours, theirs = to_tensors(built), to_tensors(own)
        if ours.keys() != theirs.keys():
            raise _DifferenceError(f"{name} has the fields {sorted(ours)}, vLLM's has {sorted(theirs)}")
        for key in ours:
            if (ours[key].dtype, ours[key].shape) != (theirs[key].dtype, theirs[key].shape):
                raise _DifferenceError(f"{key} of {name} is {ours[key]!r}, vLLM's is {theirs[key]!r}")
            if bytes(ours[key].data) != bytes(theirs[key].data):
                raise _DifferenceError(f"{key} of {name} is {ours[key]!r}, as vLLM's, but has other values")
        for key, element in own.items():
            if type(built[key].data) is not type(element.data) or type(built[key].field) is not type(element.field):
                raise _DifferenceError(f"{key} of {name} is of another kind than vLLM's")

    def _compare_prompts(self, features: Sequence[Feature], media: Sequence[Any]) -> None:
        modality = features[0].modality
        name = f"a prompt with {len(features)} of the modality {modality}"
        marks = [self._mark(modality, index + 1) for index in range(len(features))]
        text = "".join(f"see {mark} and" for mark in marks) + " say"
        theirs = self._apply(text, modality, media)
        items = [Item(modality, Digest(index.to_bytes(Digest.size, "big"))) for index in range(len(features))]
        assemble = self.assemble or assembling(self.processor, self.engine.info.get_tokenizer())
        ours = assemble(text, items, [feature.layout for feature in features])
        if list(ours.token_ids) != theirs["prompt_token_ids"]:
            raise _DifferenceError(
                f"{name} has {len(ours.token_ids)} tokens, vLLM's has {len(theirs['prompt_token_ids'])}"
                if len(ours.token_ids) != len(theirs["prompt_token_ids"])
                else f"{name} has other tokens than vLLM's"
            )
        for index, (mine, its) in enumerate(zip(ours.timeline, theirs["mm_placeholders"][modality], strict=True)):
            if _positions(mine) != _vllm_positions(its):
                raise _DifferenceError(f"{name} has item {index + 1} at {mine!r}, vLLM's has it at {its!r}")

    def _mark(self, modality: Modality, number: int) -> str:
        """Return what stands for an item in a prompt: the words of the model around its placeholder, or that alone."""
        placeholder, words = self.processor.placeholders.get(modality, ""), self.processor.insertion(modality, number)
        return words if placeholder in words else placeholder

    def _apply(self, text: str, modality: Modality, media: Sequence[Any]) -> Any:
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        tokens = self.engine.info.get_tokenizer().encode(text, add_special_tokens=False)
        items = self.engine.info.parse_mm_data({modality: list(media)})
        return self.engine.apply(ProcessorInputs(tokens, items), TimingContext(enabled=False))

    def _load(self, media: Media) -> Any:
        """Return the medium as vLLM's own loader decodes it."""
        from vllm.multimodal.media import MediaConnector
        from vllm.transformers_utils.processor import get_video_processor_cls_name

        settings = self.engine.info.ctx.model_config.get_multimodal_config().media_io_kwargs or {}
        connector = MediaConnector(media_io_kwargs=settings)
        url = f"data:{media.mime};base64,{base64.b64encode(media.data).decode()}"
        if media.modality == "image":
            return connector.fetch_image(url)
        if media.modality == "audio":
            return connector.fetch_audio(url)
        loader = get_video_processor_cls_name(self.engine.info.ctx.model_config)
        return connector.fetch_video(url, video_processor=loader)


def assembling(processor: Processor, tokenizer: Any) -> Assemble:
    """Create a maker of prompts like a frontend's, with the engine's tokenizer, which a frontend's must equal."""

    def assemble(text: str, items: Sequence[Item], layouts: Sequence[Layout]) -> Prompt:
        for modality, placeholder in processor.placeholders.items():
            text = text.replace(placeholder, processor.placeholder_text(modality))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if all(processor.assembly.get(item.modality, "splice") == "splice" for item in items):
            found = {token: tokenizer.convert_tokens_to_ids(token) for token in processor.placeholders.values()}
            placeholder_ids = {found[token]: modality for modality, token in processor.placeholders.items()}
            return expand(token_ids, placeholder_ids=placeholder_ids, items=items, layouts=layouts)
        pairs = [(item.modality, layout) for item, layout in zip(items, layouts, strict=True)]
        return processor.assemble(token_ids, pairs).prompt(items, layouts)

    return assemble


def _largest(feature: Feature) -> int:
    return max((tensor.nbytes for tensor in feature.tensors.values()), default=0)


def _sent(feature: Feature) -> Feature:
    """A feature after it was sent and received."""
    body = pack(to_payload(1, Digest(bytes(Digest.size)), feature), _WHOLE)
    frames = encode(1, 1, body, [tensor.data.cast("B") for tensor in feature.tensors.values()])
    received = decode(frames, FROM_FRONTEND, _WHOLE)
    assert isinstance(received.message, Payload)
    return to_feature(received.message, received.buffers)


def _probes(modality: Modality) -> Iterator[_Probe]:
    if modality == "image":
        for width, height in _IMAGES:
            yield _Probe(f"an image of {width}×{height}", image_file(width, height))
    elif modality == "audio":
        for seconds in _CLIPS_S:
            yield _Probe(f"a clip of {seconds:g} s", sample_clip(seconds=seconds))
    else:
        for frames, height, width in _VIDEOS:
            yield _Probe(f"a video of {frames} frames of {width}×{height}", video_file(frames, width, height))


def _positions(place: Placeholder) -> list[int]:
    bits = place.mask.bits if place.mask is not None else b"\x01" * place.length
    return [place.offset + index for index, bit in enumerate(bits) if bit]


def _vllm_positions(place: Any) -> list[int]:
    bits = [True] * place.length if place.is_embed is None else place.is_embed.tolist()
    return [place.offset + index for index, bit in enumerate(bits) if bit]
