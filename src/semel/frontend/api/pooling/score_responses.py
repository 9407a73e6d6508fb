"""Responses with scores, in the shapes of vLLM's server and of Cohere's reranking. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from operator import mul
from typing import Final, Literal

from typing_extensions import TypedDict

from semel.frontend.api.pooling.requests import ScorePart
from semel.frontend.api.shared.usage import Usage

__all__ = [
    "RerankDocument",
    "RerankList",
    "RerankResult",
    "RerankUsage",
    "Score",
    "ScoreList",
    "cosines",
    "max_similarities",
    "ranked",
]

_MIN_NORM: Final = 1e-8
_MAX_SIMILARITIES: Final = 1 << 20
"""Of the tokens of one query and one document that are computed at a time: 4 MiB."""


class Score(TypedDict):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RerankDocument(TypedDict):
    """A document as it was sent; one with media is not repeated."""

    text: str | None
    multi_modal: None


class RerankResult(TypedDict):
    """A document and its score."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(TypedDict):
    """What a reranking cost."""

    prompt_tokens: int
    total_tokens: int


class RerankList(TypedDict):
    """Documents in order, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage


def cosines(queries: Sequence[Sequence[float]], documents: Sequence[Sequence[float]]) -> list[float]:
    """Return the cosine of each document's angle with its query: the only one, or that of the same number."""
    norms = [_norm(query) for query in queries]
    found = []
    for number, document in enumerate(documents):
        which = number if len(queries) > 1 else 0
        product = sum(map(mul, queries[which], document))
        found.append(product / max(norms[which] * _norm(document), _MIN_NORM))
    return found


def max_similarities(
    queries: Sequence[tuple[memoryview[float], int]], documents: Sequence[tuple[memoryview[float], int]]
) -> list[float]:
    """Return the late interaction (MaxSim) of each document with its query: the only one, or that of the same number.

    Each is its numbers and how many a token has. The score sums the best inner product of each of the query's tokens.
    """
    import numpy as np

    found = []
    for number, document in enumerate(documents):
        query, of_document = (
            np.asarray(numbers).reshape(-1, width)
            for numbers, width in (queries[number if len(queries) > 1 else 0], document)
        )
        step = max(1, _MAX_SIMILARITIES // len(of_document))
        rows = (query[begin : begin + step] for begin in range(0, len(query), step))
        found.append(sum(float((some @ of_document.T).max(axis=1).sum(dtype=np.float64)) for some in rows))
    return found


def ranked(documents: Sequence[ScorePart], scores: Sequence[float], top_n: int) -> list[RerankResult]:
    """Return the documents in order of their scores; the first `top_n`, if that is not 0."""
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    return [
        {"index": number, "document": _document(documents[number]), "relevance_score": scores[number]}
        for number in order[: top_n or None]
    ]


def _document(document: ScorePart) -> RerankDocument:
    return {"text": document if isinstance(document, str) else None, "multi_modal": None}


def _norm(vector: Sequence[float]) -> float:
    return sqrt(sum(map(mul, vector, vector)))
