"""The flags that say which media may be fetched, and how much of it; all of it is off unless it is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

__all__ = [
    "MAX_BYTES",
    "TIMEOUT_S",
    "AllowHttp",
    "AllowedDomains",
    "AllowedNetworks",
    "AllowedPath",
    "CacheGb",
    "MaxBytes",
    "TimeoutS",
]

# The defaults of `FetchLimits`, which only a frontend imports; a test holds them equal.
MAX_BYTES: Final = 64 * 1024**2
TIMEOUT_S: Final = 30.0

AllowedDomains = Annotated[
    list[str] | None,
    typer.Option(
        help="A host to fetch media from: `example.com`, `.example.com` for all below it, `*` for any public host; "
        "with `:PORT` for another port than the usual one. Once for each of them."
    ),
]
AllowHttp = Annotated[
    bool, typer.Option("--allow-media-http", help="Fetch over `http` as well, which others can read and change.")
]
AllowedNetworks = Annotated[
    list[str] | None,
    typer.Option(
        help="A network, such as `10.1.0.0/16`, in which the hosts named by --allowed-media-domains may be, although "
        "it is not public. Once for each of them."
    ),
]
AllowedPath = Annotated[
    Path | None, typer.Option(help="A folder of this machine whose files requests may name as `file:///…`.")
]
MaxBytes = Annotated[int, typer.Option(min=1, help="The largest item that is fetched, in bytes.")]
TimeoutS = Annotated[float, typer.Option(min=0.1, help="Seconds for one fetch, redirects included.")]
CacheGb = Annotated[
    float, typer.Option(min=0, help="GiB for fetched media that their servers allow to be kept; 0 keeps none.")
]
