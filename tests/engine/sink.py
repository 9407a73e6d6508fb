"""What stands for an engine core where a test is about the way into it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from semel.engine.vllm.arguments import parse_engine_flags


class Sink:
    """What stands for an engine core: vLLM's own way in, up to the point where a request would leave the process."""

    def __init__(self, config: Any) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.output_handler = None
        self.engine_core = SimpleNamespace(add_request_async=None)  # makes no steps, and has no processes
        self.requests: list[Any] = []

    @classmethod
    def of(cls, folder: Path, *flags: str) -> Self:
        """One for a model, with the flags of a worker."""
        arguments = parse_engine_flags(str(folder), ["--dtype", "float32", "--enforce-eager", *flags])
        return cls(arguments.create_engine_config())

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def check_admission(self, *_: object) -> None:
        """Take all."""

    async def add_request(self, request_id: str, prompt: Any, params: Any, **_: Any) -> Any:
        request = prompt  # one that has items is checked before
        if isinstance(prompt, dict):
            request = self.input_processor.process_inputs(request_id, prompt, params, ("generate",))
        if request_id.startswith("grammar-"):
            await self.compile(request)
            return SimpleNamespace(request_id=request_id, get_nowait=lambda: _NOTHING, close=lambda: None)
        self.requests.append(request)
        return SimpleNamespace(request_id=request_id)

    async def compile(self, request: Any) -> None:
        """What an engine core does with a grammar takes no time here."""

    def shutdown(self) -> None:
        """There is nothing to end."""


_NOTHING = SimpleNamespace(finished=True, outputs=[], prompt_token_ids=[0])
