"""Texts that become tokens in a process of the pool, and tokens that become texts: the jobs, and what is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Self, cast

from semel.cache import Reservation
from semel.core import Media, Modality, pack_token_ids, unpack_token_ids
from semel.errors import InvalidRequest, ProtocolError
from semel.processing.pool.job import Job
from semel.processing.pool.pipe import Answer, Detokenize, Failed, Text, Tokenize, Tokens, encode, to_error
from semel.processing.vocabulary import EngineTokenizer

__all__ = ["DetokenizeJob", "TokenizeJob", "text_answer"]

_TEXT: Final = cast("Modality", "text")  # what messages and traces call it; no request has such an item


class TokenizeJob(Job[list[list[int]]]):
    """Texts that become tokens."""

    __slots__ = ()
    work = "tokenizing"
    max_growth = 64  # NFKC makes 33 bytes of the 3 of U+FDFA, and each may become a token of 4

    @classmethod
    def of(
        cls,
        item: int,
        texts: Sequence[str],
        made: asyncio.Future[list[list[int]]],
        add_special_tokens: bool,
        tenant: str = "",
    ) -> Self:
        """Return the job of these texts."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the text has half of a surrogate pair (\\ud800 to \\udfff): send whole characters"
            ) from None
        data = b"".join(encoded)
        order = encode(Tokenize(item, tuple(map(len, encoded)), add_special_tokens), len(data))
        return cls(item, made, Media(_TEXT, data), {}, order, made, apart=True, tenant=tenant)

    def read(self, answer: Answer, payload: memoryview, room: Reservation | None) -> list[list[int]]:
        """Return the token ids of each text."""
        del room
        if isinstance(answer, Failed):
            raise to_error(answer)
        if not isinstance(answer, Tokens) or answer.item != self.item:
            raise self._unexpected(answer)
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
    max_growth = 1_024  # so that a token may have a text of 4,096 bytes

    @classmethod
    def of(
        cls, item: int, token_ids: Sequence[int], made: asyncio.Future[str], skip_special_tokens: bool, tenant: str = ""
    ) -> Self:
        """Return the job of these tokens."""
        try:
            data = pack_token_ids(token_ids)
        except ValueError:
            raise InvalidRequest("a token id has more than 32 bits") from None
        order = encode(Detokenize(item, skip_special_tokens), len(data))
        return cls(item, made, Media(_TEXT, data), {}, order, made, apart=True, tenant=tenant)

    def read(self, answer: Answer, payload: memoryview, room: Reservation | None) -> str:
        """The text."""
        del room
        if isinstance(answer, Failed):
            raise to_error(answer)
        if not isinstance(answer, Text) or answer.item != self.item:
            raise self._unexpected(answer)
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
