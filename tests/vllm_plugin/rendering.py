"""A family's renderers without an engine, vLLM's own and the one with a pool, and what they make of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes
from vllm.renderers import renderer_from_config
from vllm.renderers.params import ChatParams
from vllm.renderers.registry import RENDERER_REGISTRY

from semel.vllm_plugin.renderer import install
from tests.engine.family_questions import engine_arguments

__all__ = ["Made", "Renderers", "opened", "renderers", "unopened"]

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
LOADED = {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}


@dataclass(frozen=True)
class Made:
    """What a renderer gives its engine."""

    token_ids: Sequence[int]
    hashes: Mapping[str, Sequence[str]]
    places: Mapping[str, Sequence[tuple[int, int, object]]]
    items: Mapping[str, Sequence[Mapping[str, Any] | None]]
    """None of an item that the engine has."""

    @classmethod
    def from_prompt(cls, prompt: Any) -> Made:
        """Read what vLLM's engine would get."""
        source = prompt.get("encoder_prompt", prompt)
        items = {
            name: [None if item is None else {key: part.data for key, part in item.items()} for item in its]
            for name, its in source["mm_kwargs"].items()
        }
        places = {
            name: [(one.offset, one.length, None if one.is_embed is None else one.is_embed.tolist()) for one in its]
            for name, its in source["mm_placeholders"].items()
        }
        return cls(source["prompt_token_ids"], source["mm_hashes"], places, items)

    def differs(self, other: Made) -> str:
        """Return what differs, but for hashes; empty if nothing does."""
        if list(self.token_ids) != list(other.token_ids):
            return "tokens"
        if self.places != other.places:
            return "placeholders"
        if self.items.keys() != other.items.keys():
            return "modalities"
        for name, items in self.items.items():
            for index, (mine, its) in enumerate(zip(items, other.items[name], strict=True)):
                if (mine is None) != (its is None) or (mine and its and not _same(mine, its)):
                    return f"{name} {index}"
        return ""


def _same(mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    return mine.keys() == its.keys() and all(_equal(mine[name], its[name]) for name in mine)


def _equal(mine: Any, its: Any) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
        return bool(mine.dtype == its.dtype and torch.equal(mine, its))
    return type(mine) is type(its) and bool(mine == its)


def unopened(data: bytes, **settings: Any) -> Any:
    """A file as the level `images` passes it on; its pixels here are a lie, which shows if anybody looks at them."""
    return MediaWithBytes(Image.new("RGB", (3, 500)), data, LOADED | settings)


def opened(data: bytes, **settings: Any) -> Any:
    """A file as vLLM's connector passes it on."""
    return ImageMediaIO(**settings).load_bytes(data)


@dataclass(frozen=True)
class Renderers:
    """Both renderers of one configuration."""

    stock: Any
    door: Any

    async def stock_prompt(self, items: Sequence[Any], **extras: Any) -> Made:
        """What vLLM makes of a prompt with images."""
        return await rendered(self.stock, items, **extras)

    async def door_prompt(self, items: Sequence[Any], **extras: Any) -> Made:
        """What the door makes of it."""
        return await rendered(self.door, items, **extras)

    async def chats(self, chat: Any) -> tuple[Made, Made]:
        """What both make of a chat."""
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        made = [(await one.render_chat_async([chat], params))[1][0] for one in (self.stock, self.door)]
        return Made.from_prompt(made[0]), Made.from_prompt(made[1])

    def forget(self) -> None:
        """Empty vLLM's caches."""
        for renderer in (self.stock, self.door):
            for cache in (renderer._mm_processor_cache, renderer._mm_processor_only_cache):
                if cache is not None:
                    cache.clear_cache()


async def rendered(renderer: Any, items: Sequence[Any], *, skip_mm_cache: bool = False, **extras: Any) -> Made:
    """A text prompt of Qwen2-VL with these images."""
    prompt = {"prompt": IMAGE * len(items) + "What?", "multi_modal_data": {"image": list(items)}, **extras}
    (made,) = await renderer.render_cmpl_async([prompt], skip_mm_cache=skip_mm_cache)
    return Made.from_prompt(made)


@contextmanager
def renderers(family: str, folder: Path, **settings: Any) -> Iterator[Renderers]:
    """Both renderers of a family, with settings of vLLM's engine arguments."""
    arguments = engine_arguments(family, folder)
    for name, value in settings.items():
        setattr(arguments, name, value)
    config = arguments.create_engine_config()
    before = dict(RENDERER_REGISTRY.renderers)
    stock = renderer_from_config(config)
    try:
        install()
        with patch("semel.vllm_plugin.pool_renderer.num_processes", return_value=1):  # each takes seconds to load
            door = renderer_from_config(config)
    finally:
        RENDERER_REGISTRY.renderers.update(before)
    try:
        yield Renderers(stock, door)
    finally:
        door.shutdown()
        stock.shutdown()
