"""The tables that `scripts/families --write` makes: rows that stay, rows that are new, and what classes say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.family_parity import Parity
from tests.engine.registry import REASONS, table, treatment
from tools.engine.models_page import DOCTOR, HEAD, replace_rows, replace_section, row_of, rows_for_doctor

ROOT = Path(__file__).parents[2]
PAGE = "\n".join(["# Models", "", *HEAD, "| a (`a`) | old |", "| c (`c`) | old |", "", "More.", ""])
RIGHT = Parity(
    questions=9, equal=9, items=12, modalities={"image": 4}, is_control_seen=True, sizes=30, lies={"x": "refused"}
)


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


def test_rows_of_other_families_stay_and_the_table_is_sorted() -> None:
    page = replace_rows(PAGE, {"b": "| b (`b`) | new |", "c": "| c (`c`) | new |"})
    assert page.splitlines()[4:] == ["| a (`a`) | old |", "| b (`b`) | new |", "| c (`c`) | new |", "", "More."]
    assert page.startswith("# Models\n")


def test_a_section_is_replaced_between_its_marks() -> None:
    page = "before\n<!-- begin x -->\nold\n<!-- end x -->\nbehind\n"
    assert replace_section(page, "x", ["new"]) == page.replace("old", "new")


def test_a_row_says_how_many_answers_are_equal_and_which_path_made_them() -> None:
    row = row_of("qwen3-vl", {"model_type": "qwen3_vl"}, RIGHT)
    assert row == "| qwen3-vl (`qwen3_vl`) | image 4 | generic | 9 of 9 with 12 items | seen | 1 refused | 30 of 30 |"
    assert "| fast |" in row_of("qwen2-vl", {"model_type": "qwen2_vl"}, "no engine")


@pytest.mark.parametrize("fault", [{"equal": 8}, {"is_control_seen": False}, {"faults": ["one"]}, {"questions": 0}])
def test_a_family_is_right_only_if_all_is(fault: dict[str, Any]) -> None:
    from dataclasses import replace

    assert RIGHT.is_right
    assert not replace(RIGHT, **fault).is_right


def test_what_doctor_says_is_what_the_page_says() -> None:
    page = (ROOT / "docs" / "get-started" / "models.md").read_text()
    rows = rows_for_doctor(page)
    assert json.loads(DOCTOR.read_text()) == rows, "`python -m tools.engine.models_page` writes it anew"
    assert rows["types"]["qwen3_vl"].startswith("row qwen3-vl: 26 of 26")
    assert rows["types"]["gemma3n"].startswith("row gemma3n: not compared")
    assert rows["architectures"]["MolmoForCausalLM"].startswith("apply: ")
