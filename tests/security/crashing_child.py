"""A preprocessing process whose decoder has a memory fault: `python -m tests.security.crashing_child FD [MEMORY]`.

All but the processor is shipped: the pipe, the limits, and whatever becomes of a process that dies. Images are decoded
by the shipped decoder, and one that shows nothing but the colour of the fault makes native code read where nothing is.
There is no model, so it starts without torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from semel.core import Assembly, AssemblyKind, Feature, Layout, Media, Modality, Tensor
from semel.media import DecodeLimits, Pieces, decode_image
from semel.processing.pool import child
from semel.processing.pool.pipe import Load
from semel.processing.processor import Processor

FAULT: Final = (255, 0, 255)
"""The colour of an image that the decoder cannot take."""


class FaultyProcessor:
    """Makes a feature of an image's first pixels, unless it dies of them."""

    fingerprint = "faulty"
    placeholders: Mapping[Modality, str] = {"image": "<image>"}
    modalities: tuple[Modality, ...] = ("image",)
    assembly: Mapping[Modality, AssemblyKind] = {"image": "splice"}
    encoder_decoder = False
    hf_processor = None
    tokenizer = None

    def insertion(self, modality: Modality, index: int) -> str:
        del index
        return self.placeholders[modality]

    def placeholder_text(self, modality: Modality) -> str:
        return self.placeholders[modality]

    def assemble(self, token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]]) -> Assembly:
        raise NotImplementedError

    def write_into(self, memory: memoryview) -> None:
        pass

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        del options
        image = decode_image(media.data, DecodeLimits())
        if image.getpixel((0, 0)) == FAULT:
            ctypes.string_at(0)  # reads address 0, in C: the kernel sends SIGSEGV
        data = image.tobytes()[:64].ljust(64, b"\0")
        return Feature("image", {"pixel_values": Tensor("uint8", (64,), memoryview(data))}, Layout((7,) * 4))

    def lay_out(self, media: Media, options: Mapping[str, object] | None = None) -> Layout:
        return self.process(media, options).layout

    def lay_out_header(self, media: Media, options: Mapping[str, object] | None = None) -> Layout | None:
        del media, options
        return None

    def cut(self, media: Media) -> Pieces:
        raise NotImplementedError


def load(load: Load) -> Processor:
    """In place of what loads a model."""
    child._limit_memory(load.max_memory_bytes)
    return FaultyProcessor()


def import_libraries(*_: Path) -> None:
    """There is no model, so a template has nothing to import."""


def main() -> None:
    """As shipped, but for what loads a model."""
    child._load = load
    child.main()


if __name__ == "__main__":
    main()
