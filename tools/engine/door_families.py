"""Plain vLLM with and without the door, family by family: `scripts/families --door`.

With `SEMEL=1` on an engine: prompts, placeholders, tokens and log probabilities. With `SEMEL=images`, only rendered:
the hashes too, which the level `renderer` makes of bytes and settings instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tools.engine.children import json_of
from tools.engine.door_parity import Reply, differences, write_questions

__all__ = ["HEAD", "compare_family", "row_of"]

HEAD: Final = "| family | replies | refused | distinct | as bare vLLM's | hashes, SEMEL=images | made by the pool |"
_DEADLINE_S: Final = 900
_ANSWER: Final = ("prompt", "placeholders", "tokens", "logprobs")
_RENDERED: Final = ("prompt", "placeholders", "hashes")
_SHOWN: Final = 5


def compare_family(family: str, model: Path) -> tuple[str, list[str]]:
    """Return the row of a family, and what is wrong. Raises `NoResult` if a process writes none."""
    write_questions(family, model)
    bare, _ = _ask(family, model, "0")
    door, counts = _ask(family, model, "1")
    lazy, _ = _ask(family, model, "images", "render")
    return row_of(family, bare, door, lazy, counts)


def row_of(
    family: str, bare: list[Reply], door: list[Reply], lazy: list[Reply], counts: dict[str, int]
) -> tuple[str, list[str]]:
    """Compare the replies of bare vLLM with those of the two doors."""
    wrong, hashes = differences(bare, door, _ANSWER), differences(bare, lazy, _RENDERED)
    refused = sum(bool(reply.fault) for reply in bare)
    distinct = len({repr((reply.tokens, reply.logprobs)) for reply in bare})
    faults = [*wrong[:_SHOWN], *(f"SEMEL=images: {line}" for line in hashes[:_SHOWN])]
    if distinct < 3:
        faults.append("bare vLLM's answers do not differ from each other: nothing could have failed")
    equal, same = _verdict(wrong), _verdict(hashes)
    made = counts.get("preprocessed", 0)
    return f"| {family} | {len(bare)} | {refused} | {distinct} | {equal} | {same} | {made} |", faults


def _verdict(lines: list[str]) -> str:
    return f"{len(lines)} differ" if lines else "equal"


def _ask(family: str, model: Path, levels: str, *mode: str) -> tuple[list[Reply], dict[str, int]]:
    log = model.with_suffix(f".{levels}.log")
    arguments = [family, str(model), *mode]
    told: dict[str, Any] = json.loads(
        json_of("tools.engine.door_parity", arguments, log=log, deadline_s=_DEADLINE_S, environment={"SEMEL": levels})
    )
    return [Reply(**reply) for reply in told["replies"]], told["counts"]
