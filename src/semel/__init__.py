"""semel ("once" in Latin): the multimodal data plane for LLM serving."""

from semel.core import Digest, Key, Tenant, digest
from semel.errors import SemelError
from semel.injecting import contract, inject

__all__ = ["Digest", "Key", "SemelError", "Tenant", "contract", "digest", "inject"]
