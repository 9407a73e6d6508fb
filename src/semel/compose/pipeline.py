"""A pipeline from a model folder: for libraries, with a processor in this process, and for frontends, with a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from semel.core import Feature, Key, Media, Rendering, Target
from semel.errors import ConfigError
from semel.media import Pieces
from semel.processing import Description
from semel.processing.folder import find_tokenizer
from semel.processing.processor import ProcessorKind, load_processor
from semel.render import ChatRenderer, ChatTemplate, Pipeline, ProcessItem, Tokenizer

__all__ = ["check_trust", "compose_pipeline", "pipeline_of"]


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

    pipeline = pipeline_of(folder, target.rendering, process, Description.of(loaded), key, chat_template)
    return replace(pipeline, cut=cut)


def check_trust(rendering: Rendering, *, trust_remote_code: bool) -> None:
    """Refuse to run a model's code unless our own operator allows it: a worker cannot switch that on."""
    if rendering.trust_remote_code and not trust_remote_code:
        raise ConfigError(
            "the worker was started with --trust-remote-code, so this frontend would run code of the model folder too: "
            "start it with --trust-remote-code as well, or the worker without"
        )


def pipeline_of(
    folder: Path,
    rendering: Rendering,
    process: ProcessItem,
    described: Description,
    key: Key,
    chat_template: str | Path | None,
) -> Pipeline:
    """A pipeline whose processor runs wherever `process` does."""
    tokenizer_folder = find_tokenizer(folder, rendering)
    tokenizer = Tokenizer.load(tokenizer_folder)
    renderer = None
    if not described.encoder_decoder:
        renderer = ChatRenderer(
            ChatTemplate.load(folder, override=chat_template, tokenizer=tokenizer_folder),
            tokenizer,
            described.placeholders,
            described.insertion,
            described.written,
            interleaves=rendering.interleave_mm_strings,
        )
    return Pipeline(tokenizer, renderer, process, described.fingerprint, key)
