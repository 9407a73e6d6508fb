"""From a conversation to token ids: combines the template, the placeholder escape and the tokenizer.

The rendered text is tokenised as a whole. The template writes the special tokens, and none are added around the text,
as in vLLM. Only a request that spells a placeholder token takes the slower path of `placeholder_escape` (threats S14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.core import AssemblyKind, Item, Modality
from semel.errors import ConfigError, InvalidRequest, TemplateError
from semel.render.chat.messages import Conversation
from semel.render.chat.template import ChatTemplate
from semel.render.chat.template_messages import Insertion, transcribe, without_developer
from semel.render.tokens.placeholder_escape import are_spelled, break_spellings, map_strings, strings_in, unused_letters
from semel.render.tokens.tokenizer import TextRoom, Tokenizer, unlimited_room

__all__ = ["ChatRenderer", "ChatRequest"]


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """Renders the chats of one model."""

    template: ChatTemplate
    tokenizer: Tokenizer
    placeholders: Mapping[Modality, str]
    """The text for an item of a modality: one token, unless `assembly` says `apply`."""
    insertion: Insertion
    written: Mapping[Modality, str] = field(default_factory=dict)
    """The text that replaces a modality's placeholder token in the prompt, where it is more than the token."""
    interleaves: bool = False
    """True if items stay between their texts where the template takes texts only (vLLM: `interleave_mm_strings`)."""

    assembly: Mapping[Modality, AssemblyKind] = field(default_factory=dict)
    """The way in which items of a modality enter a prompt; one that is not listed is spliced."""

    adds_special_tokens: bool = False
    """True if the tokenizer adds special tokens to what the template writes, as for scores."""

    item_separator: str = "\n"
    """The text after each item that comes before the texts of its message; none for scores."""

    _ids: dict[int, Modality] = field(default_factory=dict, init=False, repr=False, compare=False)

    def placeholder_ids(self) -> dict[int, Modality]:
        """The ids of the placeholders that are one token, as `expand` needs them."""
        if not self._ids:
            ids = {modality: self._token_id(modality, text) for modality, text in self.placeholders.items()}
            self._ids.update({token: modality for modality, token in ids.items() if token is not None})
        return self._ids

    def splices(self, items: Iterable[Item]) -> bool:
        """Return whether replacing placeholder tokens by layouts is all that these items need."""
        return all(self.assembly.get(item.modality, "splice") == "splice" for item in items)

    def tokenize(
        self,
        conversation: Conversation,
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        room: TextRoom = unlimited_room,
    ) -> list[int]:
        """The token ids of the prompt before its items are put in. Its text becomes tokens in a `room`."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: a message is continued or a new "
                "one begins; set one of them to false"
            )
        chat = _Chat(conversation, tools, template_kwargs or {})
        texts = [*chat.strings()]
        letters = unused_letters("".join((*texts, self.template.chosen_for(tools).text)))
        mark = next(letters) if continue_final_message else None
        if not are_spelled(self.placeholders.values(), texts):
            text = self._render(chat, add_generation_prompt, mark)
            with room(len(text)):
                return self.tokenizer.encode(text, add_special_tokens=self.adds_special_tokens)
        guard = next(letters)
        literals = self.placeholders.values()
        apart = [literal for literal in literals if self.tokenizer.token_id(literal) is None]
        chat = chat.map_strings(break_spellings(literals, guard, apart=apart))
        text = self._render(chat, add_generation_prompt, mark)
        with room(len(text)):
            return self.tokenizer.encode_apart(text.split(guard))

    def _render(self, chat: _Chat, add_generation_prompt: bool, mark: str | None) -> str:
        """Return the prompt as text. A `mark`, if any, is put after the final message, and the text ends at it."""
        template = self.template.chosen_for(chat.tools)
        messages = transcribe(
            chat.conversation,
            content_format=template.content_format,
            insertion=self.insertion,
            interleaves=self.interleaves,
            item_separator=self.item_separator,
        )
        if not template.knows_developer and any(message["role"] == "developer" for message in messages):
            messages = without_developer(messages)
        if mark is not None:
            messages[-1] = _marked(messages[-1], mark)
        text = self.template.render(
            messages, tools=chat.tools, add_generation_prompt=add_generation_prompt, kwargs=chat.kwargs
        )
        text = text if mark is None else _ended(text, mark)
        for modality, written in self.written.items():
            text = text.replace(self.placeholders[modality], written)
        return text

    def _token_id(self, modality: Modality, text: str) -> int | None:
        token = self.tokenizer.token_id(text)
        if token is None and self.assembly.get(modality, "splice") == "splice":
            raise ConfigError(f"{text!r} is not a token of this model's tokenizer, so it cannot hold an item's place")
        return token


@dataclass(frozen=True, slots=True)
class _Chat:
    """Everything in a request that a template reads."""

    conversation: Conversation
    tools: Sequence[object] | None
    kwargs: Mapping[str, object]

    def strings(self) -> Iterator[str]:
        yield from self.conversation.strings()
        yield from strings_in(self.tools)
        yield from strings_in(self.kwargs)

    def map_strings(self, change: Callable[[str], str]) -> _Chat:
        return _Chat(
            self.conversation.map_strings(change), map_strings(self.tools, change), map_strings(self.kwargs, change)
        )


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with `mark` and a space after its last text. The space shows later whether the template trims."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}{mark} "}
    for index, part in reversed([*enumerate(content)]):
        if "text" in part:
            return {
                **message,
                "content": [*content[:index], {**part, "text": f"{part['text']}{mark} "}, *content[index + 1 :]],
            }
    raise TemplateError.of("continue_final_message", "the final message has no text that could be continued")


def _ended(text: str, mark: str) -> str:
    before, found, behind = text.rpartition(mark)
    if not found:
        raise TemplateError.of(
            "continue_final_message", "this model's chat template does not show the end of the final message"
        )
    return before if behind.startswith(" ") else before.rstrip()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The parts of a chat request that determine the prompt, under OpenAI's and vLLM's names."""

    messages: Sequence[object]
    tools: Sequence[object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, object] = field(default_factory=dict)
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None
    return_media_ids: bool = False
    """True asks for the ids of all items, by which later chats may name them."""
