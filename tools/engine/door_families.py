"""Plain vLLM with and without the door, family by family: `scripts/families --door`.

With `SEMEL=1` on an engine: prompts, placeholders, tokens and log probabilities, and with an item cache for two or
three items, only rendered, the tensors and which items the engine has. With `SEMEL=images`, only rendered: the hashes
too, which the level `renderer` makes of bytes and settings instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from semel.lab.testing.models import FAMILIES
from tools.engine.children import json_of
from tools.engine.door_parity import Reply, differences, evictions, write_questions

__all__ = ["HEAD", "compare_family", "evicted_faults", "row_of"]

HEAD: Final = "| family | replies | refused | distinct | as bare vLLM's | hashes, SEMEL=images | made by the pool |"
_DEADLINE_S: Final = 900
_ANSWER: Final = ("prompt", "placeholders", "tokens", "logprobs")
_RENDERED: Final = ("prompt", "placeholders", "hashes")
_EVICTED: Final = ("prompt", "placeholders", "items")
_LEFT_TO_VLLM: Final = frozenset({"deepseek-vl2"})
"""The families whose items depend on their company: the pool makes none of them."""

_SHOWN: Final = 5


def compare_family(family: str, model: Path) -> tuple[str, list[str]]:
    """Return the row of a family, and what is wrong. Raises `NoResult` if a process writes none."""
    write_questions(family, model)
    bare, door = _ask(family, model, "0"), _ask(family, model, "1")
    lazy = _ask(family, model, "images", "render")
    counts = {**door.counts, "decodes_saved": lazy.counts.get("decodes_saved", 0)}
    row, faults = row_of(family, bare.replies, door.replies, lazy.replies, counts)
    return row, [*faults, *evicted_faults(bare.evicted, door.evicted)]


def evicted_faults(bare: list[Reply], door: list[Reply]) -> list[str]:
    """Compare renderings with an item cache for two or three items; none are right if a family takes no images."""
    faults = [f"small cache: {line}" for line in differences(bare, door, _EVICTED)[:_SHOWN]]
    if bare and not evictions(bare):
        faults.append("small cache: no item was evicted: nothing could have failed")
    return faults


def row_of(
    family: str, bare: list[Reply], door: list[Reply], lazy: list[Reply], counts: dict[str, int]
) -> tuple[str, list[str]]:
    """Compare the replies of bare vLLM with those of the two doors."""
    wrong, hashes = differences(bare, door, _ANSWER), differences([*bare, *bare], lazy, _RENDERED)
    refused = sum(bool(reply.fault) for reply in bare)
    distinct = len({repr((reply.tokens, reply.logprobs)) for reply in bare})
    faults = [*wrong[:_SHOWN], *(f"SEMEL=images: {line}" for line in hashes[:_SHOWN])]
    if distinct < 3:
        faults.append("bare vLLM's answers do not differ from each other: nothing could have failed")
    takes_images = "image" in FAMILIES[family].serving.max_items
    made, saved = counts.get("preprocessed", 0), counts.get("decodes_saved", 0)
    if not made and family not in _LEFT_TO_VLLM:
        faults.append("the pool has made no item: the door was shut")
    if not saved and takes_images:
        faults.append("SEMEL=images: no decode was saved: the door was shut")
    equal, same = _verdict(wrong), _verdict(hashes)
    return f"| {family} | {len(bare)} | {refused} | {distinct} | {equal} | {same} | {made} |", faults


def _verdict(lines: list[str]) -> str:
    return f"{len(lines)} differ" if lines else "equal"


@dataclass(frozen=True)
class _Asked:
    """A process's replies, those with a small item cache, and the door's counters before these."""

    replies: list[Reply]
    evicted: list[Reply]
    counts: dict[str, int]


def _ask(family: str, model: Path, levels: str, *mode: str) -> _Asked:
    log = model.with_suffix(".".join(("", levels, *mode, "log")))
    arguments = [family, str(model), *mode]
    told: dict[str, Any] = json.loads(
        json_of("tools.engine.door_parity", arguments, log=log, deadline_s=_DEADLINE_S, environment={"SEMEL": levels})
    )
    replies, evicted = ([Reply(**reply) for reply in told[name]] for name in ("replies", "evicted"))
    return _Asked(replies, evicted, told["counts"])
