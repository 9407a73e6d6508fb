"""Which media may be fetched, and what that may take. Values only; `fetch` and the modules below it keep to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from semel.core.flag import MIB, flag, section

__all__ = ["FetchLimits", "FetchSettings"]


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much a fetch may take of anything."""

    max_bytes: int = flag(
        64 * MIB,
        "max-media-bytes",
        help="Maximum size of one fetched item.",
        group="Media",
        unit="bytes",
        min=1,
    )
    """Counted as they come."""

    total_s: float = flag(
        30.0,
        "media-timeout-s",
        help="Timeout for fetching one item, redirects included, in seconds.",
        group="Media",
        unit="seconds",
        min=0.1,
    )
    """For all of a fetch: waiting for its turn and a connection, redirects, headers and body."""

    connect_s: float = 5.0
    """Seconds for one connection to be made, TLS included."""

    idle_s: float = 10.0
    """Seconds between two pieces of a response, and to its first."""

    max_redirects: int = 3
    """Hops after the first."""

    connections: int = 128
    """Connections at a time, and lookups of names."""

    connections_per_host: int = 16
    """Of those, to one host and port."""

    @property
    def fetches_per_tenant(self) -> int:
        """Fetches of one tenant under way at a time."""
        return max(1, self.connections // 4)

    @property
    def fetches_per_tenant_and_host(self) -> int:
        """Of those, from one host and port."""
        return max(1, self.connections_per_host // 2)


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Where media may be fetched from, as an operator writes it; nothing is fetched unless it is allowed here."""

    allowed_domains: tuple[str, ...] = flag(
        (),
        "allowed-media-domains",
        help="Host to fetch media from; without one, URLs are refused. `example.com`, `.example.com` for all its "
        "subdomains, `*` for any public host; `:PORT` for another port than the default one. Repeatable.",
        group="Media",
    )
    allow_http: bool = flag(
        False, "allow-media-http", help="Also fetch over plain `http`, which is not encrypted.", group="Media"
    )
    allowed_networks: tuple[str, ...] = flag(
        (),
        "allowed-media-networks",
        help="Private network, such as `10.1.0.0/16`, in which the hosts of --allowed-media-domains may be. "
        "Repeatable.",
        group="Media",
    )
    allowed_local_path: Path | None = flag(
        None,
        "allowed-local-media-path",
        help="Folder on this machine whose files requests may name as `file:///…`.",
        group="Media",
    )
    limits: FetchLimits = section(FetchLimits)
    cache_bytes: int = flag(
        256 * MIB,
        "media-cache-gb",
        help="Size of the cache for fetched media, in GiB; what their servers forbid to cache is not kept. 0 turns it "
        "off.",
        group="Caches",
        unit="GiB",
        min=0,
    )
