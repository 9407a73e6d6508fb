"""`semel doctor` has the rows of the page of models."""

from __future__ import annotations

import json
from pathlib import Path

from tools.engine.models_page import DOCTOR, rows_for_doctor

ROOT = Path(__file__).parents[2]


def test_what_doctor_says_is_what_the_page_says() -> None:
    page = (ROOT / "docs" / "get-started" / "models.md").read_text()
    rows = rows_for_doctor(page)
    assert json.loads(DOCTOR.read_text()) == rows, "`python -m tools.engine.models_page` writes it anew"
    assert rows["types"]["qwen3_vl"].startswith("row qwen3-vl: 26 of 26")
    assert rows["types"]["gemma3n"].startswith("row gemma3n: not compared")
    assert rows["architectures"]["MolmoForCausalLM"].startswith("apply: ")
