"""A tokenizer that runs in another process: for models whose `tokenizer.json` is missing or gives other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from semel.errors import InvalidRequest
from semel.processing.vocabulary import Vocabulary
from semel.render.tokens.tokenizer import Tokenizer

__all__ = ["Decode", "Encode", "RemoteTokenizer"]


class Encode(Protocol):
    """Tokenises texts, and waits for it."""

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text."""


class Decode(Protocol):
    """Makes a text of tokens, and waits for it."""

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text."""


class RemoteTokenizer(Tokenizer):
    """The engine's own tokenizer. Thread-safe; only what its vocabulary tells may be asked on the event loop."""

    __slots__ = ("_call_decode", "_call_encode", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, encode: Encode, decode: Decode) -> None:
        super().__init__(None)
        self._vocabulary = vocabulary
        self._call_encode = encode
        self._call_decode = decode

    @property
    def is_local(self) -> bool:
        """Return whether it answers in this process."""
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`; that of a single token is known here."""
        if len(token_ids) == 1 and not skip_special_tokens and 0 <= token_ids[0] < self.vocab_size:
            return self._vocabulary.texts[token_ids[0]]
        return self._call_decode(token_ids, skip_special_tokens=skip_special_tokens)

    def encode_within(self, text: str, most: int, *, keeps_end: bool = False) -> list[int]:
        """Return the first `most` token ids of a text, or the last."""
        tokens = self.encode(text, add_special_tokens=True)
        return tokens[-most:] if keeps_end else tokens[:most]

    def encode_pair(self, first: str, second: str) -> list[int]:  # noqa: ARG002
        """Refused: the engine's own tokenizer is asked for single texts only."""
        raise InvalidRequest("pairs cannot be scored without a tokenizer.json in the model folder: ask its operator")

    def tokens(self, token_ids: Sequence[int]) -> list[str]:  # noqa: ARG002
        """Refused: the vocabulary here has the texts of tokens only."""
        raise InvalidRequest.of("return_token_strs", "not for this model's tokenizer; /detokenize gives texts")

    def token_id(self, text: str) -> int | None:
        """Return the id of the added token with exactly this text, if there is one."""
        return self._vocabulary.added.get(text)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones."""
        return len(self._vocabulary.texts)

    @property
    def longest(self) -> int:
        """The maximum number of characters of one token."""
        return self._vocabulary.longest

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return self._call_encode(texts, add_special_tokens=add_special_tokens)
