"""A model's tokenizer as its engine has it, and whether its `tokenizer.json` alone gives the same tokens.

Where it does not, or is missing, frontends have texts tokenised by the processes of the pool, which load the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["EngineTokenizer", "Vocabulary", "to_vocabulary"]

_PROBES: Final = (
    "Hello, world! It's 12,345.67 m² – naïve Ünïcödé, 日本語テキスト, العربية, 🙂🏽👩‍👩‍👧.",
    "  two  spaces\n\nblank\tline\r\n   \n def f(x):\n    return {'a': [1, 2]}\n",
    "don't DON'T I'll 1st e\u0301 \u00a0\u200b x",
    " ",
    "",
)
_MAX_ADDED: Final = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A frontend's own knowledge of a tokenizer that runs in the pool."""

    texts: tuple[str, ...]
    """The text of each token alone, by its id."""

    longest: int
    """The maximum number of characters of one token."""

    added: Mapping[str, int] = field(default_factory=dict)
    """The ids of tokens that are recognised as they are spelled: special tokens, placeholders."""


@dataclass(frozen=True, slots=True)
class EngineTokenizer:
    """The tokenizer that an engine loads: one of transformers'. Used by one thread at a time."""

    raw: Any

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text."""
        return [[*self.raw.encode(text, add_special_tokens=add_special_tokens)] for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens."""
        return str(self.raw.decode([*token_ids], skip_special_tokens=skip_special_tokens))

    def vocabulary(self, placeholders: Iterable[str] = ()) -> Vocabulary:
        """Return all of its tokens; `placeholders` may be ordinary ones of them."""
        known: Mapping[str, int] = self.raw.get_vocab()
        numbers = sorted(set(known.values()))
        texts = dict(zip(numbers, self.raw.batch_decode([[number] for number in numbers]), strict=True))
        every = tuple(texts.get(number, "") for number in range(numbers[-1] + 1))  # some have gaps
        spelled = {text: self.encode([text], add_special_tokens=False)[0] for text in placeholders}
        single = {text: ids[0] for text, ids in spelled.items() if len(ids) == 1}
        return Vocabulary(every, max(map(len, known)), {**self.raw.get_added_vocab(), **single})


def to_vocabulary(raw: Any, folder: Path, placeholders: Iterable[str] = ()) -> Vocabulary | None:
    """Return what a frontend needs if texts are tokenised in the pool; None if the folder's file does as well."""
    if raw is None:
        return None
    tokenizer = EngineTokenizer(raw)
    path = folder / "tokenizer.json"
    if path.is_file() and _agrees(tokenizer, path):
        return None
    reason = "gives other tokens than the engine's tokenizer" if path.is_file() else "is missing"
    logger.info("tokenizer.json %s: texts are tokenised in the preprocessing processes", reason)
    return tokenizer.vocabulary(placeholders)


def _agrees(tokenizer: EngineTokenizer, path: Path) -> bool:
    """Return whether the file gives the tokens of the engine's tokenizer, on some texts that are hard to get right."""
    import tokenizers

    try:
        file = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        logger.info("tokenizer.json cannot be read: %r", error)
        return False
    file.no_truncation()
    file.no_padding()
    added = sorted(tokenizer.raw.get_added_vocab())[:_MAX_ADDED]
    probes = [*_PROBES, "".join(f"a {token} b{token}\n" for token in added)]
    for special in (False, True):
        theirs = tokenizer.encode(probes, add_special_tokens=special)
        ours = [encoding.ids for encoding in file.encode_batch_fast(probes, add_special_tokens=special)]
        if ours != theirs:
            return False
    return True
