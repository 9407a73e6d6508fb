"""What schemas and grammars may cost (threats S20). Values only; `grammars` keeps to them."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core.flag import KIB, MIB, flag

__all__ = ["GrammarLimits"]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What schemas and grammars may cost."""

    max_schema_bytes: int = flag(
        16 * KIB,
        help="Maximum size of one schema, regular expression or grammar that the engine is to enforce; larger ones are "
        "answered with 400.",
        group="Structured outputs",
        unit="bytes",
        min=1,
    )
    max_request_bytes: int = flag(
        64 * KIB,
        "max-request-schema-bytes",
        help="Maximum size of everything that is compiled for one request, tools included; more is answered with 400.",
        group="Structured outputs",
        unit="bytes",
        min=1,
    )
    compile_s: float = flag(
        2.0,
        "max-schema-compile-s",
        help="Maximum CPU time to compile a schema or grammar, in seconds, and three times as long by the "
        "clock; over it the answer is 400.",
        group="Structured outputs",
        unit="seconds",
        min=0.01,
    )
    wait_s: float = 30.0
    """Seconds that a request waits for its grammar, behind others of its tenant."""

    at_once: int = 2
    """Grammars that are compiled at a time, each of another tenant."""

    remembered_bytes: int = 32 * MIB
    """Bytes of grammars whose outcome is remembered."""

    engine_cache_bytes: int = 256 * MIB
    """Bytes of compiled grammars that the engine keeps for certain: its cache has 512 MiB (VLLM_XGRAMMAR_CACHE_MB)."""
