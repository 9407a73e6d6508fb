"""A pipeline from a model folder: for libraries, with a processor in this process, and for frontends, with a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from semel.core import Feature, Key, Media, Target
from semel.media import Pieces
from semel.processing import Description
from semel.processing.processor import ProcessorKind, load_processor
from semel.render import ChatRenderer, ChatTemplate, Pipeline, ProcessItem, Tokenizer

__all__ = ["compose_pipeline", "pipeline_of"]


def compose_pipeline(
    folder: Path,
    target: Target,
    key: Key,
    *,
    chat_template: str | Path | None = None,
    processor: ProcessorKind = "auto",
) -> Pipeline:
    """A pipeline that preprocesses in a thread of this process, for use as a library."""
    loaded = load_processor(processor, folder, target)
    executor = ThreadPoolExecutor(1, thread_name_prefix="semel-processor")  # HF processors are not thread-safe

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return await asyncio.get_running_loop().run_in_executor(executor, loaded.process, media, options)

    async def cut(media: Media, spend: Callable[[int], None], **_: object) -> Pieces:
        pieces = await asyncio.get_running_loop().run_in_executor(executor, loaded.cut, media)
        spend(sum(map(len, pieces.files)))
        return pieces

    return replace(pipeline_of(folder, process, Description.of(loaded), key, chat_template), cut=cut)


def pipeline_of(
    folder: Path, process: ProcessItem, described: Description, key: Key, chat_template: str | Path | None
) -> Pipeline:
    """A pipeline whose processor runs wherever `process` does."""
    tokenizer = Tokenizer.load(folder)
    renderer = None
    if not described.encoder_decoder:
        template = ChatTemplate.load(folder, override=chat_template)
        renderer = ChatRenderer(template, tokenizer, described.placeholders, described.insertion, described.written)
    return Pipeline(tokenizer, renderer, process, described.fingerprint, key)
