"""S7: the words of decoders and processors stay in the log. The control is `str(error)`, which shows an address."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import av
import numpy as np
import pytest
from PIL import Image, ImageFile, UnidentifiedImageError

from semel.core import Media, Target
from semel.errors import MediaUndecodable, RequestError
from semel.media import DecodeLimits, decode_audio, decode_image, decode_video
from semel.processing import HfProcessor
from semel.processing.pool import child
from semel.processing.pool.pipe import Load
from tests.security.corpus import encode_clip, encode_image, encode_video
from tests.security.messages import is_ours

Folder = Callable[[str], Path]
LIMITS = DecodeLimits()
SECRET = "object at 0x7f00deadbeef in /srv/keys"
DECODERS: dict[str, Callable[[bytes], object]] = {
    "image": lambda data: decode_image(data, LIMITS),
    "audio": lambda data: decode_audio(data, LIMITS, sampling_rate=16_000),
    "video": lambda data: decode_video(data, LIMITS, choose=lambda _: [0]),
}
FOREIGN = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, IndexError, KeyError),
    *(NotImplementedError, OSError, OverflowError, RecursionError, ReferenceError, RuntimeError, StopIteration),
    *(SyntaxError, SystemError, TypeError, UnicodeError, ValueError, Warning, ZeroDivisionError),
)


def raiser(error: type[Exception]) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error(SECRET)

    return fail


def test_what_a_client_calls_its_media_is_escaped_and_cut_where_it_is_logged_S7() -> None:
    """The control writes a line of its own into the log."""
    media = Media("image", b"12345", "image/png\nERROR all is lost\x1b[2J" + "a" * 1_000_000)
    assert repr(media).startswith("Media(image, 'image/png\\nERROR all is lost\\x1b[2Jaaa")
    assert repr(media).endswith("aaa', 5 bytes)")
    assert len(repr(media)) < 100
    assert repr(media).isprintable()
    assert len(f"Media({media.modality}, {media.mime})".splitlines()) == 2
    assert repr(Media("audio", b"")) == "Media(audio, unknown type, 0 bytes)"


@pytest.mark.parametrize("error", FOREIGN)
def test_whatever_a_decoder_raises_the_client_gets_our_words_S7(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "semel.media")
    image, clip = encode_image(Image.new("RGB", (8, 8))), encode_clip(np.zeros((1, 1_600)), "wav", "pcm_s16le")
    monkeypatch.setattr(ImageFile.ImageFile, "load", raiser(error))
    monkeypatch.setattr(av, "open", raiser(error))
    for name, data in (("image", image), ("audio", clip), ("video", clip)):
        with pytest.raises(MediaUndecodable) as told:
            DECODERS[name](data)
        assert is_ours(str(told.value))
        assert told.value.__cause__ is None
        assert told.value.__suppress_context__
    assert caplog.text.count(SECRET) == 3


def test_memory_that_is_not_there_is_not_called_damage_S7(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process says which limit it was; here it stays what it is, in all the ways in which it is said."""
    image = encode_image(Image.new("RGB", (8, 8)))
    said = (MemoryError(SECRET), OSError("out of memory error when reading image file"))
    for error in said:
        monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(MemoryError):
            decode_image(image, LIMITS)
    monkeypatch.setattr(av, "open", lambda *_, **__: (_ for _ in ()).throw(av.error.MemoryError(12, SECRET)))
    with pytest.raises(MemoryError):
        DECODERS["audio"](b"")
    torch_s = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 1 bytes")
    told = child._ours(torch_s, Load("", Target("float32"), LIMITS, 1.0, 1 << 20))
    assert isinstance(told, RequestError)
    assert told.status == 413
    assert is_ours(str(told))


@pytest.fixture(scope="module")
def loaded(tiny: Folder) -> HfProcessor:
    return HfProcessor.load(tiny("qwen2-vl"), Target("float32"))


@pytest.mark.parametrize("error", [*FOREIGN, MemoryError])
def test_whatever_an_hf_processor_raises_the_client_gets_our_words_S7(
    error: type[Exception], loaded: HfProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(loaded.processor.image_processor), "__call__", raiser(error))
    load = Load("", Target("float32"), LIMITS, 1.0, 1 << 20)
    with pytest.raises(Exception) as raised:
        loaded.process(Media("image", encode_image(Image.new("RGB", (56, 56)))))
    told = child._ours(raised.value, load)
    assert isinstance(told, RequestError)
    assert is_ours(str(told))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("data", [b"", b"\x00" * 400, b"GIF89a", b"RIFF\x04\x00\x00\x00WAVE", b"\xff\xd8\xff\xe0"])
def test_damage_is_told_in_our_words_S7(name: str, data: bytes) -> None:
    with pytest.raises(RequestError) as told:
        DECODERS[name](data)
    assert is_ours(str(told.value))


def test_the_words_of_the_decoder_itself_show_an_address() -> None:
    """CVE-2026-22778: enough to defeat the randomisation of addresses. The control of all of the above."""
    with pytest.raises(UnidentifiedImageError) as told:
        Image.open(io.BytesIO(b"\x00" * 400))
    assert "0x" in str(told.value)
    assert not is_ours(str(told.value))


def test_a_codec_that_is_not_listed_is_not_run_S6() -> None:
    """CVE-2026-22778 came in through JPEG 2000; a video file can hold it as well. The control: FFmpeg decodes it."""
    film = _jpeg2000()
    with pytest.raises(MediaUndecodable, match="a codec that is not accepted"):
        decode_video(film, LIMITS, choose=lambda _: [0])
    with av.open(io.BytesIO(film)) as file:
        assert next(iter(file.decode(video=0))).width == 64


def _jpeg2000() -> bytes:
    return encode_video(np.zeros((2, 64, 64, 3), np.uint8), "mov", "jpeg2000")
