"""The proof at start, over an engine that is a few dicts and errs in one way: what it finds, and what it switches off.

Real engines are in `test_matrix` (a bit that the tier saves wrongly, under tensor parallelism) and `test_tier_engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from semel.core import Digest, Feature, Layout, PrefetchedOutput, Tensor, hash_parts
from semel.engine.protocol import CachedOutput, StagedOutput
from semel.engine.vllm.proof import UNTESTED, Proof, State
from semel.errors import EngineFailed, FeatureMissing

FORM = (1, 8, "torch.uint8")
FEATURE = Feature("image", {"pixels": Tensor("uint8", (8,), memoryview(bytes(8)))}, Layout((7,)))
ALL: Mapping[str, State] = dict.fromkeys(UNTESTED, "proven")


@dataclass
class Engine:
    """`Probed`, and the `Tier` of its process: names of outputs, and their bytes."""

    fault: str = ""
    device: dict[str, bytes] = field(default_factory=dict)
    host: dict[str, bytes] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"loads": 0, "prefetched": 0, "late_bytes": 0})
    off: list[str] = field(default_factory=list)
    staged: bytearray = field(default_factory=lambda: bytearray(8))
    is_cut: bool = False
    replays: bool | None = False
    plans: bool = True
    items: set[str] = field(default_factory=set)
    most: int = 2
    numbers: Any = field(default_factory=count)

    def encoded(self, *ways: str) -> bytes:
        noise = next(self.numbers) if self.fault.startswith("noise") else 0
        return bytes([noise, self.fault in ways, *bytes(6)])

    @property
    def takes_injections(self) -> bool:
        return True

    def takes_two(self, feature: Feature) -> bool:
        return feature is FEATURE and self.most > 1

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        self.items.add(digest.hex())
        return feature is FEATURE

    async def answer(
        self, digests: Sequence[Digest], feature: Feature, prefetched: Sequence[Any] = (), *, is_sent: bool = True
    ) -> tuple[int, ...]:
        assert feature is FEATURE
        assert len(digests) <= self.most
        if not is_sent and not self.items.issuperset(digest.hex() for digest in digests):
            raise FeatureMissing(digests)
        ways = {"late": self.is_cut, "replayed": self.replays, "planned": self.plans, "injected": not is_sent}
        way = [name for name, is_so in ways.items() if is_so]
        for key in (digest.hex() for digest in digests):
            if key in self.device:
                continue
            if prefetched and self.fault != "not fetched":
                self.counts["prefetched"] += 1
                self.device[key] = self.encoded("fetched") if self.fault == "fetched" else bytes(self.staged)
            elif key in self.host and "host_tier" not in self.off and self.fault != "not loaded":
                self.counts["loads"] += 1
                self.device[key] = self.encoded("loaded") if self.fault == "loaded" else self.host[key]
            else:
                self.counts["late_bytes"] += self.is_cut
                self.device[key] = self.encoded(*way)
                if self.fault != "not saved":
                    saved = bytearray(self.device[key])
                    saved[-1] ^= self.fault == "saved"
                    self.host[key] = bytes(saved)
        wrong = self.fault.removeprefix("noise, ") in way
        self.is_cut = False
        return (next(self.numbers),) if self.fault == "noise everywhere" else (int(wrong),)

    async def step(self) -> None: ...

    async def forget(self) -> None:
        for store in (self.device, self.host, self.items):
            store.clear()

    async def core(self, command: str, *names: str) -> Mapping[str, int]:
        if command == "drop" and self.fault != "not dropped":
            for name in names:
                del self.device[name]
        self.is_cut = command == "cut" or self.is_cut
        self.plans = command == "planned" or (self.plans and command != "unplanned")
        self.off += names if command == "off" else ()
        saved = sum(name in self.host for name in names)
        there = dict.fromkeys(("has_host_tier", "has_lazy_transfer", "has_encoder_planning"), 1)
        return {**self.counts, **there, "saved": saved}

    async def workers(self, method: str, *arguments: Any) -> list[Any]:
        if method == "digest_outputs":
            (names,) = arguments
            return [
                {
                    name: hash_parts([repr(FORM).encode(), self.device[name]]).hexdigest()
                    for name in names
                    if name in self.device
                }
            ]
        if method == "stop_replaying":
            self.off.append("replays")
        done, self.replays = self.replays, method == "replay_next"
        return [done]

    def review(self) -> Sequence[Any]:
        return ()

    def cached_output(self, digest: Digest) -> CachedOutput | None:
        content = self.host.get(digest.hex())
        if content is None:
            return None
        read = bytes([content[0] ^ (self.fault == "read"), *content[1:]])
        return CachedOutput(FORM, (memoryview(read),), lambda: True)

    def stage(self, digest: Digest, form: Any) -> StagedOutput:
        assert form == FORM
        return StagedOutput(PrefetchedOutput(1, digest, ((0, 1),), form, 0), 0, (memoryview(self.staged),))


async def prove(engine: Any, caplog: pytest.LogCaptureFixture) -> tuple[Mapping[str, State], list[str]]:
    with caplog.at_level(logging.ERROR, "semel.engine.vllm.proof"):
        states = await Proof(engine, {"image": FEATURE}, engine).run()
    return states, [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "engine", [Engine(), Engine(fault="noise"), Engine(most=1)], ids=["exact", "noisy", "one item"]
)
async def test_everything_that_is_right_is_on(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Of an encoder whose bits differ between two runs, copies are held to what was copied, and tokens decide."""
    assert await prove(engine, caplog) == (ALL, [])
    assert engine.off == []
    assert not (engine.device or engine.host or engine.is_cut or engine.replays), "nothing is left of it"
    assert engine.plans


async def test_an_engine_that_cannot_be_probed_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Mute(Engine):
        async def core(self, command: str, *names: str) -> Mapping[str, int]:
            raise EngineFailed(f"{command} {names}")

    assert await prove(Mute(), caplog) == (UNTESTED, [])


@pytest.mark.parametrize(
    ("fault", "path", "reason"),
    [
        ("saved", "host_tier", "worker process 0 has other bits than were encoded on its device"),
        ("loaded", "host_tier", "worker process 0 has other bits than were encoded on its device"),
        ("not saved", "host_tier", "its output is not saved"),
        ("not loaded", "host_tier", "an output that was saved was encoded again"),
        ("not dropped", "host_tier", "an output that was dropped is still on the device"),
        ("read", "embedding_store", "this process reads other bits than were saved"),
        ("fetched", "embedding_store", "worker process 0 has other bits than were encoded on its device"),
        ("not fetched", "embedding_store", "an output that was fetched was encoded again"),
        ("late", "lazy_transfer", "worker process 0 has other bits than were encoded on its device"),
        ("noise, late", "lazy_transfer", "the answer is (1,), without it (0,)"),
        ("noise, replayed", "encoder_guard", "the answer is (1,), without it (0,)"),
        ("replayed", "encoder_guard", "worker process 0 has other bits than were encoded on its device"),
        ("planned", "encoder_planning", "worker process 0 has other bits than were encoded on its device"),
        ("noise, planned", "encoder_planning", "the answer is (1,), with vLLM's own planning (0,)"),
        ("injected", "injection", "worker process 0 has other bits than were encoded on its device"),
        ("noise, injected", "injection", "the answer is (1,), without it (0,)"),
        ("noise everywhere", "encoder_guard", "two plain runs differ in bits and tokens, so it cannot be decided"),
    ],
)
async def test_a_path_that_is_wrong_is_switched_off_with_one_line_that_names_it(
    fault: str, path: str, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.engine.vllm.proof._SAVED_S", 0.0)
    engine = Engine(fault=fault)
    states, lines = await prove(engine, caplog)
    assert f"{path} is switched off for this run: with the image probe, {reason}" in lines
    further = {"host_tier": {"embedding_store"}}.get(path, set())
    further |= {"lazy_transfer", "encoder_planning", "injection"} if fault == "noise everywhere" else set()
    assert {name for name, state in states.items() if state == "off"} == {path, *further}
    assert {name for name, state in states.items() if state == "proven"} == ALL.keys() - {path, *further}
    assert (path if path != "encoder_guard" else "replays") in engine.off
