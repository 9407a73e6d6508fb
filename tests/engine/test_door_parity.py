"""The comparison of `scripts/families --door`: each part that differs is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.parity import Clip
from tools.engine.door_families import evicted_faults, row_of
from tools.engine.door_parity import Reply, door_questions, file_questions, read_questions, write_questions

BARE = [
    Reply([1, 2, 3], {"image": [[1, 2, None]]}, {"image": [f"hash {number}"]}, [], [number], [[[number, -0.5]]])
    for number in range(4)
]
BARE.append(Reply(fault="cannot identify image file"))
TWICE = [*BARE, *BARE]


def test_equal_replies_have_no_fault_though_the_renderers_hashes_are_others() -> None:
    door = [replace(reply, hashes={"image": ["another"]}) for reply in BARE]
    row, faults = row_of("qwen2-vl", BARE, door, TWICE, {"preprocessed": 3, "decodes_saved": 1})
    assert faults == []
    assert row == "| qwen2-vl | 5 | 1 | 5 | equal | equal | 3 |"


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, prompt=[1, 2]),
        lambda one: replace(one, placeholders={"image": [[2, 2, None]]}),
        lambda one: replace(one, tokens=[9]),
        lambda one: replace(one, logprobs=[[[0, -0.6]]]),
        lambda one: replace(one, fault="an error"),
    ],
)
def test_one_part_of_one_reply_that_differs_is_found(change: Callable[[Reply], Reply]) -> None:
    row, faults = row_of("qwen2-vl", BARE, [change(BARE[0]), *BARE[1:]], TWICE, {})
    assert "1 differ | equal" in row
    assert faults[0].startswith("question 0, ")


def test_a_hash_of_lazy_images_that_differs_a_missing_reply_and_equal_answers_are_found() -> None:
    lazy = [*BARE, replace(BARE[0], hashes={"image": ["x"]}), *BARE[1:]]
    assert row_of("qwen2-vl", BARE, BARE, lazy, {})[1][0].startswith("SEMEL=images: question 5, hashes")
    assert row_of("qwen2-vl", BARE, BARE[1:], TWICE, {})[1][0] == "4 replies instead of 5"
    assert "nothing could have failed" in row_of("qwen2-vl", BARE[:1] * 5, BARE[:1] * 5, BARE[:1] * 10, {})[1][0]


@pytest.mark.slow
def test_every_process_asks_the_same_bytes_which_an_encoder_of_video_does_not_make_twice(tmp_path: Path) -> None:
    write_questions("qwen2-vl", tmp_path / "model")
    first, again = (read_questions("qwen2-vl", tmp_path / "model") for _ in range(2))
    assert first == again
    assert len(first) == len(list(door_questions("qwen2-vl")))


def test_a_door_that_was_shut_is_a_fault_though_all_replies_are_equal() -> None:
    def shut(family: str, **counts: int) -> list[str]:
        return [fault for fault in row_of(family, BARE, BARE, TWICE, counts)[1] if "the door was shut" in fault]

    assert len(shut("qwen2-vl")) == 2
    assert shut("qwen2-vl", preprocessed=1) == ["SEMEL=images: no decode was saved: the door was shut"]
    assert shut("qwen2-vl", decodes_saved=1) == ["the pool has made no item: the door was shut"]
    assert shut("deepseek-vl2", decodes_saved=1) == []  # vLLM's own from the start
    assert shut("whisper", preprocessed=1) == []  # no images


def test_with_a_small_cache_another_item_and_a_cache_that_evicts_nothing_are_found() -> None:
    bare = [Reply([1], hashes=name, items=[item]) for name, item in (("x", "a"), ("y", "a"), ("y", None), ("x", "a"))]
    assert evicted_faults(bare, bare) == []
    assert evicted_faults(bare, [*bare[:3], Reply([1], items=[None])])[0].startswith("small cache: question 3, items")
    assert "no item was evicted" in evicted_faults(bare[:3], bare[:3])[0]
    assert evicted_faults([], []) == []


def test_a_family_with_images_is_asked_about_every_kind_of_file_and_damaged_ones() -> None:
    questions = list(door_questions("mistral3"))
    assert len(questions) > 20 + 2 * 12
    files = list(file_questions("mistral3"))
    assert questions[-4:] == [files[-2], files[-2], files[-1], files[-1]]  # new, then in the cache
    assert all(isinstance(question, Clip) for question in door_questions("whisper"))
