"""Both sides of a configuration of the matrix, each in a process of its own, and what differs between them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.engine.children import NoResult, json_of
from tools.engine.matrix import SHIMS, Configuration
from tools.engine.matrix_side import Side, read_side
from tools.engine.sixteen import SIXTEEN, ProbeAnswer

__all__ = ["MatrixResult", "compare_sides", "run_configuration"]

_DEADLINE_S: Final = 1_200.0
_LOGPROBS_WITHIN: Final = 1e-4
_ONE_BY_ONE: Final = frozenset(probe.name for probe in SIXTEEN[: len(SIXTEEN) // 2])
"""Alone in their batches on both sides, so their log probabilities come of the same kernels."""

_SHARED_MEMORY: Final = Path("/dev/shm")
_SEGMENTS: Final = "*cpushm*"


@dataclass
class MatrixResult:
    """What came of a configuration."""

    name: str
    probes: int = 0
    equal_probes: int = 0
    random: int = 0
    equal_random: int = 0
    aborted: int = 0
    evictions: int = 0
    item_evictions: int = 0
    preemptions: int = 0
    loads: int = 0
    left_out_bytes: int = 0
    late_bytes: int = 0
    caught: dict[str, bool] = field(default_factory=dict)
    """Planted faults, and whether the answers show them."""

    lies: dict[str, str] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    asking_s: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether all answers are bare vLLM's, and a comparison that had to fail has failed."""
        return not self.faults


def run_configuration(one: Configuration, folder: Path, scratch: Path, requests: int) -> MatrixResult:
    """Run bare vLLM and semel one after the other, and compare."""
    environment = {
        **one.variables,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SHIMS), os.environ.get("PYTHONPATH", "")])),
    }
    before, sides = _segments(), {}
    for kind in ("bare", "semel"):
        own = scratch / kind
        own.mkdir(parents=True, exist_ok=True)
        arguments = [one.name, kind, str(folder), str(own), str(min(requests, one.most_requests))]
        try:
            line = json_of(
                "tools.engine.matrix_side",
                arguments,
                log=scratch / f"{kind}.log",
                deadline_s=_DEADLINE_S,
                environment=environment,
            )
        except NoResult as error:
            return MatrixResult(one.name, faults=[f"{kind}: {error}"])
        sides[kind] = read_side(line)
        if sides[kind].faults:
            return MatrixResult(one.name, faults=[f"{kind}: {fault}" for fault in sides[kind].faults])
        if kind == "bare":
            before |= _segments()  # vLLM leaves its own
    result = compare_sides(one, sides["bare"], sides["semel"])
    result.faults += [f"left in shared memory: {name}" for name in sorted(_segments() - before)]
    return result


def compare_sides(one: Configuration, bare: Side, semel: Side) -> MatrixResult:
    """What differs, and what a comparison that may be trusted has to have seen."""
    wrong_probes, wrong_random = _differences(bare.probes, semel.probes), _differences(bare.random, semel.random)
    wrong_controls = _differences(bare.controls, semel.controls) + _differences(bare.controls, semel.proved)
    result = MatrixResult(
        one.name,
        probes=len(bare.probes),
        equal_probes=len(bare.probes) - len(wrong_probes),
        random=len(bare.random),
        equal_random=len(bare.random) - len(wrong_random),
        aborted=semel.aborted,
        evictions=semel.evictions,
        item_evictions=semel.item_evictions,
        preemptions=semel.preemptions,
        loads=semel.loads,
        left_out_bytes=semel.left_out_bytes,
        late_bytes=semel.late_bytes,
        caught={
            name: bool(_differences({name: bare.controls[name]}, {name: semel.planted[name]})) for name in one.plants
        },
        lies=semel.lies,
        start_s={"bare": bare.start_s, "semel": semel.start_s},
        asking_s={"bare": bare.asking_s, "semel": semel.asking_s},
        faults=[*wrong_probes, *wrong_random, *wrong_controls],
    )
    result.faults += _unseen(one, bare, semel, result)
    return result


def _unseen(one: Configuration, bare: Side, semel: Side, result: MatrixResult) -> Sequence[str]:
    """What should have happened and has not."""
    answers = {answer.token_ids for answer in bare.random.values()}
    lied = set(result.lies.values())
    checks = {
        "few random requests have answers of their own": 2 * len(answers) > len(bare.random),
        "nothing was evicted from the encoder cache": semel.evictions > 0,
        "no item was evicted from the item cache": semel.item_evictions > 0 or not one.evicts_items,
        "hardly a request was aborted": semel.aborted > 1,
        "nothing was loaded from the host's memory": semel.loads > 0 or not one.tier_bytes,
        "nobody was preempted": semel.preemptions > 0 or not one.preempts,
        "nothing was left out, and lazy transfer should be on": semel.left_out_bytes > 0 or not one.ships,
        "something was left out, and lazy transfer should be off": semel.left_out_bytes == 0 or one.ships,
        f"the proof at start says {semel.proof}": set(semel.proof.values()) <= {"proven", "absent", "untested"},
        f"with a wrong copy the proof at start says {semel.flipped}": semel.flipped == _flipped(one, semel),
        "a feature that lies was not ended alone": lied == ({"ended alone"} if one.has_lies else set()),
        **{f"a planted fault was not found: {name}": is_caught for name, is_caught in result.caught.items()},
    }
    unseen = [words for words, is_so in checks.items() if not is_so]
    for side, found in (("bare", bare), ("semel", semel)):
        wrong = {path: found.facts.get(path) for path, value in one.facts.items() if found.facts.get(path) != value}
        unseen += [f"{side} ran with {path} = {value}" for path, value in wrong.items()]
    return unseen


def _flipped(one: Configuration, semel: Side) -> dict[str, str]:
    """The tier is switched off, and nothing else."""
    return {**semel.proof, "host_tier": "off"} if one.tier_bytes else {}


def _differences(expected: Mapping[str, ProbeAnswer], actual: Mapping[str, ProbeAnswer]) -> list[str]:
    """A line for every request that was not answered alike; of one that neither side answered too."""
    lines = []
    for name, one in expected.items():
        other = actual.get(name, ProbeAnswer(fault="not asked"))
        if one.fault or other.fault:
            lines.append(f"{name}: {one.fault or 'answered'} / {other.fault or 'answered'}")
        elif one.token_ids != other.token_ids:
            lines.append(f"{name}: tokens {list(one.token_ids)} / {list(other.token_ids)}")
        elif name in _ONE_BY_ONE and not _are_near(one.logprobs, other.logprobs):
            lines.append(f"{name}: log probabilities {list(one.logprobs)} / {list(other.logprobs)}")
    return lines


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= _LOGPROBS_WITHIN for a, b in zip(one, other, strict=True))


def _segments() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.glob(_SEGMENTS)} if _SHARED_MEMORY.is_dir() else set()
