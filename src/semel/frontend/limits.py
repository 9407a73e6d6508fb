"""The limits of a frontend for its clients. Values only; other modules enforce them (threats S18, S21)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from semel.core.flag import MIB, flag
from semel.errors import ConfigError

__all__ = ["NO_CORS", "BodyLimits", "BudgetLimits", "ConcurrencyLimits", "CorsSettings", "RefusalLimits"]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of a request body."""

    max_bytes: int = flag(
        256 * MIB,
        "max-body-bytes",
        help="Maximum size of a request body; larger ones are answered with 413.",
        group="Limits",
        unit="bytes",
        min=1,
    )
    max_values: int = flag(
        65_536,
        "max-body-values",
        help="Maximum number of JSON values in a request body, estimated as commas plus opening brackets; more are "
        "answered with 413.",
        group="Limits",
        min=1,
    )
    """Reading JSON cannot be interrupted, and a million values take 0.3 s of everybody's time and 70 times the body's
    bytes."""

    max_text_bytes: int = flag(
        8 * MIB,
        "max-body-text-bytes",
        help="Maximum size of the JSON in a request body, without the base64 of media; more is answered with 413.",
        group="Limits",
        unit="bytes",
        min=1,
    )
    """Reading JSON holds the interpreter's lock for 2 to 4 ms for each megabyte of long strings."""

    max_s: float = flag(
        120.0,
        "max-body-s",
        help="Timeout for receiving a request body, in seconds; over it the answer is 408. A client may also stop "
        "reading its answer for this long.",
        group="Limits",
        unit="seconds",
        min=0.001,
    )


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """The limits of the memory budget."""

    max_request_bytes: int = flag(
        512 * MIB,
        "max-request-media-bytes",
        help="Maximum bytes of one request: its body, its decoded media and its fetched media; over it the answer is "
        "413.",
        group="Limits",
        unit="bytes",
        min=1,
    )
    max_bytes: int = flag(
        2_048 * MIB,
        "max-media-bytes-in-flight",
        help="Maximum bytes of all requests together until their answers begin; over it the answer is 429. While "
        "several tenants ask, each has an equal share.",
        group="Limits",
        unit="bytes",
        min=1,
    )
    max_requests: int = flag(
        2_048,
        "max-waiting-requests",
        help="Maximum number of requests whose answers have not begun; more are answered with 429. While several "
        "tenants ask, each has an equal share.",
        group="Limits",
        min=1,
    )

    def __post_init__(self) -> None:
        if self.max_request_bytes < 1:
            raise ConfigError(f"--max-request-media-bytes is {self.max_request_bytes:,}: it must be at least 1")
        if self.max_bytes < self.max_request_bytes:
            raise ConfigError(
                f"--max-media-bytes-in-flight is {self.max_bytes:,}, less than the {self.max_request_bytes:,} that one "
                "request may bring: raise it, or lower --max-request-media-bytes"
            )
        if self.max_requests < 1:
            raise ConfigError(f"--max-waiting-requests is {self.max_requests:,}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class ConcurrencyLimits:
    """The limits of requests in flight: their number and their duration."""

    max_requests: int = flag(
        4_096,
        help="Maximum number of requests in flight, streams included; more are answered with 429. While several "
        "tenants ask, each has an equal share.",
        group="Limits",
        min=1,
    )
    max_tenant_requests: int = flag(
        0, help="The same for each tenant of the API keys; 0 sets no separate limit.", group="Limits", min=0
    )
    max_request_s: float = flag(
        0.0,
        "request-timeout-s",
        help="Timeout for a whole request, from its headers to the end of its answer, in seconds; over it the answer "
        "is 504, or an error event if it has begun. 0 sets no timeout.",
        group="Limits",
        unit="seconds",
        min=0,
    )

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ConfigError(f"--max-requests is {self.max_requests:,}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class RefusalLimits:
    """The rate limits of refusals to one tenant, and of requests that its clients abort."""

    per_s: float = flag(
        20.0,
        "max-refusals-per-s",
        help="Error answers per second to one tenant; further ones are delayed, by 5 s at most. As many requests per "
        "second may be aborted within 1 s; after more, the tenant's next requests wait as long, while other tenants "
        "send some. 0 delays none.",
        group="Limits",
        min=0,
    )
    """Once there were more than `burst`."""

    burst: int = 20
    """Refusals that are answered at once, after a while without any."""

    max_wait_s: float = 5.0
    """The longest that one waits, in seconds."""


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """Which web pages may call the API from a browser (CORS): vLLM's flags and defaults. Without origins none may."""

    allowed_origins: tuple[str, ...] = flag(
        (),
        help="Origins of web pages that may call the API from a browser, such as https://chat.example.com; * "
        "for all. A JSON list is taken too, as with vLLM.",
        group="CORS",
    )
    allowed_methods: tuple[str, ...] = flag(
        ("*",), help="HTTP methods that such pages may use; * for all.", group="CORS"
    )
    allowed_headers: tuple[str, ...] = flag(
        ("*",), help="Request headers that such pages may send; * for all.", group="CORS"
    )
    allow_credentials: bool = flag(
        False, help="Let browsers send cookies and HTTP credentials of such pages.", group="CORS"
    )

    def __post_init__(self) -> None:
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, tuple(_listed(name, getattr(self, name))))


def _listed(name: str, values: tuple[str, ...]) -> Iterator[str]:
    """The values, with those of JSON lists one by one."""
    for value in values:
        if not value.startswith("["):
            yield value
            continue
        try:
            inner = json.loads(value)
        except ValueError:
            inner = None
        if not isinstance(inner, list) or not all(isinstance(one, str) for one in inner):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: write one value, or a JSON list of strings")
        yield from inner


NO_CORS: Final = CorsSettings()
