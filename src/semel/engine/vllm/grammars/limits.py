"""Limits of what schemas and grammars may cost (threats S20, S27). Values only; `grammars` enforces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from semel.core.flag import KIB, MIB, flag

__all__ = ["BUSY", "EXPENSIVE", "MAX_CALL_S", "TOO_EXPENSIVE", "GrammarLimits"]

EXPENSIVE: Final = "semel-grammar:expensive"
BUSY: Final = "semel-grammar:busy"
"""Stop reasons of requests that the engine core ended for what a grammar costs: its own, or others of its tenant."""

MAX_CALL_S: Final = 0.15
"""CPU time that one call may take which follows a grammar: a mask of the allowed tokens, or a token (threats S27)."""

TOO_EXPENSIVE: Final = (
    "it takes too much CPU time to find the tokens that it allows: write it so that a text has one reading, with fewer "
    "and smaller repetitions inside repetitions; ([A-Za-z]+ ){0,49}[A-Za-z]+ instead of ([A-Za-z]+ ?){1,50}"
)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of what schemas and grammars may cost."""

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
        help="CPU time that a schema or grammar may take to compile, in seconds, and as much again to follow for 512 "
        "tokens on trial; over it the answer is 400.",
        group="Structured outputs",
        unit="seconds",
        min=0.01,
    )
    kinds: Literal["auto", "all", "schemas"] = flag(
        "auto",
        "structured-outputs-kinds",
        help="Kinds of structured outputs that clients may ask for: all; schemas (json, json_object, choice, "
        "structural tags), without regular expressions and grammars, which can take much CPU time of the engine; or "
        "auto, which is all until a worker has requests of a second tenant, and schemas from then on.",
        group="Structured outputs",
    )
    wait_s: float = 30.0
    """Seconds that a request waits for its grammar, behind others of its tenant."""

    at_once: int = 2
    """Grammars that are compiled at a time, each of another tenant."""

    remembered_bytes: int = 32 * MIB
    """Bytes of grammars whose outcome is remembered."""

    engine_cache_bytes: int = 256 * MIB
    """Bytes of compiled grammars that the engine keeps for certain: its cache has 512 MiB (VLLM_XGRAMMAR_CACHE_MB)."""
