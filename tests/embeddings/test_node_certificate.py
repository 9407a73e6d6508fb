"""The certificate of an embedding store, as `--embedding-store` and `--embedding-store-ca` have it checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.embeddings.nodes import open_nodes
from semel.embeddings.settings import EmbeddingStoreSettings
from tests.embeddings.certificates import Authority
from tests.embeddings.redis import PATIENT_S, running_redis


@pytest.mark.parametrize("name", ["localhost", "other.example"])
def test_a_node_whose_certificate_is_for_another_host_is_refused(name: str, tmp_path: Path) -> None:
    """The control is its own name."""
    authority = Authority.create(tmp_path / "tls", name)
    with running_redis(tmp_path, authority=authority) as redis:
        location = f"valkeys://localhost:{redis.address.port}"
        nodes = open_nodes(EmbeddingStoreSettings(location, ca=authority.root))
        assert nodes is not None
        try:
            (error,) = nodes.ping(PATIENT_S).values()
        finally:
            nodes.close()
    assert (error is None) == (name == "localhost")
    assert error is None or "certificate is not valid" in str(error)
