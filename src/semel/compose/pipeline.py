"""A pipeline from a model folder: for libraries, with a processor in this process, and for frontends, with a pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from semel.core import Assembly, Feature, Key, Layout, Media, Modality, Rendering, Target
from semel.errors import ConfigError
from semel.media import Pieces, count_pages
from semel.processing import Description, Pool
from semel.processing.folder import find_tokenizer
from semel.processing.probes import run_probes
from semel.processing.processor import ProcessorKind, load_processor
from semel.processing.vocabulary import EngineTokenizer, to_vocabulary
from semel.render import ChatRenderer, ChatTemplate, ContentFormat, Pipeline, ProcessItem, Tokenizer
from semel.render.documents import Documents
from semel.render.tokens.remote_tokenizer import Decode, Encode, RemoteTokenizer
from semel.telemetry.request_context import current_tenant

__all__ = ["blocking", "check_trust", "compose_pipeline", "pipeline_of", "tokenizer_calls", "tokenizer_of"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def compose_pipeline(
    folder: Path,
    target: Target,
    key: Key,
    *,
    chat_template: str | Path | None = None,
    processor: ProcessorKind = "auto",
) -> Pipeline:
    """Make a pipeline that preprocesses in a thread of this process, for use as a library."""
    loaded = load_processor(processor, folder, target)
    executor = ThreadPoolExecutor(1, thread_name_prefix="semel-processor")  # HF processors are not thread-safe

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return await asyncio.get_running_loop().run_in_executor(executor, loaded.process, media, options)

    async def cut(media: Media, spend: Callable[[int], None], **_: object) -> Pieces:
        pieces = await asyncio.get_running_loop().run_in_executor(executor, loaded.cut, media)
        spend(sum(map(len, pieces.files)))
        return pieces

    async def apply(token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]], **_: object) -> Assembly:
        return await asyncio.get_running_loop().run_in_executor(executor, loaded.assemble, token_ids, items)

    async def count(document: Media, **_: object) -> int:
        return await asyncio.get_running_loop().run_in_executor(executor, count_pages, document.data)

    tokenizer_folder = find_tokenizer(folder, target.rendering)
    vocabulary = to_vocabulary(loaded.tokenizer, tokenizer_folder, loaded.placeholders.values())
    described = Description.of(loaded, vocabulary, run_probes(loaded))
    engine_tokenizer = EngineTokenizer(loaded.tokenizer)

    def encode(texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return executor.submit(engine_tokenizer.encode, texts, add_special_tokens=add_special_tokens).result()

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return executor.submit(engine_tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens).result()

    tokenizer = tokenizer_of(folder, target.rendering, described, encode, decode)
    pipeline = pipeline_of(folder, target.rendering, process, described, key, chat_template, tokenizer)
    return replace(pipeline, cut=cut, apply=apply, documents=Documents(count))


def blocking(call: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, _T]:
    """Make a coroutine function of this event loop callable from threads: they wait for its result."""
    loop = asyncio.get_running_loop()

    def wait(*args: _P.args, **options: _P.kwargs) -> _T:
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                raise AssertionError("the event loop must not wait for itself")
        return asyncio.run_coroutine_threadsafe(call(*args, **options), loop).result()

    return wait


def tokenizer_calls(pool: Pool) -> tuple[Encode, Decode]:
    """Return the tokenizer of a pool, for threads; a text is the tenant's whose request the thread works for."""
    tokenize, detokenize = blocking(pool.tokenize), blocking(pool.detokenize)

    def encode(texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return tokenize(texts, add_special_tokens=add_special_tokens, tenant=current_tenant())

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return detokenize(token_ids, skip_special_tokens=skip_special_tokens, tenant=current_tenant())

    return encode, decode


def tokenizer_of(
    folder: Path, rendering: Rendering, described: Description, encode: Encode, decode: Decode
) -> Tokenizer:
    """Return the tokenizer of a model: its file, or the engine's own behind these calls where the file does not do."""
    if described.vocabulary is None:
        return Tokenizer.load(find_tokenizer(folder, rendering))
    if described.encoder_decoder:
        raise ConfigError(
            f"{folder} has no tokenizer.json that gives the engine's tokens, and a model that transcribes needs one: "
            "save it with transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return RemoteTokenizer(described.vocabulary, encode, decode)


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
    tokenizer: Tokenizer,
    content_format: ContentFormat | None = None,
) -> Pipeline:
    """Make a pipeline whose processor runs wherever `process` does."""
    renderer = None
    if not described.encoder_decoder:
        template = ChatTemplate.load(folder, override=chat_template, tokenizer=find_tokenizer(folder, rendering))
        renderer = ChatRenderer(
            template if content_format is None else template.with_format(content_format),
            tokenizer,
            described.placeholders,
            described.insertion,
            written=described.written,
            interleaves=rendering.interleave_mm_strings,
            assembly=described.assembly,
        )
    return Pipeline(tokenizer, renderer, process, described.fingerprint, key)
