"""Settings of the embedding store. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from semel.core.flag import MIB, Group, flag
from semel.embeddings.address import StoreAddress
from semel.errors import ConfigError

__all__ = ["EmbeddingStoreSettings"]


@dataclass(frozen=True, slots=True)
class EmbeddingStoreSettings:
    """The store in which workers share encoder outputs."""

    GROUP: ClassVar[Group] = "Embedding store"

    locations: str | None = flag(
        None,
        "embedding-store",
        help="Valkey or Redis in which workers share encoder outputs: valkeys://[USER@]HOST:PORT (TLS), "
        "valkey://127.0.0.1:6379 or unix:///PATH; several nodes are separated by commas. Needs --embedding-tier-gb.",
        is_common=True,
    )
    password_file: Path | None = flag(
        None,
        "embedding-store-password-file",
        help="File with the password of the embedding store, which nobody else can read.",
    )
    ca: Path | None = flag(
        None,
        "embedding-store-ca",
        help="CA certificates that the embedding store's certificate is verified with, a PEM file.",
        default_text="the system's",
    )
    plain: bool = flag(
        False,
        "embedding-store-plain",
        help="Connect to an embedding store on another machine without TLS. Images can be reconstructed from "
        "what is sent.",
    )
    ttl_s: int = flag(
        86_400,
        "embedding-store-ttl-s",
        help="Seconds until an encoder output in the embedding store expires.",
        unit="seconds",
        min=1,
        max=315_360_000,
    )
    publish_after: int = flag(
        2,
        "embedding-publish-min-requests",
        help="Publish an encoder output after its item has appeared in this many requests.",
        min=1,
    )
    fetch_ms: int = flag(
        50,
        "embedding-fetch-ms",
        help="Maximum milliseconds that a request waits for the embedding store; then the engine encodes.",
        min=1,
        max=60_000,
    )
    staging_mb: int = flag(
        256,
        "embedding-staging-mb",
        help="MiB of --embedding-tier-gb for encoder outputs that are fetched from the embedding store.",
        min=1,
    )

    @property
    def staging_bytes(self) -> int:
        """The room for what comes from the store."""
        return self.staging_mb * MIB

    def addresses(self) -> tuple[StoreAddress, ...]:
        """Return the store's nodes; none without a store. Raises `ConfigError` if the settings do not fit together."""
        if self.locations is None:
            return ()
        addresses = tuple(StoreAddress.parse(text.strip()) for text in self.locations.split(","))
        if len({address.name for address in addresses}) < len(addresses):
            raise ConfigError("--embedding-store names a node twice; name each of them once")
        for address in addresses:
            self._check(address)
        return addresses

    def check_tier(self, tier_bytes: int) -> None:
        """Raise `ConfigError` unless the host tier has room for what comes from the store."""
        if self.locations is None:
            return
        if not tier_bytes:
            raise ConfigError(
                "--embedding-store needs host memory for encoder outputs; add --embedding-tier-gb, for example 4"
            )
        if self.staging_bytes >= tier_bytes:
            raise ConfigError(
                f"--embedding-staging-mb {self.staging_mb} leaves nothing of --embedding-tier-gb "
                f"{tier_bytes / 1024**3:g}; lower the former, or raise the latter"
            )

    def _check(self, address: StoreAddress) -> None:
        if not (address.is_encrypted or address.is_local or self.plain):
            raise ConfigError(
                f"--embedding-store {address.name} is on another machine, and images can be made out of what is sent; "
                "use valkeys:// (TLS), or --embedding-store-plain if the network between is private"
            )
        if address.user is not None and self.password_file is None:
            raise ConfigError(
                f"--embedding-store {address.name} names a user without a password; put it into a file, and name "
                "that by --embedding-store-password-file"
            )
