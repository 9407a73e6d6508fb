"""A feature from media, through the model's own HF processor.

One item at a time: the processor is called with the placeholder token alone as its text, so that what it returns
besides tensors is exactly the item's layout. No formula of a model is repeated here; what is special about a family is
in `families`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from semel.cache import LayoutCache
from semel.core import Assembly, AssemblyKind, Feature, Layout, Media, Modality, Origin, Target, split_options
from semel.errors import ConfigError, InvalidRequest, MediaDegenerate, MediaUndecodable, ServiceError
from semel.media import (
    FRAME_LIST,
    DecodeLimits,
    Pieces,
    Video,
    VideoHeader,
    cut_audio,
    decode_audio,
    decode_frames,
    decode_video,
    image_of,
    image_size,
)
from semel.processing.families import Family, family_of
from semel.processing.fingerprint import fingerprint
from semel.processing.folder import read_config
from semel.processing.options import check_options, to_origin
from semel.processing.tensors import from_torch, is_out_of_memory

__all__ = ["HfProcessor", "RunTokenizer", "choose_frames"]

_ARGUMENT: Final[Mapping[Modality, str]] = {"audio": "audio", "image": "images", "video": "videos"}
_PARTS: Final[Mapping[Modality, str]] = {
    "audio": "feature_extractor",
    "image": "image_processor",
    "video": "video_processor",
}
_ARGUMENTS: Final[Mapping[Modality, str]] = {
    "audio": "audio_kwargs",
    "image": "images_kwargs",
    "video": "videos_kwargs",
}
_TEXT_OUTPUTS: Final = frozenset(
    {"attention_mask", "input_ids", "mm_token_type_ids", "text_replacement_offsets", "token_type_ids", "video_metadata"}
)

_MAX_FPS: Final = 30
_MAX_SAMPLED: Final = 768
"""The most that vLLM's loader of the fast path's videos takes, whatever a request says."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HfProcessor:
    """The HF processor of one model folder, made to produce what one engine expects."""

    processor: Any
    config: Mapping[str, Any]
    family: Family
    target: Target
    limits: DecodeLimits
    placeholders: Mapping[Modality, str]
    """The token that stands for an item of a modality in the prompt's text."""

    fingerprint: str

    _layouts: LayoutCache[tuple[object, ...]] = field(
        default_factory=lambda: LayoutCache(max_entries=4_096, max_tokens=1 << 20), repr=False, compare=False
    )
    """Of images by their sizes and options, for a family where these decide."""

    @classmethod
    def load(cls, folder: Path, target: Target, limits: DecodeLimits | None = None) -> Self:
        """Load a model folder's processor; nothing is fetched."""
        from transformers import AutoProcessor

        config = read_config(folder)
        try:
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"the folder {folder} has no processor that transformers can load: {error}") from error
        loaded = cls(
            processor=processor,
            config=config,
            family=family_of(config),
            target=target,
            limits=limits or DecodeLimits(),
            placeholders=_placeholders(processor),
            fingerprint=fingerprint(processor, config, target, folder / "tokenizer.json"),
        )
        loaded._quicken()
        return loaded

    def write_into(self, memory: memoryview) -> None:
        """Make features in this memory, as far as that saves a copy; each overwrites the one before."""
        self.family.write_into(self.processor, memory)

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        """Return the feature of one item; `options` are the request's `mm_processor_kwargs`."""
        options, reading = split_options(options)
        self._check(media, options)
        return self._process(media, self._decode(media, reading), options)

    def lay_out(self, media: Media, options: Mapping[str, object] | None = None) -> Layout:
        """Return the layout of the feature that `process` would make; media that `process` refuses are refused.

        Where an image's size decides, the processor is asked once for every size. An image of a known size is not
        decoded, unless only that tells its size.
        """
        self._check(media, split_options(options)[0])
        if media.modality != "image" or not self.family.layout_from_size:
            return self.process(media, options).layout
        size, decoded = image_size(media, self.limits), None
        if size is None:
            decoded = self._decode(media)
            size = decoded.size
        key = (size, json.dumps(options or {}, sort_keys=True))
        if (layout := self._layouts.get(key)) is None:
            layout = self._process(media, self._decode(media) if decoded is None else decoded, options or {}).layout
            self._layouts.put(key, layout)
        return layout

    def lay_out_header(self, media: Media, options: Mapping[str, object] | None = None) -> Layout | None:
        """Return None: HF processors count tokens from sizes, not layouts."""
        del media, options
        return None

    def _check(self, media: Media, options: Mapping[str, object]) -> None:
        if media.modality not in self.modalities:
            raise InvalidRequest(f"this model takes no {media.modality}; it takes {', '.join(self.modalities)}")
        check_options(options, self.family.options, max_value=self.limits.max_image_pixels)

    def _process(self, media: Media, decoded: Any, options: Mapping[str, object]) -> Feature:
        output = self._call(media.modality, decoded, options)
        values = {name: value for name, value in output.items() if name not in _TEXT_OUTPUTS}
        tensors = {
            name: self._as_target(value[0] if name in self.family.batched else value)
            for name, value in self.family.tensors(values).items()
        }
        layout = self._layout(output)
        if not layout.num_embeds:
            raise MediaDegenerate(
                f"the {media.modality} is too small or too short for this model to see anything of it"
            )
        origin = _origin_of(media.modality, decoded, options)
        return Feature(media.modality, {name: from_torch(tensors[name]) for name in sorted(tensors)}, layout, origin)

    def cut(self, media: Media) -> Pieces:
        """Return a clip in pieces that the model's encoder takes, each of which can be processed."""
        heard = self.processor.feature_extractor
        return cut_audio(media.data, self.limits, sampling_rate=heard.sampling_rate, max_s=heard.chunk_length)

    @property
    def hf_processor(self) -> Any:
        """The processor itself."""
        return self.processor

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the processor; None if it has none."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        return tokenizer.tokenizer if isinstance(tokenizer, RunTokenizer) else tokenizer

    @property
    def encoder_decoder(self) -> bool:
        """Return whether items go to an encoder's own prompt instead of taking positions in the decoder's."""
        return self.family.encoder_decoder

    def insertion(self, modality: Modality, index: int) -> str:
        """Return the text for the index-th item (from 1) of a modality in a prompt whose chat template takes none."""
        return self.family.insertion(modality, index, self.placeholders[modality])

    def placeholder_text(self, modality: Modality) -> str:
        """Return what stands in a prompt's text where the chat template has written a modality's placeholder token."""
        return self.family.placeholder_text(modality, self.placeholders[modality])

    @property
    def assembly(self) -> Mapping[Modality, AssemblyKind]:
        """Every family that semel knows replaces one token by an item."""
        return dict.fromkeys(self.placeholders, "splice")

    def assemble(self, token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]]) -> Assembly:
        """Nothing to do here: who has the tokens can splice by himself."""
        raise ServiceError(f"{len(items)} items of a prompt of {len(token_ids):,} tokens are spliced, not assembled")

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Return what the processor takes."""
        return tuple(modality for modality, part in _PARTS.items() if getattr(self.processor, part, None) is not None)

    def _quicken(self) -> None:
        """Let the processor take shortcuts to the same features; the fingerprint is that of the processor as it was."""
        if self.family.separates_text and self.placeholders:
            self.processor.tokenizer = RunTokenizer(self.processor.tokenizer, self.placeholders.values())
        self.family.quicken(self.processor)

    def _decode(self, media: Media, reading: Mapping[str, Any] = MappingProxyType({})) -> Any:
        if media.modality == "image":
            return image_of(media, self.limits)
        if media.modality == "audio":
            return decode_audio(media.data, self.limits, sampling_rate=self.processor.feature_extractor.sampling_rate)
        if (fps := self.family.video_fps) is None:
            raise InvalidRequest("this model's videos are not supported yet; send images")
        if media.data.startswith(FRAME_LIST):
            return decode_frames(media.data, self.limits, reading)
        choose = partial(self._choose, fps=min(reading.get("fps", fps), _MAX_FPS), options=reading)
        return decode_video(media.data, self.limits, choose=choose)

    def _choose(self, header: VideoHeader, *, fps: float, options: Mapping[str, Any]) -> list[int]:
        own: dict[str, int] = {name: options[name] for name in ("max_frames", "min_frames") if name in options}
        own["max_frames"] = min(own.get("max_frames", _MAX_SAMPLED), _MAX_SAMPLED)
        return choose_frames(self.processor.video_processor, header, fps=fps, **own)

    def _call(self, modality: Modality, decoded: Any, options: Mapping[str, object]) -> Mapping[str, Any]:
        arguments: dict[str, Any] = {
            **(self.target.options or {}),
            **options,
            **self.family.arguments(modality),
            _ARGUMENT[modality]: [decoded],
        }
        if isinstance(decoded, Video):
            arguments |= _video_arguments(decoded)
        arguments |= self._text_arguments(modality)
        if self.target.normalisation == "engine":
            arguments |= {"do_normalize": False, "do_rescale": False}
        if modality == "audio":
            arguments["sampling_rate"] = self.processor.feature_extractor.sampling_rate
        try:
            output: Mapping[str, Any] = self.processor(**arguments)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code, given a client's options, may raise anything
            if is_out_of_memory(error):
                raise MemoryError from None
            logger.info("%s refused an item: %r", type(self.processor).__name__, error)
            raise MediaUndecodable(
                f"the model's processor refused the {modality}; check its proportions and `mm_processor_kwargs`"
            ) from None
        return output

    def _text_arguments(self, modality: Modality) -> Mapping[str, object]:
        if (placeholder := self.placeholders.get(modality)) is None:
            return {"return_tensors": "pt"}
        arguments = {"text": [placeholder], "add_special_tokens": False}
        if not self.family.separates_text:
            return {**arguments, "return_tensors": "pt"}
        # No tensors of text, which become lists again, and no types of tokens: 2.0 ms of 20 for an image of 1024×1024.
        return {**arguments, _ARGUMENTS[modality]: {"return_tensors": "pt"}, "return_mm_token_type_ids": False}

    def _as_target(self, value: Any) -> Any:
        import numpy as np
        import torch

        # An array becomes a tensor without a copy; torch takes none that runs backwards (E5).
        dense = np.ascontiguousarray(value) if isinstance(value, np.ndarray) and value.ndim else value
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(dense)
        return tensor.to(getattr(torch, self.target.dtype)) if tensor.is_floating_point() else tensor

    def _layout(self, output: Mapping[str, Any]) -> Layout:
        ids = output.get("input_ids", [[]])[0]
        return self.family.layout(self.config, ids if isinstance(ids, list) else ids.tolist())


def _origin_of(modality: Modality, decoded: Any, options: Mapping[str, object]) -> Origin:
    if not isinstance(decoded, Video):
        return to_origin(modality, decoded, options)
    described = {**_describe_frames(decoded.header, decoded.indices), "do_sample_frames": False}
    return to_origin(modality, decoded.frames, options, described)


def _video_arguments(video: Video) -> Mapping[str, object]:
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(**_describe_frames(video.header, video.indices))
    return {"videos": [video.frames], "video_metadata": [metadata], "do_sample_frames": False}


def _placeholders(processor: Any) -> Mapping[Modality, str]:
    tokens: Mapping[Modality, str | None] = {
        "audio": getattr(processor, "audio_token", None),
        "image": getattr(processor, "image_token", None),
        "video": getattr(processor, "video_token", None),
    }
    return {modality: token for modality, token in tokens.items() if token is not None}


def choose_frames(video_processor: Any, header: VideoHeader, *, fps: float, **bounds: int) -> list[int]:
    """Choose the frames that a model looks at, by the rule of its own HF video processor."""
    from transformers.video_utils import VideoMetadata

    try:
        chosen = video_processor.sample_frames(VideoMetadata(**_describe_frames(header)), fps=fps, **bounds)
    except (ValueError, ArithmeticError):
        raise MediaDegenerate(f"the video has {header.num_frames} frames, too few for this model") from None
    # A step in float32 can end one past the last frame.
    return [min(index, header.num_frames - 1) for index in chosen.tolist()]


def _describe_frames(header: VideoHeader, indices: Sequence[int] | None = None) -> Mapping[str, Any]:
    """Return the fields of transformers' `VideoMetadata`."""
    return {
        "total_num_frames": header.num_frames,
        "fps": header.fps,
        "duration": header.duration_s,
        "frames_indices": None if indices is None else list(indices),
    }


_SWITCHES: Final[Mapping[str, frozenset[object]]] = {
    "add_special_tokens": frozenset({False}),
    "padding": frozenset({False}),
    "truncation": frozenset({False, True}),  # as long as the text is not too long
}
_PROBES: Final = (1, 2, 3, 64)


class RunTokenizer:
    """The tokenizer of an HF processor, with a shortcut for texts that are one placeholder token, over and over.

    That is what most HF processors have tokenised: for an image of 1024×1024 the same token 1,369 times. Counting
    saves 1.1 ms of 20. Any other text, or any other argument, is left to the tokenizer.
    """

    def __init__(self, tokenizer: Any, tokens: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        """The one that it stands for."""
        found = {token: _id_of_run(tokenizer, token) for token in tokens}
        self._ids = {token: token_id for token, token_id in found.items() if token_id is not None}

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the ids of a text that is a run; of any other, what the tokenizer answers."""
        if isinstance(text, list) and len(text) == 1 and not args and _is_plain(kwargs):
            ids = self._ids_of(text[0])
            if 0 < len(ids) <= self.tokenizer.model_max_length:
                return {"input_ids": [ids]}
        return self.tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def _ids_of(self, text: str) -> list[int]:
        for token, token_id in self._ids.items():
            count, rest = divmod(len(text), len(token))
            if not rest and text == token * count:
                return [token_id] * count
        return []


def _id_of_run(tokenizer: Any, token: str) -> int | None:
    """The id that a token has as often as it is repeated; a tokenizer looks for added tokens before anything else."""
    token_id: int = tokenizer.convert_tokens_to_ids(token)
    if token_id not in tokenizer.added_tokens_decoder:
        return None
    texts = [token * count for count in _PROBES]
    found = tokenizer(texts, add_special_tokens=False, padding=False)["input_ids"]
    return token_id if found == [[token_id] * count for count in _PROBES] else None


def _is_plain(arguments: Mapping[str, object]) -> bool:
    return all(isinstance(value, bool) and value in _SWITCHES.get(name, ()) for name, value in arguments.items())
