"""Every class of threat that semel knows has tests of its own here, named for its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = range(1, 19)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"S{row}")
def test_every_row_has_a_module_that_names_it_and_tests_in_it(row: int) -> None:
    modules = [path for path in HERE.glob("test_s*.py") if re.match(rf"test_s0?{row}_", path.name)]
    assert modules, f"there is no test_s{row:02}_*.py"
    for module in modules:
        text = module.read_text()
        assert re.search(rf"\bS{row}\b", text), f"{module.name} does not name S{row}"
        assert "def test_" in text
