"""Warm-up: does the one-time work of a first request before there is one (requirements E3, E4).

It runs both paths with one small item of every modality that requests may have: a chat with it, and the item through
the real processor, in every preprocessing process. It leaves no trace: its cache entries are removed, and its lookups
are not counted. It never fails a start: any error becomes a warning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import pybase64

from semel.cache import Flight, LayoutCache
from semel.core import Media, Modality
from semel.media.decode.warmup_media import SAMPLES
from semel.render.chat.renderer import ChatRequest
from semel.render.media.parsed_request import ParsedRequest
from semel.render.media.source_fetch import Intent
from semel.render.pipeline import Pipeline
from semel.telemetry.stages import untimed

__all__ = ["warm_up"]

_INTENTS: Final[tuple[Intent, ...]] = ("execute", "inspect")

logger = logging.getLogger(__name__)


async def warm_up(
    pipeline: Pipeline, limits: Mapping[Modality, int], *, processes: int = 1, timeout_s: float = 120.0
) -> None:
    """Run both paths of a pipeline that serves no requests yet.

    `limits` has the maximum number of items of each modality; those with 0 are skipped. `processes` is the number of
    processes that share the pipeline's `process`. `timeout_s` applies to each path.
    """
    modalities = [modality for modality in SAMPLES if limits.get(modality, 0) > 0]
    for intent in _INTENTS:
        walked: list[str] = []
        begin = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                walked = [
                    modality or "text"
                    for modality in (None, *modalities)
                    if await _try(_unseen(pipeline), modality, intent, processes)
                ]
        except TimeoutError:
            logger.warning("warming up %s was given up after %g s", intent, timeout_s)
        steps = ", ".join(walked) or "nothing"
        logger.info("warmed up %s (%s) in %.3f s", intent, steps, time.monotonic() - begin)


def _unseen(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline over the same cache, without metrics, and without layouts of its own."""
    return replace(
        pipeline,
        lookups=lambda *_: None,
        timings=untimed,
        flight=Flight(),
        layouts=LayoutCache(max_entries=0),
        inspections=Flight(),
    )


async def _try(pipeline: Pipeline, modality: Modality | None, intent: Intent, processes: int) -> bool:
    """Render one request, with or without an item. Errors are logged."""
    if modality is None and pipeline.chat_renderer is None:
        return False
    try:
        media = None if modality is None else await asyncio.to_thread(SAMPLES[modality], 0)
        if media is not None:
            await _process_everywhere(pipeline, media, intent, processes)
        await _render(pipeline, await _draft(pipeline, media), intent)
    except Exception as error:  # noqa: BLE001 - foreign code; the first request returns the error to its client
        logger.warning("warming up %s with %s failed: %s", intent, modality or "text", str(error) or repr(error))
        return False
    return True


async def _render(pipeline: Pipeline, draft: ParsedRequest, intent: Intent) -> None:
    try:
        await (pipeline.inspector if intent == "inspect" else pipeline).render(draft)
    finally:
        for digest in draft.media:
            pipeline.cache.discard(digest)


async def _process_everywhere(pipeline: Pipeline, media: Media, intent: Intent, processes: int) -> None:
    """Process as many items at once as there are processes: each process gets one, because none of them is busy."""
    process = pipeline.inspector.process if intent == "inspect" else pipeline.process
    results = await asyncio.gather(*(process(media, {}) for _ in range(processes)), return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            raise error


async def _draft(pipeline: Pipeline, media: Media | None) -> ParsedRequest:
    if media is None:
        return await pipeline.read_chat(ChatRequest([{"role": "user", "content": "hello"}]))
    if pipeline.chat_renderer is None:
        return pipeline.read_transcription(media, "")
    url = f"data:{media.mime};base64,{pybase64.b64encode(media.data).decode()}"
    kind = f"{media.modality}_url"
    parts = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "hello"}]
    return await pipeline.read_chat(ChatRequest([{"role": "user", "content": parts}]))
