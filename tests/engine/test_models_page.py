"""The tables that `scripts/families --write` makes: rows that stay, rows that are new, and what classes say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.engine.models_page import DOCTOR, rows_for_doctor
from tools.engine.registry import REASONS, table, treatment

ROOT = Path(__file__).parents[2]


class Base:
    def _cached_apply_hf_processor(self) -> None: ...
    def apply(self) -> None: ...
    def _get_prompt_updates(self) -> Any: ...


class Plain(Base):
    def _get_prompt_updates(self) -> Any:
        return "PromptReplacement"


class Inserting(Base):
    def _get_prompt_updates(self) -> Any:
        return "PromptInsertion"


class OwnApply(Base):
    def apply(self) -> None: ...


class Company(OwnApply):
    def _cached_apply_hf_processor(self) -> None: ...


@pytest.mark.parametrize(
    ("processor", "expected"),
    [(Plain, "splice"), (Inserting, "apply"), (OwnApply, "apply"), (Company, "limited"), (None, "refused")],
)
def test_what_a_processor_overrides_says_what_semel_does(processor: Any, expected: str) -> None:
    assert treatment("AnyModel", processor, Base) == expected


def test_mistral_s_own_format_is_refused() -> None:
    assert treatment("PixtralForConditionalGeneration", Plain, Base) == "refused"


def test_the_table_has_every_architecture_once() -> None:
    lines = list(table([("B", "splice"), ("C", "limited"), ("D", "splice")]))
    assert lines[2:] == [
        f"| splice (2) | {REASONS['splice']} | `B`, `D` |",
        f"| limited (1) | {REASONS['limited']} | `C` |",
    ]


def test_what_doctor_says_is_what_the_page_says() -> None:
    page = (ROOT / "docs" / "get-started" / "models.md").read_text()
    rows = rows_for_doctor(page)
    assert json.loads(DOCTOR.read_text()) == rows, "`python -m tools.engine.models_page` writes it anew"
    assert rows["types"]["qwen3_vl"].startswith("row qwen3-vl: 26 of 26")
    assert rows["types"]["gemma3n"].startswith("row gemma3n: not compared")
    assert rows["architectures"]["MolmoForCausalLM"].startswith("apply: ")
