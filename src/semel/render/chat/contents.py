"""Prompts that are scored, without a chat template: the contents of messages, as vLLM writes them into one prompt.

An embedding model has one message, a query or a document. A cross-encoder has both, one after the other or as a pair,
between whose parts its tokenizer puts special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Self

from semel.core import PairForm
from semel.errors import InvalidRequest
from semel.render.chat.messages import Conversation
from semel.render.chat.renderer import ChatRenderer
from semel.render.chat.template_messages import transcribe
from semel.render.tokens.placeholder_escape import are_spelled
from semel.render.tokens.tokenizer import TextRoom, unlimited_room

__all__ = ["ContentsRenderer", "scoring_renderer"]

_NO_SEPARATOR: Final = ""
"""Between the items and the texts of a content, as in vLLM; in a chat each is a line."""


@dataclass(frozen=True, slots=True)
class ContentsRenderer(ChatRenderer):
    """Renders the contents of messages."""

    form: PairForm = "joined"

    @classmethod
    def of(cls, renderer: ChatRenderer, form: PairForm) -> Self:
        """Return the renderer of the same model's contents."""
        return cls(**{one.name: getattr(renderer, one.name) for one in fields(renderer) if one.init}, form=form)

    def tokenize(
        self,
        conversation: Conversation,
        *,
        tools: Sequence[object] | None = None,  # noqa: ARG002
        add_generation_prompt: bool = True,  # noqa: ARG002
        continue_final_message: bool = False,  # noqa: ARG002
        template_kwargs: Mapping[str, object] | None = None,  # noqa: ARG002
        room: TextRoom = unlimited_room,
    ) -> list[int]:
        """The token ids of the prompt before its items are put in. Its text becomes tokens in a `room`."""
        if are_spelled(self.placeholders.values(), [*conversation.strings()]):
            raise InvalidRequest("the text has the placeholder of an item, and no item is there: leave it out")
        messages = transcribe(
            conversation, content_format="string", insertion=self.insertion, item_separator=_NO_SEPARATOR
        )
        texts = [str(message["content"]) for message in messages]
        for modality, written in self.written.items():
            texts = [text.replace(self.placeholders[modality], written) for text in texts]
        with room(sum(map(len, texts))):
            if self.form == "pair" and len(texts) > 1:
                return self.tokenizer.encode_pair(*texts)
            return self.tokenizer.encode("".join(texts), add_special_tokens=True)


def scoring_renderer(renderer: ChatRenderer, form: PairForm, *, has_pair: bool) -> ChatRenderer:
    """Return what renders the prompts of a model's scores.

    Only a template that the operator has named writes pairs: what a model folder has is often for chats.
    """
    if has_pair and renderer.template.is_operators:
        return replace(
            renderer,
            template=renderer.template.with_format("string"),
            adds_special_tokens=True,
            interleaves=False,
            item_separator=_NO_SEPARATOR,
        )
    return ContentsRenderer.of(renderer, form)
