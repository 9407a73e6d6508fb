"""Settings and limits of fetches. Values only; `fetch` and the modules below it enforce them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from semel.core.flag import MIB, Group, flag, section

__all__ = ["FetchLimits", "FetchSettings"]


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on the resources of fetches."""

    max_bytes: int = flag(
        64 * MIB,
        "max-media-bytes",
        help="Maximum size of one item that is fetched or uploaded.",
        group="Media",
        unit="bytes",
        min=1,
    )
    total_s: float = flag(
        30.0,
        "media-timeout-s",
        help="Timeout for fetching one item, redirects included, in seconds.",
        group="Media",
        unit="seconds",
        min=0.1,
    )
    """Waiting for a permit and a connection included."""

    connect_s: float = 5.0
    """Seconds for opening one connection, including TLS."""

    idle_s: float = 10.0
    """Seconds until the first part of a response, and between two parts."""

    max_redirects: int = 3
    """Redirects after the first request."""

    connections: int = 128
    """Maximum number of concurrent connections, and of concurrent name lookups."""

    connections_per_host: int = 16
    """Maximum number of these to one host and port."""

    @property
    def fetches_per_tenant(self) -> int:
        """Maximum number of concurrent fetches of one tenant."""
        return max(1, self.connections // 4)

    @property
    def fetches_per_tenant_and_host(self) -> int:
        """Maximum number of these from one host and port."""
        return max(1, self.connections_per_host // 2)


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Allowed sources of media, as an operator writes them; everything else is refused."""

    GROUP: ClassVar[Group] = "Media"

    allowed_domains: tuple[str, ...] = flag(
        (),
        "allowed-media-domains",
        help="Hosts to fetch media from; without any, URLs are refused. `example.com`, `.example.com` for all "
        "its subdomains, `*` for any public host; `:PORT` for another port than the default one.",
        is_common=True,
    )
    allow_http: bool = flag(False, "allow-media-http", help="Also fetch over plain `http`, which is not encrypted.")
    allowed_networks: tuple[str, ...] = flag(
        (),
        "allowed-media-networks",
        help="Private networks, such as `10.1.0.0/16`, in which the hosts of --allowed-media-domains may be.",
    )
    allowed_local_path: Path | None = flag(
        None, "allowed-local-media-path", help="Folder on this machine whose files requests may name as `file:///…`."
    )
    limits: FetchLimits = section(FetchLimits)
    cache_bytes: int = flag(
        256 * MIB,
        "media-cache-gb",
        help="Size of the cache for fetched media, in GiB; responses that forbid caching are not cached. 0 "
        "turns it off.",
        group="Caches",
        unit="GiB",
        min=0,
    )
