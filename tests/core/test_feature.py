"""Features: values that cannot be malformed."""

from __future__ import annotations

import pytest

from semel.core import Contract, Feature, Field, Layout, Mask, Target, Tensor
from semel.errors import FeatureRejected

CONTRACT = Contract(
    model="tiny",
    fingerprint="f",
    target=Target("float32"),
    fields={"image": {"pixels": Field("uint8", (None, 4)), "grid": Field("int64", (1, 3))}},
    max_items={"image": 4},
    max_embeds=8,
    max_tokens=64,
)


def tensor(dtype: str, *shape: int) -> Tensor:
    size = {"uint8": 1, "int64": 8, "float32": 4}[dtype]
    for side in shape:
        size *= side
    return Tensor(dtype, shape, memoryview(bytes(size)))


def feature(**changes: object) -> Feature:
    tensors = {"pixels": tensor("uint8", 6, 4), "grid": tensor("int64", 1, 3)}
    values: dict[str, object] = {"modality": "image", "tensors": tensors, "layout": Layout((7, 7)), **changes}
    return Feature(**values)  # type: ignore[arg-type]


def test_a_tensor_needs_exactly_the_bytes_of_its_shape() -> None:
    assert tensor("float32", 2, 3).nbytes == 24
    with pytest.raises(ValueError, match=r"needs 24 contiguous bytes, the buffer has 23"):
        Tensor("float32", (2, 3), memoryview(bytes(23)))
    with pytest.raises(ValueError, match="'object' is not a dtype"):
        Tensor("object", (1,), memoryview(bytes(8)))
    with pytest.raises(ValueError, match="cannot have the shape"):
        Tensor("uint8", (-1, 2), memoryview(b""))
    with pytest.raises(ValueError, match="contiguous"):
        Tensor("uint8", (2,), memoryview(b"abcd")[::2])


def test_a_layout_needs_a_mask_over_all_of_it() -> None:
    assert Layout((1, 2, 2), Mask([0, 1, 1])).num_embeds == 2
    with pytest.raises(ValueError, match="mask over 1"):
        Layout((1, 2), Mask([1]))


def test_a_feature_is_charged_for_its_tensors() -> None:
    assert feature().nbytes == 6 * 4 + 3 * 8


def test_a_feature_that_fits_the_contract_passes_S9() -> None:
    CONTRACT.check(feature())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modality": "audio"}, "takes no audio; it takes image"),
        (
            {"tensors": {"pixels": tensor("uint8", 6, 4)}},
            r"has the tensors \['pixels'\], tiny takes \['grid', 'pixels'\]",
        ),
        ({"tensors": {"pixels": tensor("float32", 6, 4), "grid": tensor("int64", 1, 3)}}, r"pixels is Tensor\(float32"),
        ({"tensors": {"pixels": tensor("uint8", 6, 5), "grid": tensor("int64", 1, 3)}}, r"takes uint8\[\*, 4\]"),
        ({"tensors": {"pixels": tensor("uint8", 24), "grid": tensor("int64", 1, 3)}}, r"Tensor\(uint8, \[24\]\)"),
        ({"layout": Layout(())}, "no embedding"),
        ({"layout": Layout((1, 1), Mask([0, 0]))}, "no embedding"),
        ({"layout": Layout((7,) * 9)}, "9 embeddings, the engine's encoder cache holds 8"),
    ],
)
def test_a_feature_that_breaks_the_contract_is_refused_by_what_is_wrong_S9(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(FeatureRejected, match=message):
        CONTRACT.check(feature(**changes))
