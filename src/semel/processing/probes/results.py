"""The results of the probes in this process: what its libraries decode, and what a model's processor makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

from blake3 import blake3

from semel.core import PROBE_BYTES, Feature, Media, Probes, hash_parts
from semel.errors import RequestError
from semel.media import DecodeLimits, decode_audio, decode_image, decode_video
from semel.processing.fingerprint import PACKAGES, public_version
from semel.processing.probes.catalogue import FEATURE_PROBES, catalogue_id, stored_media
from semel.processing.processor import Processor

__all__ = ["media_results", "proven_fingerprint", "run_probes"]

_RATE: Final = 16_000
_NO_FEATURE: Final = bytes(PROBE_BYTES)


def run_probes(processor: Processor) -> Probes:
    """Decode every stored probe, once a process, and have the processor make features. Takes about a second.

    With one thread of torch, as the processes of a pool have: sums may depend on how work is divided.
    """
    with _one_thread():
        features = b"".join(_feature_result(processor, name) for name in FEATURE_PROBES)
    versions = {package: version for package in PACKAGES if (version := public_version(package)) is not None}
    return Probes(catalogue_id(), media_results() + features, versions)


def proven_fingerprint(fingerprint: str, probes: Probes) -> str:
    """Return the fingerprint of a processor together with what its libraries make of the probes."""
    kind, colon, own = fingerprint.rpartition(":")
    return f"{kind}{colon}{hash_parts((own.encode(), probes.hash.encode())).hexdigest()}"


@cache
def media_results() -> bytes:
    """Return what the stored probes decode to in this process."""
    limits = DecodeLimits()
    return b"".join(_short(_decoded(media, limits)) for _, media in stored_media())


def _decoded(media: Media, limits: DecodeLimits) -> Iterator[bytes]:
    try:
        if media.modality == "image":
            image = decode_image(media.data, limits)
            yield from (f"{image.mode} {image.size}".encode(), image.tobytes())
        elif media.modality == "audio":
            samples = decode_audio(media.data, limits, sampling_rate=_RATE)
            yield from (str(samples.shape).encode(), samples.tobytes())
        else:
            video = decode_video(media.data, limits, choose=lambda header: range(header.num_frames))
            yield from (f"{video.header} {video.frames.shape}".encode(), video.frames.tobytes())
    except RequestError as error:  # what a library no longer takes is a difference too
        yield type(error).__name__.encode()


def _feature_result(processor: Processor, name: str) -> bytes:
    modality, make = FEATURE_PROBES[name]
    if modality not in processor.modalities:
        return _NO_FEATURE
    try:
        return _short(_feature_parts(processor.process(make())))
    except Exception as error:  # noqa: BLE001 - foreign code; mostly it is too small or too short for this model
        return _short(iter((type(error).__name__.encode(),)))


def _feature_parts(feature: Feature) -> Iterator[bytes]:
    for name, tensor in feature.tensors.items():
        yield from (f"{name} {tensor.dtype} {tensor.shape}".encode(), bytes(tensor.data))
    mask = feature.layout.mask
    yield from (str(feature.layout.token_ids).encode(), b"" if mask is None else mask.bits)


def _short(parts: Iterator[bytes]) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest(length=PROBE_BYTES)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
