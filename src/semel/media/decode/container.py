"""Opening audio and video files with FFmpeg, which supports far more than is allowed here.

Only listed containers are opened, and only listed codecs run, even while FFmpeg probes the file (threats S6). Every
FFmpeg error becomes one of semel's errors, and its text stays in the log (S7).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from semel.errors import MediaUndecodable, RequestError

if TYPE_CHECKING:
    import av

__all__ = ["check_codec", "open_container"]

logger = logging.getLogger(__name__)


@contextmanager
def open_container(
    data: bytes, *, name: str, formats: Collection[str], codecs: Collection[str], max_pixels: int
) -> Iterator[av.container.InputContainer]:
    """Open a file for reading within the context; messages call it `name`."""
    import av

    # FFmpeg would also open playlists, which refer to other files: only containers with the media itself are read.
    own = {"format_whitelist": ",".join(formats), "protocol_whitelist": "", "codec_whitelist": ",".join(codecs)}
    probing = {"max_pixels": str(max_pixels), "threads": "1"}
    try:
        with av.open(
            io.BytesIO(data), mode="r", options=probing, container_options=own, metadata_errors="replace"
        ) as container:
            yield container
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file makes FFmpeg and its wrapper raise anything
        logger.info("a %s of %d bytes does not decode: %r", name, len(data), error)
        raise MediaUndecodable(f"the {name} ({len(data):,} bytes) does not decode; send a complete file") from None


def check_codec(stream: av.stream.Stream, codecs: Collection[str], *, name: str, instead: str) -> None:
    """Refuse a stream whose decoder is not listed."""
    context = stream.codec_context
    if context is None or context.name not in codecs:
        raise MediaUndecodable(f"the {name} has a codec that is not accepted; send {instead}")
