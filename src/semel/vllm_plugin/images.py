"""Lazy images, the first level: vLLM's media connector, which decodes an image when its pixels are needed.

vLLM decodes each image of each request, also one that its processor cache has. Here an image that was decoded before is
known by its bytes and settings: its size and mode are those of vLLM's own loader, and its hash is made of the same
bytes. Its pixels, if anybody wants them, come from vLLM's own loader too. Videos and clips, whose hash or length needs
the decoded form, are remembered decoded. Nothing is remembered of a file that vLLM refuses.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, NamedTuple

from blake3 import blake3
from PIL import Image
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    AudioMediaIO,
    ImageMediaIO,
    MediaConnector,
    MediaWithBytes,
    VideoMediaIO,
)

from semel.errors import ConfigError
from semel.vllm_plugin.counters import count
from semel.vllm_plugin.levels import LevelOff
from semel.vllm_plugin.media_memory import DecodedMedia, SharedMap

__all__ = [
    "Connector",
    "KnownImage",
    "LazyImage",
    "LazyImageIO",
    "RememberedAudioIO",
    "RememberedVideoIO",
    "install",
    "leave_unopened",
]

_NETWORKS: Final = "SEMEL_ALLOWED_MEDIA_NETWORKS"
_MEMORY_MB: Final = "SEMEL_MEDIA_MEMORY_MB"
_CONNECTOR: Final = "VLLM_MEDIA_CONNECTOR"
_MAX_KNOWN: Final = 32_768
"""Images whose size and mode are known: under 20 MB."""

_FIELDS: Final = frozenset(vars(Image.Image()))
"""What Pillow keeps in an image: whoever asks for one that is not there yet gets it decoded."""


class KnownImage(NamedTuple):
    """What vLLM's loader made of an image."""

    size: tuple[int, int]
    mode: str
    is_converted: bool
    """True if its mode was changed, which vLLM then hashes with the settings."""


class LazyImage(Image.Image):
    """An image that is decoded when its pixels are first needed, and then becomes what `decode` returned."""

    def __init__(self, decode: Callable[[], Image.Image], known: KnownImage | None = None) -> None:
        # Not Pillow's own: what is missing here is what decodes it.
        self._decode, self._decoding = decode, threading.Lock()
        if known is not None:
            self._size, self._mode = known.size, known.mode

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self._decoding:
            if type(self) is LazyImage:
                decoded = self._decode()
                vars(self).update(vars(decoded))
                self.__class__ = type(decoded)  # type: ignore[assignment]
                del self._decode
        return getattr(self, name)

    def __del__(self) -> None:
        if "_size" in vars(self):
            count("decodes_saved")

    def __eq__(self, other: object) -> bool:
        self.load()
        return self == other  # as what it is now

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.load()
        return self.__reduce_ex__(protocol)

    def getexif(self) -> Image.Exif:
        """Return no EXIF: vLLM's hasher looks for an id that only an image which was never a file can have."""
        return Image.Exif()


class LazyImageIO(ImageMediaIO):  # type: ignore[misc]
    """vLLM's loader of images; those that are known come back undecoded."""

    def load_bytes(self, data: bytes) -> Any:
        """Return an image with its bytes. Raise what vLLM's own loader raises, for an unopened one when it is used."""
        settings = {"image_mode": self.image_mode, "rgba_background_color": self.rgba_background_color}
        decode = partial(self._decode, data)
        if _State.unopened:
            return MediaWithBytes(LazyImage(decode), data, settings)
        key = blake3(data).digest(), repr(settings)
        if (known := _State.known.get(key)) is None:
            made = self._load(data)
            is_converted = made.io_config is not None
            _State.known.put(key, KnownImage(made.media.size, made.media.mode, is_converted))
            return made
        return MediaWithBytes(LazyImage(decode, known), data, settings if known.is_converted else None)

    def _load(self, data: bytes) -> Any:
        made = super().load_bytes(data)
        count("decodes")
        return made

    def _decode(self, data: bytes) -> Image.Image:
        image: Image.Image = self._load(data).media
        return image


class RememberedVideoIO(VideoMediaIO):  # type: ignore[misc]
    """vLLM's loader of videos; the frames of one that was decoded before are copied."""

    def load_bytes(self, data: bytes) -> Any:
        """Return the frames and what is known of them, with the bytes."""
        settings = f"{type(self.video_loader)}", self.num_frames, self.kwargs
        load = super().load_bytes
        return MediaWithBytes(_remembered(data, settings, lambda: load(data).media), data)


class RememberedAudioIO(AudioMediaIO):  # type: ignore[misc]
    """vLLM's loader of audio; the samples of a clip that was decoded before are copied."""

    def load_bytes(self, data: bytes) -> Any:
        """Return the samples and their rate."""
        return _remembered(data, ("audio", self.audio_backend, self.kwargs), partial(super().load_bytes, data))


class Connector(MediaConnector):  # type: ignore[misc]
    """vLLM's media connector with lazy loaders, and semel's fetch policy for the domains that an operator named."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if self.allowed_media_domains:
            from semel.vllm_plugin.media_fetch import connection_for

            self.connection: Any = connection_for(tuple(self.allowed_media_domains), self.connection)

    def load_from_url(self, url: str, media_io: Any, **settings: Any) -> Any:
        """Load media, by a loader of ours in place of vLLM's."""
        return super().load_from_url(url, _lazy(media_io), **settings)

    async def load_from_url_async(self, url: str, media_io: Any, **settings: Any) -> Any:
        """Load media, by a loader of ours in place of vLLM's."""
        return await super().load_from_url_async(url, _lazy(media_io), **settings)


class _State:
    """What the connectors of this process share: vLLM makes one for each request."""

    unopened = False
    known: SharedMap[KnownImage] = SharedMap(_MAX_KNOWN)
    decoded = DecodedMedia(0)


def install() -> str:
    """Put the connector in the place of vLLM's own, unless another one was chosen."""
    megabytes = os.environ.get(_MEMORY_MB, "256")
    if not megabytes.isdecimal():
        raise LevelOff(f"{_MEMORY_MB}={megabytes} is not a number of megabytes")
    chosen = os.environ.get(_CONNECTOR, "semel")
    other = MEDIA_CONNECTOR_REGISTRY.name2class["http"]
    if chosen != "semel" or other not in (MediaConnector, Connector):
        raise LevelOff(f"{_CONNECTOR} is {chosen}" if chosen != "semel" else f"{other.__qualname__} loads the media")
    if os.environ.get(_NETWORKS):
        _check_networks()
    _State.decoded = DecodedMedia(int(megabytes) << 20)
    # In the place of vLLM's default one, and not by the variable: processes that vLLM does not start inherit that.
    for name in ("semel", "http"):
        MEDIA_CONNECTOR_REGISTRY.register(name)(Connector)
    return f"images are decoded when needed, videos and audio once while they fit into {megabytes} MB"


def _check_networks() -> None:
    from semel.vllm_plugin.media_fetch import fetch_options

    try:
        fetch_options()
    except ConfigError as error:
        raise LevelOff(str(error)) from None


def leave_unopened(unopened: bool = True) -> None:
    """Open no image file in this process: for a renderer that has them opened elsewhere, by their bytes."""
    _State.unopened = unopened


def _lazy(media_io: Any) -> Any:
    """Return a loader that the connector has just made as one of ours, with its settings; another's stays as it is."""
    ours = {ImageMediaIO: LazyImageIO, VideoMediaIO: RememberedVideoIO, AudioMediaIO: RememberedAudioIO}
    media_io.__class__ = ours.get(type(media_io), type(media_io))
    return media_io


def _remembered(data: bytes, settings: Hashable, decode: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    def counted() -> tuple[Any, Any]:
        decoded = decode()
        count("decodes")
        return decoded

    try:
        key = blake3(data).digest(), json.dumps(settings)
    except TypeError:  # settings of another's loader, which may be anything
        return counted()
    return _State.decoded.load(key, counted)
