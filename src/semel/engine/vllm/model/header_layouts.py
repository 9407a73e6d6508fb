"""Layouts of images from their sizes, without their pixels, wherever that is proven to be what processing makes.

Two things tell a layout: a run that has processed an image of this size with these options, and, for a new size, vLLM's
own prompt updates over a stub of the image. Some models' updates read a few of an item's numbers too, such as a grid or
a count of tiles. Which they read is recorded. They are filled in from what the model's HF processor counts for a size.

Nothing of this is believed: before the first use, images of many sizes are processed in full, and the first difference
leaves the model with full processing. So there is no code for any family here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

from semel.cache import LayoutCache
from semel.core import Layout, Origin
from semel.engine.vllm.model.item import lay_out, make_item, make_stub, parse
from semel.processing.processor import COUNT_METHOD

__all__ = ["HeaderLayouts", "Proof"]

Size = tuple[int, int]
"""A width and a height."""

_SIZES: Final[tuple[Size, ...]] = (
    *((56, 56), (112, 112), (640, 480), (1024, 768), (300, 900), (2000, 300), (4096, 64)),
    *((333, 517), (1021, 683), (97, 1201), (1537, 211), (719, 255), (61, 85)),
)
"""Those of the self-test, and some that no patch and no tile divides."""

_MIN_PROBES: Final = 6
_FLAT: Final[tuple[Size, ...]] = ((640, 480), (333, 517))

logger = logging.getLogger(__name__)

_Count = Callable[[int, int], int]
_Probed = list[tuple[Size, Any, Layout]]


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of processing the probes in full."""

    fault: str | None = None
    """The reason why a layout does not follow from a size and the options; None if it does."""

    header_fault: str | None = None
    """The reason why it cannot be computed from them without a run."""

    fields: Mapping[str, Any] | None = None
    """The elements of an item that the updates read, as a probe has them; None if layouts cannot be computed."""

    count: _Count | None = None
    """Tells the number that they get for a height and a width; None if they stay as they are."""

    def __str__(self) -> str:
        if self.fault is not None:
            return f"no: {self.fault}"
        if self.fields is None:
            return f"known sizes only: {self.header_fault}"
        return "yes" if not self.fields else f"yes, with {', '.join(self.fields)}"


class HeaderLayouts:
    """The layouts of one model's images, by their sizes and options. Used by one thread at a time."""

    def __init__(self, processor: Any, part_of: Callable[[Any], slice]) -> None:
        self._processor = processor
        self._part_of = part_of
        self._proof: Proof | None = None
        self._known: LayoutCache[tuple[Size, str]] = LayoutCache(max_entries=4_096, max_tokens=1 << 20)

    @property
    def proof(self) -> Proof:
        """The proof, which is made when it is first asked for."""
        if self._proof is None:
            self._proof = self._prove()
            if self._proof.fields is None:
                logger.warning("layouts of images are not computed from their sizes: %s", self._proof)
        return self._proof

    def find(self, size: Size, options: Mapping[str, object]) -> Layout | None:
        """Return the layout of images of this size; None if only processing tells."""
        proof = self.proof
        if proof.fault is not None:
            return None
        key = _key(size, options)
        if (layout := self._known.get(key)) is not None:
            return layout
        if proof.fields is None or options:  # nothing is proven of other options
            return None
        try:
            layout = self._lay_out(size, proof.fields, proof.count)
        except Exception as error:  # noqa: BLE001 - foreign code: processing says what is wrong with such a size
            logger.info("nothing tells the layout of an image of %d×%d: %r", *size, error)
            return None
        if not layout.num_embeds:
            return None
        self._known.put(key, layout)
        return layout

    def remember(self, size: Size, options: Mapping[str, object], layout: Layout) -> None:
        """Keep the layout that processing an image has made, if others of its size have it too."""
        if self._proof is not None and self._proof.fault is None:
            self._known.put(_key(size, options), layout)

    def _prove(self) -> Proof:
        probed: _Probed = []
        for size in _SIZES:
            try:
                probed.append((size, *self._process(size)))
            except Exception as error:  # noqa: BLE001 - foreign code: a probe may be too thin for a model
                logger.debug("the processor refuses an image of %d×%d: %r", *size, error)
        if len(probed) < _MIN_PROBES:
            return Proof(fault=f"the model's processor takes {len(probed)} of {len(_SIZES)} probes")
        try:
            for size, _, layout in probed:
                if size in _FLAT and (other := self._process(size, is_flat=True)[1]) != layout:
                    return Proof(fault=f"two images of {_name(size)} have {_difference(other, layout)}")
        except Exception as error:  # noqa: BLE001 - foreign code
            return Proof(fault=f"the model's processor refuses an image of one colour: {error!r}")
        try:
            read = self._read_fields(*probed[0][:2])
            faults = []
            for count in self._counts(probed[0][0], read) if read else (None,):
                if (fault := self._fault(probed, read, count)) is None:
                    return Proof(fields=read, count=count)
                faults.append(fault)
        except Exception as error:  # noqa: BLE001 - foreign code, which may want a whole item or a real image
            return Proof(header_fault=f"vLLM's prompt updates want more than sizes: {error!r}")
        reads = f"vLLM reads {', '.join(read)}, and " if read else ""
        return Proof(header_fault=reads + faults[0])

    def _process(self, size: Size, *, is_flat: bool = False) -> tuple[Any, Layout]:
        import numpy as np
        from PIL import Image

        shape = (size[1], size[0], 3)
        random = np.random.default_rng(size)
        pixels = np.full(shape, 255, np.uint8) if is_flat else random.integers(0, 256, shape, np.uint8)
        items = parse(self._processor, "image", Image.fromarray(pixels))
        item = make_item(self._processor, "image", items, {})
        return item, lay_out(self._processor, "image", items, item, {}, self._part_of)

    def _read_fields(self, size: Size, item: Any) -> Mapping[str, Any]:
        """Return the elements of an item that vLLM's prompt updates look at."""
        read: set[str] = set()
        lay_out(self._processor, "image", self._stub(size), _recording(item, read), {}, self._part_of)
        return {name: item[name] for name in sorted(read)}

    def _counts(self, size: Size, read: Mapping[str, Any]) -> Iterator[_Count | None]:
        """Yield what may tell the number in the fields, of which the image of `size` has these."""
        info = self._processor.info
        processor = info.get_hf_processor()
        if (tell := getattr(processor, COUNT_METHOD, None)) is not None:
            yield lambda height, width: int(tell(image_sizes=[(height, width)])["num_image_patches"][0])
        patches = getattr(getattr(processor, "image_processor", None), "get_number_of_image_patches", None)
        if patches is not None:
            yield lambda height, width: int(patches(height, width, {}))
        numbers = [int(element.data.prod()) for element in read.values() if _counts_patches(element.data)]
        if numbers and (tokens := getattr(info, "get_num_image_tokens", None)) is not None:
            own = {"processor": processor} if "processor" in signature(tokens).parameters else {}
            per_number = tokens(image_width=size[0], image_height=size[1], **own) // numbers[0]
            yield lambda height, width: int(tokens(image_width=width, image_height=height, **own)) // per_number
        yield None

    def _fault(self, probed: _Probed, read: Mapping[str, Any], count: _Count | None) -> str | None:
        """Return the first difference between the layouts of sizes and those that processing makes."""
        for size, _, layout in probed:
            try:
                computed = self._lay_out(size, read, count)
            except Exception as error:  # noqa: BLE001 - foreign code
                return f"the size {_name(size)} tells nothing: {error!r}"
            if computed != layout:
                return f"an image of {_name(size)} would have {_difference(computed, layout)}"
        return None

    def _lay_out(self, size: Size, read: Mapping[str, Any], count: _Count | None) -> Layout:
        from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

        item = MultiModalKwargsItem(read)
        if count is not None:
            number = count(size[1], size[0])
            item = MultiModalKwargsItem(
                {name: MultiModalFieldElem(_filled(its.data, number), its.field) for name, its in read.items()}
            )
        return lay_out(self._processor, "image", self._stub(size), item, {}, self._part_of)

    def _stub(self, size: Size) -> Any:
        return parse(self._processor, "image", make_stub("image", Origin((size[1], size[0]), None, None)))


class _Recorder(dict[str, Any]):
    """The fields of an item, which record what is read."""

    def __init__(self, fields: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(fields)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return default


def _recording(item: Any, read: set[str]) -> Any:
    """Return vLLM's items with only this one, which record the fields that are read."""
    from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems

    whole = MultiModalKwargsItems({"image": [item]})
    recorded = MultiModalKwargsItem()
    recorded.data = _Recorder(item.data, read)
    items = MultiModalKwargsItems({"image": [recorded]})
    items.get_data = lambda **options: _Recorder(whole.get_data(**options), read)
    return items


def _filled(data: Any, number: int) -> Any:
    """Return a field's numbers for an image of so many patches or tiles; of a grid, its product is what counts."""
    import torch

    if not _counts_patches(data):
        return data
    filled = torch.ones_like(data)
    filled.view(-1)[-1] = number
    return filled


def _counts_patches(data: Any) -> bool:
    """Return whether a field's data is a number, or a grid of three."""
    return hasattr(data, "numel") and not data.is_floating_point() and data.numel() in (1, 3)


def _key(size: Size, options: Mapping[str, object]) -> tuple[Size, str]:
    return size, json.dumps(options, sort_keys=True) if options else ""


def _name(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def _difference(one: Layout, other: Layout) -> str:
    if len(one) != len(other):
        return f"{len(one):,} tokens, processing makes {len(other):,}"
    return f"other tokens or another mask than processing makes, of {len(one):,}"
