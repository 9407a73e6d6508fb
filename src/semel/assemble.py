"""Puts the parts together into what runs: the only place that knows them all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from semel.core import Feature, Key, Media, Modality, Target
from semel.errors import ConfigError
from semel.processing import HfProcessor
from semel.render import ChatRenderer, ChatTemplate, Pipeline, Tokenizer

__all__ = ["assemble_pipeline"]


def assemble_pipeline(folder: Path, target: Target, key: Key, *, chat_template: str | Path | None = None) -> Pipeline:
    """A pipeline that preprocesses in a thread of this process, for use as a library."""
    processor = HfProcessor.load(folder, target)
    executor = ThreadPoolExecutor(1, thread_name_prefix="semel-processor")  # HF processors are not thread-safe

    async def process(media: Media, options: Mapping[str, object]) -> Feature:
        return await asyncio.get_running_loop().run_in_executor(executor, processor.process, media, options)

    tokenizer = Tokenizer.load(folder)
    return Pipeline(
        tokenizer=tokenizer,
        chat_renderer=_chat_renderer(folder, processor, tokenizer, chat_template),
        process=process,
        fingerprint=processor.fingerprint,
        key=key,
    )


def _chat_renderer(
    folder: Path, processor: HfProcessor, tokenizer: Tokenizer, chat_template: str | Path | None
) -> ChatRenderer | None:
    if processor.family.encoder_decoder:
        return None
    placeholders = processor.placeholders

    def insertion(modality: Modality, index: int, /) -> str:
        if (placeholder := placeholders.get(modality)) is None:
            raise ConfigError(f"this model takes no {modality}")
        return processor.family.insertion(modality, index, placeholder)

    return ChatRenderer(ChatTemplate.load(folder, override=chat_template), tokenizer, placeholders, insertion)
