"""The static comparison of two versions of vLLM, on a small package."""

from __future__ import annotations

import zipfile
from pathlib import Path

from semel.engine.vllm.compat.names import Name
from semel.engine.vllm.compat.source import SourceTree
from tools.engine.versions import Comparison, compare, names_for, read_wheel

OLD = {
    "shop/__init__.py": """
class Till:
    def take(self, coin): ...
    def close(self):
        return 1
    owner = 1
"""
}
NAMES = (
    Name("shop", "Till.take", ("coin",), "payment"),
    Name("shop", "Till.close", (), "the evening"),
    Name("shop", "Till.owner", (), "the sign"),
)


def source(text: str) -> SourceTree:
    return SourceTree("shop", {"shop/__init__.py": text}.get)


def test_what_is_missing_takes_more_or_does_otherwise_is_told_apart() -> None:
    new = source("class Till:\n    def take(self, coin, tip=0): ...\n    def close(self):\n        return 2\n")
    found = compare(new, "0.32", SourceTree("shop", OLD.get), NAMES)
    assert list(found.lines) == [
        "missing: shop.Till.owner (the sign)",
        "other parameters: shop.Till.take: +tip",
        "other code: shop.Till.close",
    ]


def test_a_release_that_is_older_than_the_table_is_held_to_its_oldest_names() -> None:
    """The wrong implementation held it to no name at all, and found nothing missing."""
    tree = SourceTree("shop", OLD.get)
    first = Name("shop", "Till.nothing", (), "the test")
    assert compare(tree, "0.30", tree, [first]).missing == (first,)
    assert len(names_for("0.30")) == len(names_for("0.31")) > 300


def test_a_wheel_is_read_as_a_folder_is(tmp_path: Path) -> None:
    wheel = tmp_path / "shop.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in OLD.items():
            archive.writestr(name, text)
    tree = read_wheel("shop", wheel)
    assert compare(tree, "0.32", SourceTree("shop", OLD.get), NAMES) == Comparison((), (), ())
    assert tree.find("shop", "Till.nothing") is None
