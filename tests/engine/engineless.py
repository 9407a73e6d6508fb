"""A family without an engine: vLLM's renderer, the model that a worker checks features with, and semel's pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from semel.compose import compose_pipeline
from semel.core import Contract, Feature, Key
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.inputs import build_item
from semel.processing.processor import load_processor
from semel.render import ChatRequest, Pipeline, Rendered
from tests.engine.family_questions import engine_arguments
from tests.engine.parity import Chat
from tests.engine.rendering import Rendering, rendering_of

__all__ = ["Engineless", "model_of"]


def model_of(family: str, folder: Path) -> tuple[VllmModel, Any]:
    """What a worker knows of a family, and vLLM's renderer; its cache is off, so it always has the tensors."""
    from vllm.renderers import renderer_from_config

    arguments = engine_arguments(family, folder)
    arguments.mm_processor_cache_gb = 0
    config = arguments.create_engine_config()
    renderer = renderer_from_config(config)
    return VllmModel.from_llm(SimpleNamespace(model_config=config.model_config, renderer=renderer)), renderer


@dataclass(frozen=True)
class Engineless:
    """Both ways to the input of an engine, and the checks before it."""

    model: VllmModel
    renderer: Any
    pipeline: Pipeline
    contract: Contract

    @classmethod
    def of(cls, family: str, folder: Path) -> Self:
        """Load everything but the weights."""
        model, renderer = model_of(family, folder)
        loaded = load_processor("auto", folder, model.target)
        contract = Contract(
            model=family,
            fingerprint=loaded.fingerprint,
            target=model.target,
            fields={modality: model.fields(modality) for modality in model.max_items},
            max_items=model.max_items,
            max_embeds=1 << 20,
            max_tokens=1 << 20,
            cache_bytes=0,
            needs_seal=model.needs_seal,
        )
        return cls(model, renderer, compose_pipeline(folder, model.target, Key(bytes(32))), contract)

    def bare(self, chat: Chat, **options: Any) -> Rendering:
        """What vLLM gives its engine; `options` are the request's for its media."""
        from vllm.renderers.params import ChatParams

        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True}, **options)
        extras = {"mm_processor_kwargs": options.get("mm_processor_kwargs")}
        _, (prompt,) = self.renderer.render_chat([chat], params, prompt_extras=extras)
        return rendering_of(prompt)

    async def ours(self, chat: Chat, **options: Any) -> tuple[Rendered, Rendering]:
        """What semel gives the engine, past every check."""
        rendered = await self.pipeline.chat(ChatRequest(chat, **options))
        items: dict[str, list[Any]] = {}
        places: dict[str, list[Any]] = {}
        for item, place in zip(rendered.prompt.items, rendered.prompt.timeline, strict=True):
            mask = None if place.mask is None else tuple(map(bool, place.mask.bits))
            places.setdefault(item.modality, []).append((place.offset, place.length, mask))
            built = self.build(rendered.features[item.digest])
            items.setdefault(item.modality, []).append({name: element.data for name, element in built.items()})
        return rendered, Rendering(list(rendered.prompt.token_ids), places, items)

    def build(self, feature: Feature) -> Any:
        """The engine's item of a feature; raises what a worker refuses it with."""
        return build_item(feature, self.contract, self.model)
