"""Texts that become tokens in a process of the pool, and tokens that become texts: the jobs, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Self, cast

from semel.core import Media, Modality, pack_token_ids, unpack_token_ids
from semel.errors import InvalidRequest, ProtocolError
from semel.processing.pool.job import Job
from semel.processing.pool.pipe import Detokenize, Text, Tokenize, Tokens, encode
from semel.processing.vocabulary import EngineTokenizer

__all__ = ["DetokenizeJob", "TokenizeJob", "text_answer"]

_TEXT: Final = cast("Modality", "text")  # what messages and traces call it; no request has such an item


class TokenizeJob(Job[list[list[int]]]):
    """Texts that become tokens."""

    __slots__ = ()
    work = "tokenizing"
    answered_with = Tokens
    max_growth = 64  # NFKC makes 33 bytes of the 3 of U+FDFA, and each may become a token of 4

    @classmethod
    def of(cls, item: int, texts: Sequence[str], tenant: str, *, add_special_tokens: bool) -> Self:
        """Return the job of these texts."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the text has half of a surrogate pair (\\ud800 to \\udfff): send whole characters"
            ) from None
        data = b"".join(encoded)
        order = encode(Tokenize(item, tuple(map(len, encoded)), add_special_tokens), len(data))
        return cls(item, Media(_TEXT, data), order, tenant)

    def _read(self, answer: Tokens, payload: memoryview) -> list[list[int]]:
        numbers = unpack_token_ids(payload)
        counts, ids = numbers[: answer.texts], numbers[answer.texts :]
        if min(counts, default=0) < 0 or sum(counts) != answer.tokens:
            raise ProtocolError(f"a pool process counted {sum(counts):,} tokens and sent {answer.tokens:,}")
        ends = [*accumulate(counts)]
        return [ids[end - count : end] for count, end in zip(counts, ends, strict=True)]


class DetokenizeJob(Job[str]):
    """Tokens that become a text."""

    __slots__ = ()
    work = "detokenizing"
    answered_with = Text
    max_growth = 1_024  # so that a token may have a text of 4,096 bytes

    @classmethod
    def of(cls, item: int, token_ids: Sequence[int], tenant: str, *, skip_special_tokens: bool) -> Self:
        """Return the job of these tokens."""
        try:
            data = pack_token_ids(token_ids)
        except ValueError:
            raise InvalidRequest("a token id has more than 32 bits") from None
        order = encode(Detokenize(item, skip_special_tokens), len(data))
        return cls(item, Media(_TEXT, data), order, tenant)

    def _read(self, answer: Text, payload: memoryview) -> str:
        del answer
        return bytes(payload).decode(errors="replace")


def text_answer(
    tokenizer: EngineTokenizer, order: Tokenize | Detokenize, payload: bytes
) -> tuple[Tokens | Text, bytes]:
    """Return what a process answers, and the payload behind it."""
    if isinstance(order, Detokenize):
        text = tokenizer.decode(unpack_token_ids(payload), skip_special_tokens=order.skip_special_tokens)
        data = text.encode(errors="replace")
        return Text(order.item, len(data)), data
    if sum(order.sizes) != len(payload):
        raise ProtocolError(f"texts of {sum(order.sizes):,} bytes came with {len(payload):,}")
    ends = [*accumulate(order.sizes)]
    texts = [payload[end - size : end].decode() for size, end in zip(order.sizes, ends, strict=True)]
    found = tokenizer.encode(texts, add_special_tokens=order.add_special_tokens)
    counts = [*map(len, found)]
    return Tokens(order.item, len(counts), sum(counts)), b"".join(map(pack_token_ids, (counts, *found)))
