"""Which files a run with `-m` leaves out before they are imported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.markers import can_select, marks_of, pytest_ignore_collect, pytest_itemcollected

FAST = "not engine and not slow and not nightly"
MIXED = "import pytest\n\n@pytest.mark.slow\ndef test_a() -> None: ...\n\ndef test_b() -> None: ...\n"
ENGINE = "import pytest\n\npytestmark = [pytest.mark.engine, pytest.mark.timeout(9)]\n\ndef test_a() -> None: ...\n"


@pytest.mark.parametrize(
    ("text", "expression", "is_left_out"),
    [
        (MIXED, "", False),
        (MIXED, f"{FAST} and not alone", False),
        (MIXED, f"{FAST} and alone", True),
        (MIXED, "slow and not engine and not alone and not nightly", False),
        (MIXED, "engine and not alone and not nightly", True),
        (MIXED, "alone and (slow or engine)", True),
        (ENGINE, FAST, True),
        (ENGINE, "engine and not alone", False),
        (ENGINE, "asyncio", False),
        ("from tests.engine.families import FAMILIES\n", "nightly", False),
        ("from tests.store.test_contract import KINDS\n", "slow", True),
    ],
)
def test_a_file_in_which_nothing_can_be_selected_is_left_out(
    text: str, expression: str, is_left_out: bool, tmp_path: Path
) -> None:
    (path := tmp_path / "test_one.py").write_text(text)
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    assert bool(pytest_ignore_collect(path, config)) == is_left_out
    assert pytest_ignore_collect(tmp_path, config) is None


def test_a_mark_that_is_not_in_the_text_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "test_one.py").write_text("from tests.store.test_contract import KINDS\n")
    item: Any = SimpleNamespace(path=path, nodeid="test_one.py::test_a", iter_markers=lambda: [pytest.mark.slow.mark])
    with pytest.raises(pytest.UsageError, match=r"test_a is \['slow'\], and the text says \[\]"):
        pytest_itemcollected(item)
    item.iter_markers = lambda: [pytest.mark.timeout(1).mark]
    pytest_itemcollected(item)


def test_a_mark_of_all_is_on_every_test() -> None:
    assert marks_of(Path(__file__).parent / "serve" / "test_serve.py")[0] == {"engine"}
    assert not can_select("slow and not engine", frozenset({"engine"}), frozenset({"engine", "slow"}))
