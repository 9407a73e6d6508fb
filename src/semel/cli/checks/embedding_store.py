"""The check of the embedding store that a worker would use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from semel.cli.checks.finding import Finding, problem_of
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.settings.secrets import embedding_store_nodes

__all__ = ["check_embedding_store"]

_WHAT: Final = "embedding store"
_TIMEOUT_S: Final = 3.0


def check_embedding_store(settings: EmbeddingStoreSettings) -> Iterator[Finding]:
    """Yield a finding for each of its nodes; nothing without a store."""
    if problems := list(problem_of(_WHAT, lambda: embedding_store_nodes(settings))):
        yield from problems
        return
    if (nodes := embedding_store_nodes(settings)) is None:
        return
    with closing(nodes):
        for name, error in nodes.ping(_TIMEOUT_S).items():
            if error is None:
                yield Finding(_WHAT, "ok", f"{name} answers")
                continue
            detail, _, remedy = str(error).partition("; ")
            yield Finding(_WHAT, "problem", f"{name}: {detail}", remedy or "start it, or correct --embedding-store")
