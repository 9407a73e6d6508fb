"""Requests that score queries against documents, under vLLM's and Cohere's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from semel.core import PoolingTask
from semel.errors import InvalidRequest
from semel.frontend.api.pooling.requests import (
    MAX_INPUTS,
    POOLING_REFUSED,
    PooledRequest,
    PoolingInput,
    ScoreInput,
    ScorePart,
)
from semel.frontend.api.shared.request_base import Count, StrictModel

__all__ = ["SCORING_REFUSED", "RerankRequest", "ScoreRequest", "ScoringRequest"]

SCORING_REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    **POOLING_REFUSED,
    "max_tokens_per_doc": ((0,), "documents are not cut; send less"),
    "max_tokens_per_query": ((0,), "queries are not cut; send less"),
}
"""Fields that are refused by name, as in `REFUSED`."""

_FIELDS: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class _Contents(StrictModel):
    """A query or a document with media."""

    content: Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)]


_Part = str | _Contents
_Parts = _Part | Annotated[list[_Part], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


class ScoringRequest(PooledRequest):
    """Queries and documents."""

    refused: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = SCORING_REFUSED

    instruction: Annotated[str, Field(max_length=1_048_576)] | None = None

    def queries_and_documents(self) -> tuple[list[ScorePart], list[ScorePart]]:
        """The queries, one for all documents or one for each, and the documents."""
        raise NotImplementedError

    def inputs(self, task: PoolingTask) -> Iterable[PoolingInput]:
        """The prompts: the queries and then the documents, or for a cross-encoder the pairs of both. Each is made when
        it is asked for."""
        queries, documents = self.queries_and_documents()
        if task != "classify":
            alone = [("query", one) for one in queries] + [("document", one) for one in documents]
            return (part if isinstance(part, str) else self._input((role, part)) for role, part in alone)
        queries = queries * len(documents) if len(queries) == 1 else queries
        pairs = zip(queries, documents, strict=True)
        return (self._input(("query", query), ("document", document)) for query, document in pairs)

    def _input(self, *contents: tuple[str, ScorePart]) -> ScoreInput:
        chat = self.chat_of([{"role": role, "content": content} for role, content in contents])
        return ScoreInput(chat, has_pair=len(contents) > 1)

    @model_validator(mode="after")
    def _take_instruction(self) -> Self:
        if self.instruction is not None:
            self.chat_template_kwargs.setdefault("instruction", self.instruction)
        return self


class ScoreRequest(ScoringRequest):
    """Queries and documents, under any of vLLM's four pairs of names: one query for all, or one for each."""

    queries: _Parts | None = None
    documents: _Parts | None = None
    items: _Parts | None = None
    data_1: _Parts | None = None
    data_2: _Parts | None = None
    text_1: _Parts | None = None
    text_2: _Parts | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        queries, documents = self.queries_and_documents()
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest(
                f"{len(queries):,} queries and {len(documents):,} documents: send one query, or one for each document"
            )
        return self

    def queries_and_documents(self) -> tuple[list[ScorePart], list[ScorePart]]:
        """The queries, one for all documents or one for each, and the documents."""
        names = {name for pair in _FIELDS for name in pair if getattr(self, name) is not None}
        for pair in _FIELDS:
            if names == {*pair}:
                first, second = (_listed(getattr(self, name)) for name in pair)
                return first, second
        raise InvalidRequest("send queries and documents, or one of the pairs of names that vLLM has for them, alone")


class RerankRequest(ScoringRequest):
    """A query, and the documents to be put in order."""

    query: _Part
    documents: _Parts
    top_n: Count = 0

    def queries_and_documents(self) -> tuple[list[ScorePart], list[ScorePart]]:
        """The query and the documents."""
        return _listed(self.query), _listed(self.documents)


def _listed(parts: _Part | Sequence[_Part]) -> list[ScorePart]:
    several = [parts] if isinstance(parts, str | _Contents) else parts
    return [one if isinstance(one, str) else one.content for one in several]
