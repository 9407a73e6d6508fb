"""Batches of `LLM.generate` and `LLM.chat`: the items of the next prompts are made while one is added to the engine.

vLLM renders the prompts of a batch one after the other, and adds each to its engine before it renders the next. Here a
few are rendered ahead. What comes last in rendering, the commit to vLLM's item cache, still happens in the order in
which prompts are added: the engine's cache follows that order.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from semel.vllm_plugin.hooks import hook

__all__ = ["PromptsAhead", "look_ahead"]

_HOMES: Final = ("vllm.entrypoints.common.offline", "vllm.entrypoints.offline_utils")  # of 0.32, of 0.31


class _LatePrompt(dict[str, Any]):
    """vLLM's input of a prompt whose items are being made; whoever looks into it waits for them."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__(type="multimodal")
        self._settle = settle

    def __missing__(self, key: str) -> Any:
        self._settle()
        return dict(self)[key]

    def get(self, key: str, default: Any = None) -> Any:
        self._settle()
        return super().get(key, default)


class PromptsAhead:
    """The prompts of a batch that are not committed yet. Used by one thread."""

    def __init__(self, max_prompts: int) -> None:
        self.is_on = False
        self._max_prompts = max_prompts
        self._late: deque[tuple[_LatePrompt, Callable[[], Any], Callable[[], None]]] = deque()

    def render(self, prompts: Iterable[Any]) -> Iterator[Any]:
        """Yield prompts in their order, each with its items committed, and render some more before."""
        rendered: deque[Any] = deque()
        source = iter(prompts)
        try:
            while True:
                while len(rendered) < self._max_prompts and (prompt := self._next(source)) is not None:
                    rendered.append(prompt)
                if not rendered:
                    return
                prompt = rendered.popleft()
                self._settle(prompt)
                yield prompt
        finally:
            for _, _, leave in self._late:
                leave()
            self._late.clear()

    def add(self, finish: Callable[[], Any], leave: Callable[[], None]) -> Any:
        """Return a prompt that `finish` commits when it is its turn; `leave` is called if that never comes."""
        prompt = _LatePrompt(lambda: self._settle(prompt))
        self._late.append((prompt, finish, leave))
        return prompt

    def _next(self, source: Iterator[Any]) -> Any:
        self.is_on = True
        try:
            return next(source, None)
        finally:
            self.is_on = False

    def _settle(self, prompt: Any) -> None:
        """Commit a prompt, and those before it."""
        while any(one is prompt for one, _, _ in self._late):
            late, finish, _ = self._late.popleft()
            late.update(finish())


def look_ahead() -> None:
    """Let `LLM` render ahead, if this process has one."""
    for home in _HOMES:
        mixin = getattr(sys.modules.get(home), "OfflineInferenceMixin", None)
        if mixin is not None:
            hook(mixin, "_render_and_add_requests", _render_and_add_requests)


def _render_and_add_requests(own: Any, llm: Any, prompts: Iterable[Any], *arguments: Any, **settings: Any) -> Any:
    return own(llm, getattr(llm.renderer, "render_ahead", iter)(prompts), *arguments, **settings)
