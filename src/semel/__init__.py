"""semel ("once" in Latin): the multimodal data plane for LLM serving."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.client import contract, inject
    from semel.core import Digest, Key, Tenant, digest
    from semel.errors import SemelError
else:

    def __getattr__(name):  # noqa: ANN001, ANN202
        """Import a public name at its first use: every process of vLLM imports this package, for its entry point."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from semel import client, core, errors

        return next(vars(home)[name] for home in (client, core, errors) if name in vars(home))


__all__ = ["Digest", "Key", "SemelError", "Tenant", "contract", "digest", "inject"]
