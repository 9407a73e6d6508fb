"""A walk through a grammar, as the engine follows it: the mask of the allowed tokens, one of them, and again (S27).

What following costs cannot be seen when a grammar is compiled: 28 bytes of a regular expression compile in 2 ms and
take 842 ms for each token after the seventeenth. A walk of the model's own tokens finds out, if it gets to the
expensive part: it never takes white space or a quote where something else is allowed, since JSON would let it stay
between two values, or close every string at once. Used in the forks of `child`; imports neither vLLM nor
xgrammar.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Vocabulary", "walk"]

_BITS: Final = 32
_SEED: Final = 27
_MAX_ENDS: Final = 32
_Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, as masks over them: 32 tokens in a word, the first one in the lowest bit."""

    lively: _Words
    """Those with more than white space, and without a quote."""

    going_on: _Words
    """Those that do not end the text."""

    @classmethod
    def from_tokens(cls, tokens: Sequence[bytes], special: Sequence[int]) -> Self:
        """Read the tokens of a vocabulary, of which some are special."""
        is_special = np.zeros(len(tokens), dtype=bool)
        is_special[[token for token in special if token < len(tokens)]] = True
        is_lively = np.fromiter((bool(token.strip()) and b'"' not in token for token in tokens), bool, len(tokens))
        return cls(_packed(is_lively & ~is_special), _packed(~is_special))


def walk(matcher: Any, mask: Any, vocabulary: Vocabulary, *, tokens: int, stays: bool, max_call_s: float) -> bool:
    """Follow a grammar for so many tokens; whether no call took longer than that, in CPU time.

    At its end the walk begins again, to see other branches. One that `stays` takes the same token for as long as it
    may; any other one takes a random one each time. `mask` is a tensor of xgrammar's with one row.
    """
    rng, words = random.Random(_SEED), mask[0].numpy().view(np.uint32)
    token, ends = -1, 0
    for _ in range(tokens):
        began_s = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        if time.thread_time() - began_s > max_call_s:
            return False
        token = _pick(words, vocabulary, rng, token if stays else -1)
        began_s = time.thread_time()
        if token < 0 or not matcher.accept_token(token) or matcher.is_terminated():
            if (ends := ends + 1) == _MAX_ENDS:
                break
            matcher.reset()
        if time.thread_time() - began_s > max_call_s:
            return False
    return True


def _pick(words: _Words, vocabulary: Vocabulary, rng: random.Random, preferred: int) -> int:
    """Pick an allowed token: the preferred one if it is lively, else any; -1 if there is none."""
    for kind in (vocabulary.lively, vocabulary.going_on):
        size = min(len(words), len(kind))
        allowed = words[:size] & kind[:size]
        if preferred >= 0 and preferred // _BITS < size and int(allowed[preferred // _BITS]) >> preferred % _BITS & 1:
            return preferred
        if len(found := np.flatnonzero(allowed)):
            place = int(found[rng.randrange(len(found))])
            word = int(allowed[place])
            return place * _BITS + rng.choice([bit for bit in range(_BITS) if word >> bit & 1])
    return -1


def _packed(is_in: NDArray[np.bool_]) -> _Words:
    padded = np.zeros(-(-len(is_in) // _BITS) * _BITS, dtype=bool)
    padded[: len(is_in)] = is_in
    return np.packbits(padded, bitorder="little").view(np.uint32)
