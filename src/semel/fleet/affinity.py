"""The opening of a conversation: the prefix that all its turns share, and so what an engine's prefix cache has.

A chat's opening is everything up to its first user message: the words, and the items by their digests. A prompt's is
its beginning. Its key only decides where a request goes (`balance`): two conversations with one key meet at a worker,
and a key that changes between turns costs a prefix; neither changes an answer. Nothing of a request is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from semel.core import Item, Tenant, hash_parts

__all__ = ["ConversationPrefix"]

_KEY_BYTES: Final = 16
_CHAT_CHARS: Final = 1 << 20  # of a chat's words are hashed, on the event loop: 1 ms
_PROMPT_CHARS: Final = 1_024  # long enough to tell prompts apart, short enough to leave out what varies
_PROMPT_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class ConversationPrefix:
    """The beginning of a conversation: a hash of its words, and the number of its items."""

    words: bytes
    items: int = 0

    @classmethod
    def of_chat(cls, messages: Iterable[Mapping[str, Any]]) -> Self:
        """Read messages as they came; those that make no sense are refused elsewhere."""
        words: list[str] = []
        items, room = 0, _CHAT_CHARS
        for message in messages:
            role = message.get("role")
            for text in (role if isinstance(role, str) else "", *_texts(message.get("content"))):
                items += text is None
                words.append((text or "")[:room])
                room -= len(words[-1])
            if role == "user":
                break
        return cls(_hash(word.encode(errors="surrogatepass") for word in words), items)

    @classmethod
    def of_prompt(cls, prompt: str | Sequence[int]) -> Self:
        """Read a text, or tokens."""
        if isinstance(prompt, str):
            return cls(_hash([prompt[:_PROMPT_CHARS].encode(errors="surrogatepass")]))
        return cls(_hash(str(token).encode() for token in prompt[:_PROMPT_TOKENS]))

    def key(self, items: Sequence[Item], tenant: Tenant) -> bytes:
        """Return the key by which its turns find the same worker: of each tenant another, as its prefixes are."""
        digests = [item.digest for item in items[: self.items]]
        return _hash([self.words, *digests, *tenant.parts])


def _texts(content: object) -> Iterator[str | None]:
    """Yield the words of a message, part by part; None for one that is media."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text
        elif isinstance(part, dict):
            yield None


def _hash(parts: Iterable[bytes]) -> bytes:
    return hash_parts(parts).digest(length=_KEY_BYTES)
