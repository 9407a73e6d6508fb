"""The probes: they cover what is accepted, decode everywhere, and tell one bit (issue 20.3)."""

from __future__ import annotations

import io
from collections import Counter

import av
import pytest
from PIL import Image

from semel.core import PROBE_BYTES, Media, Probes
from semel.media import DecodeLimits, decode_image, size_from_header
from semel.media.decode import audio as audio_module
from semel.media.decode import image as image_module
from semel.media.decode import video as video_module
from semel.processing.probes import catalogue_id, probe_names, proven_fingerprint
from semel.processing.probes.catalogue import FEATURE_PROBES, stored_media
from semel.processing.probes.results import _decoded, media_results

CMYK = "jpeg CMYK baseline quality 75 4:2:0"
NOT_WRITTEN = {
    *("libopus", "libvorbis", "mp2float", "mp3", "pcm_s64be", "pcm_u16be", "pcm_u16le", "pcm_u24be", "pcm_u24le"),
    *("pcm_u32be", "pcm_u32le", "av1", "libvpx", "libvpx-vp9", "theora"),
}
"""Codecs that no encoder here writes, or that are another decoder of what one writes."""


def results() -> dict[str, bytes]:
    found = media_results()
    names = probe_names()[: len(probe_names()) - len(FEATURE_PROBES)]
    return {name: found[PROBE_BYTES * index :][:PROBE_BYTES] for index, name in enumerate(names)}


def test_every_accepted_image_format_mode_and_orientation_has_probes() -> None:
    formats, orientations = Counter[str](), set()
    for _, media in stored_media():
        if media.modality == "image":
            image = Image.open(io.BytesIO(media.data))
            formats[image.format or ""] += 1
            orientations.add((image.format, image.getexif().get(274)))
    assert formats.keys() == set(image_module.FORMATS)
    assert min(formats.values()) >= 15
    for kind in ("JPEG", "PNG", "TIFF", "WEBP"):
        assert {turn for found, turn in orientations if found == kind} >= set(range(1, 9))


def test_every_accepted_codec_and_container_has_probes() -> None:
    codecs: dict[str, set[str]] = {"audio": set(), "video": set()}
    containers: dict[str, set[str]] = {"audio": set(), "video": set()}
    for _, media in stored_media():
        if media.modality != "image":
            with av.open(io.BytesIO(media.data)) as file:
                (stream,) = file.streams
                codecs[media.modality].add(stream.codec_context.name)
                containers[media.modality].update(file.format.name.split(","))
    accepted = {*audio_module._CODECS, *video_module._CODECS}
    assert accepted - codecs["audio"] - codecs["video"] == NOT_WRITTEN
    assert set(audio_module._FORMATS) <= containers["audio"]
    assert set(video_module._FORMATS) - containers["video"] == {"ogg"}


def test_no_probe_is_refused() -> None:
    """Control: an error has a result too, which a mutilated file shows."""
    assert not [name for name, media in stored_media() if _is_refused(media)]
    assert _is_refused(Media("image", b"\xff\xd8 and nothing else"))


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_header_tells_the_size_of_the_decoded_image_or_nothing() -> None:
    """Control: the size in a file is not always that of what is decoded, since an orientation may turn it."""
    told, turned = Counter[str](), 0
    for name, media in stored_media():
        if media.modality == "image" and (size := size_from_header(media.data, DecodeLimits())) is not None:
            assert size == decode_image(media.data, DecodeLimits()).size, name
            file = Image.open(io.BytesIO(media.data))
            told[file.format or ""] += 1
            turned += size != file.size
            assert size_from_header(media.data[:-1], DecodeLimits()) is None, name
            assert size_from_header(media.data, DecodeLimits(max_image_pixels=size[0] * size[1] - 1)) is None, name
    assert told.keys() == {"JPEG", "PNG", "WEBP"}
    assert min(told.values()) > 15
    assert turned >= 8


def _is_refused(media: Media) -> bool:
    return next(_decoded(media, DecodeLimits())).startswith(b"Media")


def test_one_bit_of_one_cmyk_jpeg_changes_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the planted bit, the results are equal."""
    before = results()
    media_results.cache_clear()
    assert results() == before
    wanted = next(media.data for name, media in stored_media() if name == CMYK)

    def planted(data: bytes, limits: DecodeLimits) -> Image.Image:
        image = decode_image(data, limits)
        if data == wanted:
            red, *others = image.getpixel((3, 2))  # type: ignore[misc]
            image.putpixel((3, 2), (red ^ 1, *others))
        return image

    monkeypatch.setattr("semel.processing.probes.results.decode_image", planted)
    media_results.cache_clear()
    try:
        after = results()
    finally:
        media_results.cache_clear()
    assert [name for name in before if before[name] != after[name]] == [CMYK]


def test_a_fingerprint_covers_the_results_and_keeps_the_name_of_the_engine() -> None:
    ours, other = Probes(catalogue_id(), b"same"), Probes(catalogue_id(), b"else")
    assert proven_fingerprint("vllm:ab", ours).startswith("vllm:")
    assert proven_fingerprint("ab", ours) == proven_fingerprint("ab", Probes(catalogue_id(), b"same", {"av": "1"}))
    assert len({proven_fingerprint(name, probes) for name in ("ab", "cd") for probes in (ours, other)}) == 4
