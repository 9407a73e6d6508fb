"""Settings of the media store. Values only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

from semel.core.flag import GIB, Group, flag

__all__ = ["MediaStoreSettings"]

_PART: Final = 10
_NAMES_SHARE: Final = 64
_NAMES_FOLDER: Final = "names"


@dataclass(frozen=True, slots=True)
class MediaStoreSettings:
    """The store of uploaded files."""

    GROUP: ClassVar[Group] = "Media store"

    location: str | None = flag(
        None,
        "media-store",
        help="Where files of /v1/files are stored: a folder, or the URL of a bucket (s3://, gs://, az://). Without it, "
        "there are no files. Frontends also share there names (`uuid`) of media, and what they fetch from URLs.",
        is_common=True,
    )
    capacity_bytes: int = flag(
        10 * GIB,
        "media-store-gb",
        help="Size of the media store, in GiB, a tenth of it for fetched media and one for stored responses; a file "
        "counts as 64 KiB at least. Over it, files of the tenant that has the most are deleted, least recently used "
        "first.",
        unit="GiB",
        min=0.001,
    )
    ttl_s: int = flag(
        2_592_000,
        "media-store-ttl-s",
        help="Seconds until a file in the media store expires, if its upload sets no shorter time.",
        unit="seconds",
        min=1,
    )
    timeout_s: float = flag(
        10.0,
        "media-store-timeout-s",
        help="Timeout for one operation of the media store, in seconds; over it the answer is 503.",
        unit="seconds",
        min=0.1,
    )

    store_responses: bool = flag(
        False,
        help="Keep responses of /v1/responses in the media store, unless a request says `store: false`, so that "
        "previous_response_id continues them at any frontend. Needs --media-store, takes a tenth of it, and keeps them "
        "for --media-store-ttl-s.",
    )

    def parted(self, *folders: str) -> tuple[Self, ...]:
        """Return the settings of a store for files, and of one with a tenth of the bytes in each of these folders."""
        nbytes = self.capacity_bytes // _PART
        parts = (
            replace(self, location=f"{(self.location or '').rstrip('/')}/{folder}", capacity_bytes=nbytes)
            for folder in folders
        )
        return replace(self, capacity_bytes=self.capacity_bytes - nbytes * len(folders)), *parts

    def for_names(self) -> Self:
        """Return the settings of a store for names, which may have a 64th of the bytes in addition."""
        location = None if self.location is None else f"{self.location.rstrip('/')}/{_NAMES_FOLDER}"
        return replace(self, location=location, capacity_bytes=self.capacity_bytes // _NAMES_SHARE)
