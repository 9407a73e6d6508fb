"""semel ("once" in Latin): the multimodal data plane for LLM serving."""

from semel.client import contract, inject
from semel.core import Digest, Key, Tenant, digest
from semel.errors import SemelError

__all__ = ["Digest", "Key", "SemelError", "Tenant", "contract", "digest", "inject"]
