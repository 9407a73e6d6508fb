"""Processors: the protocol, the two kinds of it, and the choice between them.

`hf` is the model's own HF processor, for the families that semel knows; `vllm` is the one that vLLM registers, for any
model that vLLM knows. Their features may be equal, but nobody has proved it for every model: so each has a fingerprint
of its own, and a worker takes the features of the kind that it was started with. The kinds are named here and imported
when they are loaded: the one that needs vLLM lives with everything else that does.
"""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from semel.core import Assembly, AssemblyKind, Feature, Layout, Media, Modality, Target
from semel.errors import ConfigError
from semel.media import DecodeLimits, Pieces
from semel.processing.families import Family, family_of
from semel.processing.folder import read_config, runs_code

__all__ = ["COUNT_METHOD", "Processor", "ProcessorKind", "choose_processor", "load_processor"]

COUNT_METHOD: Final = "_get_num_multimodal_tokens"
"""The method by which many of HF's processors count an image's tokens by its size."""

ProcessorKind = Literal["auto", "hf", "vllm", "plugin"]
"""`auto` stands for `hf` where semel knows the model's family, and for `vllm` elsewhere.

`plugin` is `vllm` with media as vLLM's own loader decodes them: for semel inside plain vLLM.
"""

_HOMES: Final[Mapping[ProcessorKind, tuple[str, str]]] = {
    "hf": ("semel.processing.hf", "HfProcessor"),
    "vllm": ("semel.engine.vllm.model.processor", "VllmProcessor"),
    "plugin": ("semel.vllm_plugin.item_processor", "ItemProcessor"),
}


class Processor(Protocol):
    """Makes features of media for one model and one engine's target. Used by one thread at a time."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal features for equal media."""

    @property
    def placeholders(self) -> Mapping[Modality, str]:
        """Return what stands for an item of a modality in the prompt's text: one token, where items are spliced."""

    @property
    def assembly(self) -> Mapping[Modality, AssemblyKind]:
        """The way of each modality's items into a prompt; empty for an encoder-decoder, whose prompts have none."""

    @property
    def hf_processor(self) -> Any:
        """The processor of transformers that does the work, or that vLLM's calls."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the engine has for this model: one of transformers'."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Return what the processor takes."""

    @property
    def encoder_decoder(self) -> bool:
        """Return whether items go to an encoder's own prompt instead of taking positions in the decoder's."""

    def insertion(self, modality: Modality, index: int) -> str:
        """Return the text for the index-th item (from 1) of a modality in a prompt whose chat template takes none."""

    def placeholder_text(self, modality: Modality) -> str:
        """Return what stands in a prompt's text where the chat template has written a modality's placeholder token."""

    def assemble(self, token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]]) -> Assembly:
        """Return the prompt of a text with these items, in the order of the request, by the model's own rules."""

    def write_into(self, memory: memoryview) -> None:
        """Make features in this memory, as far as that saves a copy; each overwrites the one before."""

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        """Return the feature of one item; `options` are the request's `mm_processor_kwargs`."""

    def lay_out(self, media: Media, options: Mapping[str, object] | None = None) -> Layout:
        """Return the layout of the feature that `process` would make; media that `process` refuses are refused.

        But of an image whose layout its size tells, only the header is read: damage behind it is not seen.
        """

    def lay_out_header(self, media: Media, options: Mapping[str, object] | None = None) -> Layout | None:
        """Return the layout of `lay_out` if an image's header tells it; nothing is decoded then or otherwise."""

    def cut(self, media: Media) -> Pieces:
        """Return a clip in pieces that the model's encoder takes, each of which can be processed."""


def choose_processor(
    kind: ProcessorKind, config: Mapping[str, Any], *, needs_vllm: Collection[str] = ()
) -> ProcessorKind:
    """The kind that a model of this `config.json` gets: never `auto`. `needs_vllm` are flags that `hf` ignores."""
    if kind == "hf" and needs_vllm:
        raise ConfigError(
            f"--processor hf does not honour {', '.join(needs_vllm)}: leave --processor out, for workers and frontends"
        )
    if kind != "auto":
        return kind
    return "hf" if type(family_of(config)) is not Family and not needs_vllm else "vllm"


def load_processor(kind: ProcessorKind, folder: Path, target: Target, limits: DecodeLimits | None = None) -> Processor:
    """Load a model folder's processor; nothing is fetched."""
    module, name = _HOMES[choose_processor(kind, read_config(folder), needs_vllm=_needs_vllm(folder, target))]
    with _module_cache_lock() if target.rendering.trust_remote_code else nullcontext():
        processor: Processor = getattr(import_module(module), name).load(folder, target, limits)
    return processor


def _needs_vllm(folder: Path, target: Target) -> list[str]:
    """Return the engine's flags that only vLLM's own processor honours."""
    names = [*target.rendering.of_features]
    names += ["tokenizer"] if target.rendering.tokenizer is not None else []
    names += ["trust_remote_code"] if runs_code(folder, target.rendering) else []
    return [f"--{name.replace('_', '-')}" for name in names]


@contextmanager
def _module_cache_lock() -> Iterator[None]:
    """Load a model's code alone: no other process of semel on this machine does meanwhile.

    transformers copies the code to a folder that processes share, and does not lock it: one could import a file that
    another is writing.
    """
    from transformers.utils import HF_MODULES_CACHE

    folder = Path(HF_MODULES_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".semel.lock").open("a") as file:  # closing it unlocks it, however the process ends
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
