"""E5: a clip's samples and its tensors are not copied between the parts of the shipped way, nor on the way to torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Feature, Media, Target, Tensor
from semel.media import decode_audio
from semel.processing import HfProcessor, from_torch, hf, to_torch
from tests.sounds import recorded, spoken

Folder = Callable[[str], Path]


@dataclass
class Watched:
    """A model's own processor, of which is kept what it was given and what it gave."""

    processor: Any
    arrays: bool
    """Whether it answers with arrays, as some do, and not with tensors."""

    given: list[np.ndarray] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **arguments: Any) -> Any:
        self.given += arguments["audio"]
        output = dict(self.processor(**arguments))
        if self.arrays:
            output = {name: value.numpy() if hasattr(value, "numpy") else value for name, value in output.items()}
        self.output = output
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)


def span_of(value: Any) -> tuple[int, int]:
    """Where the bytes of an array, a torch tensor or one of ours lie."""
    if isinstance(value, Tensor):
        value = np.frombuffer(value.data, np.uint8)
    start = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
    return start, start + value.nbytes


def is_inside(inner: Any, outer: Any) -> bool:
    return span_of(outer)[0] <= span_of(inner)[0] < span_of(inner)[1] <= span_of(outer)[1]


def is_contiguous(value: Any) -> bool:
    return bool(value.flags.c_contiguous if isinstance(value, np.ndarray) else value.is_contiguous())


@pytest.fixture(scope="module")
def clip() -> Media:
    return Media("audio", recorded(spoken(np.random.default_rng(5), 1.0), "wav"))


@pytest.fixture(scope="module")
def loaded(tiny: Folder) -> dict[str, HfProcessor]:
    return {family: HfProcessor.load(tiny(family), Target("float32")) for family in ("qwen2-audio", "whisper")}


def check_a_clip_is_not_copied(
    processor: HfProcessor, clip: Media, arrays: bool, monkeypatch: pytest.MonkeyPatch
) -> Feature:
    decoded: list[np.ndarray] = []
    decode = decode_audio

    def decoding(*arguments: Any, **options: Any) -> np.ndarray:
        decoded.append(decode(*arguments, **options))
        return decoded[-1]

    watched = Watched(processor.processor, arrays)
    with monkeypatch.context() as patch:
        patch.setattr(hf, "decode_audio", decoding)
        feature = replace(processor, processor=watched).process(clip)
    assert [id(samples) for samples in watched.given] == [id(samples) for samples in decoded]
    assert all(samples.dtype == np.float32 and samples.flags.c_contiguous for samples in watched.given)
    assert feature.tensors.keys() <= watched.output.keys()
    assert is_contiguous(watched.output["input_features"])
    for name, tensor in feature.tensors.items():
        assert span_of(to_torch(tensor)) == span_of(tensor), f"{name} was copied on its way to torch"
        if not is_contiguous(watched.output[name]):
            continue  # it is made so, which copies
        assert is_inside(tensor, watched.output[name]), f"{name} was copied on its way into the feature"
    return feature


@pytest.mark.parametrize("arrays", [False, True], ids=["tensors", "arrays"])
@pytest.mark.parametrize("family", ["qwen2-audio", "whisper"])
def test_a_clip_becomes_a_feature_and_that_tensors_without_a_copy_E5(
    loaded: dict[str, HfProcessor], clip: Media, family: str, arrays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_a_clip_is_not_copied(loaded[family], clip, arrays, monkeypatch)


@pytest.mark.parametrize(
    "array",
    [np.arange(12.0, dtype=np.float32).reshape(3, 4).T, np.arange(12.0, dtype=np.float32)[::-1], np.ones(6)[::2]],
    ids=["transposed", "backwards", "every other"],
)
def test_an_array_that_is_not_contiguous_is_made_so_E5(loaded: dict[str, HfProcessor], array: np.ndarray) -> None:
    tensor = from_torch(loaded["whisper"]._as_target(array))
    assert tensor.shape == array.shape
    assert np.array_equal(to_torch(tensor).numpy(), array)


def copies_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = HfProcessor._decode
    monkeypatch.setattr(HfProcessor, "_decode", lambda self, media, *options: decode(self, media, *options).copy())


def copies_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(HfProcessor, "_as_target", lambda _, value: torch.tensor(np.asarray(value)))


def copies_into_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "from_torch", lambda tensor: from_torch(tensor.clone()))


def copies_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:

    def copied(tensor: Any) -> Tensor:
        ours = from_torch(tensor)
        return replace(ours, data=memoryview(bytes(ours.data)))

    monkeypatch.setattr(hf, "from_torch", copied)


MUTANTS = {mutant.__name__: mutant for mutant in (copies_samples, copies_arrays, copies_into_features, copies_by_bytes)}


@pytest.mark.parametrize("mutate", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_that_copies_is_found_E5(
    loaded: dict[str, HfProcessor], clip: Media, mutate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_a_clip_is_not_copied(loaded["qwen2-audio"], clip, True, monkeypatch)
