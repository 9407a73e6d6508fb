"""vLLM's real scheduler with the embedding tier, stepped by hand, and ranks that are dicts of tensors.

What is encoded says for which item, and under which weights.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from semel.core import Digest, Form, PrefetchedOutput
from semel.engine.protocol import StagedOutput
from semel.engine.vllm.compat.internals import LAZY_TRANSFER_SCHEDULER, SCHEDULER
from semel.engine.vllm.tier.config import TierConfig
from semel.engine.vllm.tier.host import HostTier
from semel.engine.vllm.tier.page import TierPage
from semel.engine.vllm.tier.prefetch_params import Staging, prefetch_params
from semel.engine.vllm.tier.shared_file import create_file, descriptor_path
from semel.lab.bench.stepping import Kind, Step, Stepper

WIDTH = 128
BLOCK_BYTES = 4 * WIDTH
ROWS = 10
TIER_ROWS = 65
"""Room for six items of the ten that come."""
STAGING_ROWS = 33
"""Room for three more that were fetched."""
NBYTES = (TIER_ROWS + STAGING_ROWS) * BLOCK_BYTES
FORM: Form = (ROWS, WIDTH, "torch.float32")


def identifier(number: int) -> str:
    return f"{number:064x}"


class Tiered:
    """A scheduler with the tier, stepped by hand, and the ranks of its engine."""

    def __init__(
        self,
        stepper: Stepper,
        copies: list[Any],
        region: str | None,
        page: TierPage | None = None,
        *,
        steps_ahead: int = 0,
    ) -> None:
        self.stepper, self.scheduler, self.copies = stepper, stepper.scheduler, copies
        ranks = len(copies)
        self.host: HostTier | None = None
        if page is not None:
            staging = Staging(TIER_ROWS, STAGING_ROWS, BLOCK_BYTES)
            self.host = HostTier.open(region, NBYTES, staging, TierPage.open(page.path))
        self.tensors: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self.weights = 0
        self.encodes = 0
        self.scribbled: list[StagedOutput] = []
        self.steps_ahead = steps_ahead
        self.unanswered: list[tuple[Step, Any]] = []
        self.loses: Callable[[], bool] = lambda: False
        self.fails: set[str] = set()
        """What the encoder makes another number of embeddings of."""

    @property
    def totals(self) -> Any:
        return self.scheduler.encoder_cache_manager.totals

    def add(
        self, name: str, items: list[int], prefetched_outputs: tuple[PrefetchedOutput, ...] = (), **options: Any
    ) -> None:
        placed = [(identifier(number), 2 + index * (ROWS + 1), ROWS) for index, number in enumerate(items)]
        request = self.stepper.request(name, placed, tokens=4 + len(items) * (ROWS + 1), **options)
        if prefetched_outputs:
            assert self.host is not None
            self.host.submit(prefetched_outputs)
            request.ec_transfer_params = prefetch_params(prefetched_outputs)
        self.scheduler.add_request(request)

    def fetch(self, number: int, form: Form = FORM) -> StagedOutput | None:
        """What a worker fetches: an item's output under these weights. None if there is no room for it."""
        assert self.host is not None
        staged = self.host.stage(Digest(bytes.fromhex(identifier(number))), form)
        if staged is not None:
            content = memoryview(self.encoded(identifier(number)).numpy().tobytes())
            for buffer in staged.buffers:
                buffer[:] = content[: len(buffer)]
                content = content[len(buffer) :]
        return staged

    def step(self) -> list[str]:
        """One step; what it needs and does not find, or finds wrong."""
        step = self.stepper.plan()
        wrong, reports = self.execute(pickle.loads(pickle.dumps(step.output)))
        self.unanswered.append((step, reports))
        if len(self.unanswered) > self.steps_ahead:
            self.answer(*self.unanswered.pop(0))
        return wrong

    def published(self) -> Iterator[str]:
        """What could be published now, and is not what the encoder made."""
        for number in range(100 if self.host is not None else 0):
            assert self.host is not None
            found = self.host.cached_output(Digest(bytes.fromhex(identifier(number))))
            expected = self.encoded(identifier(number)).numpy().tobytes()
            if found is not None and b"".join(found.buffers) != expected and found.is_intact():
                yield f"published: {identifier(number)}"

    def settle(self) -> list[str]:
        """What an engine without requests does, until it waits for one."""
        wrong: list[str] = []
        while self.scheduler.ec_connector.has_pending_push_work():
            wrong += self.step()
        return wrong

    def answer(self, step: Step, reports: Any) -> None:
        from vllm.v1.outputs import ECConnectorOutput

        result = self.stepper.result(step)
        if reports is not None and not self.loses():
            result.ec_connector_output = ECConnectorOutput(ec_connector_worker_meta=reports)
        self.scheduler.update_from_output(step.output, result)

    def execute(self, output: Any) -> tuple[list[str], Any]:
        from semel.engine.vllm.tier.copies import TierReports

        plan, reports, wrong = output.ec_connector_metadata.step, None, []
        for copies, tensors in zip(self.copies, self.tensors, strict=True):
            for freed in output.free_encoder_mm_hashes:
                tensors.pop(freed, None)
            copies.load(plan, tensors)
            for name, indices in output.scheduled_encoder_inputs.items():
                for feature in (self.scheduler.requests[name].mm_features[index] for index in indices):
                    tensors[feature.identifier] = self.encoded(feature.identifier)
                    if feature.identifier not in self.fails:
                        copies.save(plan, feature.identifier, tensors[feature.identifier])
            wrong += list(self.missing(output, tensors))
            if (report := copies.report(plan)) is not None:
                one = TierReports([report])
                reports = one if reports is None else reports.aggregate(one)
        self.encodes += sum(map(len, output.scheduled_encoder_inputs.values()))
        return wrong, reports

    def encoded(self, key: str) -> Any:
        import torch

        return torch.full((ROWS, WIDTH), float(int(key, 16) + 100 * self.weights))

    def missing(self, output: Any, tensors: dict[str, Any]) -> Iterator[str]:
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            computed = request.num_computed_tokens
            for feature in request.mm_features:
                place = feature.mm_position
                if place.offset < computed and computed - tokens < place.offset + place.length:
                    tensor = tensors.get(feature.identifier)
                    if tensor is None or not tensor.equal(self.encoded(feature.identifier)):
                        yield feature.identifier

    def change_weights(self) -> None:
        self.weights += 1
        self.scheduler.reset_encoder_cache()
        for tensors in self.tensors:
            tensors.clear()
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def lend(self, name: str, items: list[int], rng: random.Random, **options: Any) -> None:
        """Add a request with what could be fetched for it."""
        wanted = [number for number in dict.fromkeys(items) if rng.random() < 0.5]
        staged = [one for number in wanted if (one := self.fetch(number)) is not None]
        self.add(name, items, tuple(one.prefetched for one in staged), **options)

    def run(self, requests: list[tuple[list[int], int]], interfere: Callable[[], None] = lambda: None) -> list[str]:
        """Two new requests with each step, to their ends."""
        rng = random.Random(2)
        wrong: list[str] = []
        waiting = list(enumerate(requests))
        for _ in range(3_000):
            for number, (items, priority) in waiting[:2]:
                options: dict[str, Any] = {"priority": priority, "max_new_tokens": 1 + number % 7}
                if self.host is None:
                    self.add(f"request {number}", items, **options)
                else:
                    self.lend(f"request {number}", items, rng, **options)
            del waiting[:2]
            if not (self.scheduler.requests or waiting):
                return wrong
            interfere()
            wrong += self.step()
            self.scribble()
        raise AssertionError("the requests do not end")

    def scribble(self) -> None:
        """Write over every block that the engine is done with: whoever reads it still reads nonsense."""
        if self.host is None:
            return
        self.host.review()
        while (free := self.host.stage(Digest(bytes(32)), (1, WIDTH, "torch.float32"))) is not None:
            self.scribbled.append(free)
            for buffer in free.buffers:
                buffer[:] = b"\x01" * len(buffer)
        while self.scribbled:
            self.host.release(self.scribbled.pop())


Make = Callable[..., Tiered]


def create(tiny: Callable[[str], Path]) -> Make:
    """Makes them of the tiny model."""

    def made(
        kind: Kind = "cache",
        *,
        ranks: int = 1,
        is_async: bool = False,
        fleet: bool = False,
        device: Callable[[Any, int], Any] | None = None,
        **arguments: Any,
    ) -> Tiered:
        from semel.engine.vllm.tier.copies import HostCopies, map_region

        region, page = descriptor_path(create_file("test-tier")), TierPage.create() if fleet else None
        tier = TierConfig(TIER_ROWS * BLOCK_BYTES, region)
        if page is not None:
            tier = TierConfig(NBYTES, region, page=page.path, staging=STAGING_ROWS * BLOCK_BYTES)
        plugs = tier.arguments
        options = {
            "scheduler_cls": LAZY_TRANSFER_SCHEDULER if kind == "cache" else SCHEDULER,
            "tokens_per_step": 64,
            "kv_blocks": 20,
            "encoder_embeds": 3 * ROWS,
            "scheduler_reserve_full_isl": False,
            "mm_processor_kwargs": {"max_pixels": 28 * 28 * ROWS},
            "limit_mm_per_prompt": {"image": 8, "video": 0},
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "mp",
        }
        stepper = Stepper.create(kind, tiny("qwen2-vl"), is_async=is_async, **{**options, **plugs, **arguments})
        if device is not None:
            copies = [device(stepper.scheduler.vllm_config, rank) for rank in range(ranks)]
            return Tiered(stepper, copies, None, page, steps_ahead=int(is_async))
        memory = map_region(region, NBYTES)
        copies = [HostCopies(memory, BLOCK_BYTES, rank) for rank in range(ranks)]
        return Tiered(stepper, copies, region, page, steps_ahead=int(is_async))

    return made


def random_requests(seed: int, count: int = 80) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [(rng.choices(range(10), k=rng.randint(0, 3)), rng.randrange(3)) for _ in range(count)]
