"""Items of a plain vLLM on their way into the pool, and the processor that makes vLLM's items of them there.

A file is decoded by vLLM's own loader, in the pool process and nowhere else, so that its pixels are vLLM's: EXIF,
transparency, 16 bits and formats alike. What a caller of `AsyncLLM` or `LLM` has decoded already, and clips and videos,
which vLLM's connector decodes, travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from semel.core import Feature, Layout, Media, Modality, Origin
from semel.engine.vllm.model.item import make_item, parse, to_tensors
from semel.engine.vllm.model.processor import VllmProcessor
from semel.errors import MediaUndecodable
from semel.processing.tensors import is_out_of_memory

__all__ = ["ItemProcessor", "to_order"]

_DIMENSIONS: Final[Mapping[Modality, int]] = {"audio": 1, "image": 3, "video": 4}

Order = tuple[Media, Mapping[str, object]]


def to_order(modality: Modality, item: Any, options: Mapping[str, object], *, is_cached: bool = True) -> Order | None:
    """Return an item that vLLM has parsed as the pool takes it, with its `mm_processor_kwargs`; None if it cannot.

    `is_cached`: whether vLLM has a cache for it. Then it parses the image of a file once more, without its bytes, and
    so converts one that is not RGB.
    """
    import numpy as np
    from PIL import Image
    from vllm.multimodal.media import MediaWithBytes

    form: dict[str, object]
    if isinstance(item, MediaWithBytes) and isinstance(item.media, Image.Image):
        # Without `io_config` nothing was converted, so nothing has to be.
        data, form = (
            item.original_bytes,
            {"file": {"image_mode": None, **(item.io_config or {})}, "is_cached": is_cached},
        )
    elif isinstance(item, Image.Image):
        if item.mode != "RGB":
            return None
        data, form = item.tobytes(), {"size": item.size}
    else:
        samples, metadata = item if isinstance(item, tuple) else (item, None)
        samples = samples.media if isinstance(samples, MediaWithBytes) else samples
        if not isinstance(samples, np.ndarray) or samples.ndim != _DIMENSIONS[modality]:
            return None
        data, form = samples.tobytes(), {"dtype": samples.dtype.str, "shape": samples.shape, "metadata": metadata}
    order = {"form": form, "options": options}
    try:
        msgspec.msgpack.encode(order)
    except (TypeError, ValueError, OverflowError, RecursionError):  # objects of a caller in this process
        return None
    return Media(modality, data), order


def _load(media: Media, form: Mapping[str, Any]) -> Any:
    """Return the item as it was before `to_order`; a file as vLLM's loader returns it."""
    import numpy as np
    from PIL import Image
    from vllm.multimodal.media import ImageMediaIO

    if "file" in form:
        loaded = ImageMediaIO(**form["file"]).load_bytes(media.data)
        return loaded.media if form["is_cached"] and loaded.media.mode != "RGB" else loaded
    if "size" in form:
        return Image.frombytes("RGB", tuple(form["size"]), media.data)
    samples = np.frombuffer(media.data, form["dtype"]).reshape(form["shape"])
    return samples if form["metadata"] is None else (samples, form["metadata"])


class ItemProcessor(VllmProcessor):
    """vLLM's registered processor of a model, with every medium as vLLM itself would have it."""

    __slots__ = ()

    def process(self, media: Media, options: Mapping[str, Any] | None = None) -> Feature:
        """Return vLLM's item of a medium, in the order that `to_order` has written. Errors have vLLM's words."""
        if not options:
            return super().process(media)  # a sample to warm up with
        modality = media.modality
        try:
            decoded = _load(media, options["form"])
            items = parse(self.processor, modality, decoded)
            item = make_item(self.processor, modality, items, options["options"])
        except Exception as error:
            if isinstance(error, MemoryError) or is_out_of_memory(error.__cause__ or error):
                raise MemoryError from None
            raise MediaUndecodable(str(error)) from error
        return Feature(modality, to_tensors(item), Layout(()), _origin(modality, items[modality], decoded))

    def lay_out_header(self, media: Media, options: Mapping[str, object] | None = None) -> Layout | None:
        """Return None: vLLM lays its items out itself."""
        del media, options
        return None


def _origin(modality: Modality, items: Any, decoded: Any) -> Origin:
    """Return the sizes that vLLM sees of a medium."""
    if modality == "image":
        width, height = items.get_image_size(0)
        return Origin((height, width), None, None)
    samples, metadata = decoded if isinstance(decoded, tuple) else (decoded, None)
    return Origin(tuple(samples.shape[:3]), metadata, None)
