"""An item's large tensors travel to vLLM's worker processes with the step that encodes it, and with no other.

vLLM's real scheduler is stepped by hand over random requests, with too little memory of both kinds, so that requests
are preempted, prefixes are lost and encoder outputs evicted; a test's process takes the pickled steps as a worker
process does, and names every item that it is told to encode and has in part only. Real engines that do so are in
`test_encoder_engine`.
"""

from __future__ import annotations

import functools
import logging
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.engine.vllm.arguments import parse_engine_flags
from semel.engine.vllm.compat.internals import GUARDED_WORKER, LAZY_TRANSFER_SCHEDULER, LAZY_TRANSFER_WORKER, SCHEDULER
from semel.lab.bench.stepping import Kind, Step, Stepper

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Asked = tuple[list[tuple[int, int]], int, int]
"""The items of a request, each with the tokens in front of it; tokens to generate; priority."""

MakeFeature = Callable[..., "Stepped"]

LARGE, SMALL = 70_000, 100
NUM_ITEMS = 6
_ITEMS = st.tuples(st.integers(0, NUM_ITEMS - 1), st.integers(0, 12))
TOKENS_OF_AN_ITEM = 20
LAZY_TRANSFER: Mapping[str, Any] = {"scheduler_cls": LAZY_TRANSFER_SCHEDULER, "worker_cls": LAZY_TRANSFER_WORKER}


class Process:
    """What a worker process keeps of requests and their items, with vLLM's first model runner or its second."""

    def __init__(self, *, is_second: bool) -> None:
        from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

        self.use_v2_model_runner = is_second
        self.model_runner = SimpleNamespace(requests={}, encoder_cache=EncoderCache())
        self.received_bytes = 0
        self.encoded: list[str] = []

    def execute(self, output: Any) -> list[str]:
        """Take a step; what it should encode, and has in part only."""
        from semel.engine.vllm.plugins.worker import receive

        runner, known = self.model_runner, self.model_runner.encoder_cache.mm_features
        receive(self, output)
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            known.pop(name, None)
        for name in output.finished_req_ids:
            runner.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert all("grid" in feature.data for feature in new.mm_features), "positions are computed from it"
            runner.requests[new.req_id] = SimpleNamespace(mm_features=new.mm_features)
            known[new.req_id] = new.mm_features
        items = (
            known if self.use_v2_model_runner else {n: request.mm_features for n, request in runner.requests.items()}
        )
        encoded = [items[name][index] for name, ids in output.scheduled_encoder_inputs.items() for index in ids]
        self.encoded += [item.identifier for item in encoded]
        return [item.identifier for item in encoded if not is_whole(item)]


def is_whole(feature: Any) -> bool:
    number = int(feature.identifier.removeprefix("item"))
    pixels = None if feature.data is None else feature.data.get("pixels")
    return pixels is not None and bool((pixels.data == number).all())


def feature(number: int, offset: int) -> Any:
    """Every other item is small as a whole."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    pixels = torch.full((SMALL if number % 2 else LARGE,), number, dtype=torch.uint8)
    parts = {
        "pixels": MultiModalFieldElem(pixels, MultiModalBatchedField()),
        "grid": MultiModalFieldElem(torch.tensor([1, 2, 3]), MultiModalBatchedField(keep_on_cpu=True)),
    }
    place = PlaceholderRange(offset, TOKENS_OF_AN_ITEM)
    return MultiModalFeatureSpec(MultiModalKwargsItem(parts), "image", f"item{number}", place)


class Stepped:
    """A scheduler stepped by hand, its worker process, and the names of the items that it had in part only."""

    def __init__(self, kind: Kind, model: Path, *, is_async: bool, is_second: bool, **arguments: Any) -> None:
        self.stepper = Stepper.create(
            kind,
            model,
            is_async=is_async,
            tokens_per_step=64,
            kv_blocks=16,
            encoder_embeds=3 * TOKENS_OF_AN_ITEM,
            enable_prefix_caching=True,
            scheduler_reserve_full_isl=False,
            mm_processor_kwargs={"max_pixels": 28 * 28 * TOKENS_OF_AN_ITEM},
            limit_mm_per_prompt={"image": 8, "video": 0},
            **arguments,
        )
        self.scheduler = self.stepper.scheduler
        self.scheduler.use_v2_model_runner = is_second
        self.process = Process(is_second=is_second)
        self.steps_ahead = int(is_async)
        self.sent_bytes = self.preemptions = 0

    def add(self, name: str, asked: Asked) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        items, new_tokens, priority = asked
        features, end = [], 0
        for number, gap in items:
            features.append(feature(number, end + gap))
            end += gap + TOKENS_OF_AN_ITEM
        init_none_hash(sha256)
        request = Request(
            name,
            prompt_token_ids=[0] * (end + 2),
            sampling_params=SamplingParams(max_tokens=new_tokens, ignore_eos=True),
            pooling_params=None,
            mm_features=features,
            priority=priority,
            block_hasher=get_request_block_hasher(16, sha256),
        )
        self.scheduler.add_request(request)

    def run(
        self, asked: list[Asked], *, per_step: int = 2, interfere: Callable[[Any], None] = lambda _: None
    ) -> list[str]:
        """All requests, some with every step, to their ends; the items that were torn when they should be encoded.

        `interfere` is called with the scheduler before each step.
        """
        torn: list[str] = []
        unanswered: list[Step] = []
        waiting = list(enumerate(asked))
        for _ in range(3_000):
            for number, request in waiting[:per_step]:
                self.add(f"request {number}", request)
            del waiting[:per_step]
            if not (self.scheduler.requests or waiting):
                return torn
            interfere(self.scheduler)
            unanswered.append(step := self.stepper.plan())
            sent = pickle.dumps(step.output)
            self.sent_bytes += len(sent)
            torn += self.process.execute(pickle.loads(sent))
            self.preemptions += len(step.output.preempted_req_ids or ())
            if len(unanswered) > self.steps_ahead:
                self.stepper.answer(unanswered.pop(0))
        raise AssertionError("the requests do not end")


class Interference:
    """Aborts and, where no step is under way, resets, at random."""

    def __init__(self, *, with_resets: bool) -> None:
        self.rng = random.Random(0)
        self.with_resets = with_resets
        self.aborts = self.resets = 0

    def __call__(self, scheduler: Any) -> None:
        from vllm.v1.request import RequestStatus

        if scheduler.requests and self.rng.random() < 0.2:
            scheduler.finish_requests(self.rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
            self.aborts += 1
        if self.with_resets and self.rng.random() < 0.1:
            scheduler.reset_encoder_cache()
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            self.resets += 1


def requests(seed: int, count: int = 60) -> list[Asked]:
    """Over a few prompts, so that prefixes come back as well as items."""
    rng = random.Random(seed)
    prompts = [
        [(rng.randrange(NUM_ITEMS), rng.randint(0, 12)) for _ in range(rng.randint(1, 4))] for _ in range(count // 6)
    ]
    return [(rng.choice(prompts), rng.choice((1, 40)), rng.randrange(3)) for _ in range(count)]


@pytest.fixture(scope="module")
def make(tiny: Callable[[str], Path]) -> MakeFeature:
    def made(kind: Kind = "cache", *, is_async: bool = False, is_second: bool = False, **arguments: Any) -> Stepped:
        return Stepped(kind, tiny("qwen2-vl"), is_async=is_async, is_second=is_second, **arguments)

    return made


@pytest.fixture(scope="module")
def one_per_runner(make: MakeFeature) -> Callable[[bool], Stepped]:
    """A scheduler takes longer to build than to run an example: it is used again, with what it has cached."""
    return functools.cache(lambda is_second: make(is_second=is_second, **LAZY_TRANSFER))


@pytest.mark.parametrize("kind", ["cache", "planning"])
@pytest.mark.parametrize("is_second", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize(("policy", "is_async"), [("fcfs", False), ("fcfs", True), ("priority", False)])
def test_whatever_is_preempted_or_evicted_a_step_has_all_of_what_it_encodes(
    make: MakeFeature, kind: Kind, is_second: bool, is_async: bool, policy: str
) -> None:
    arguments = LAZY_TRANSFER if kind == "cache" else {"worker_cls": LAZY_TRANSFER_WORKER}
    ours = make(kind, is_async=is_async, is_second=is_second, scheduling_policy=policy, **arguments)
    assert ours.run(requests(0)) == []
    totals = ours.scheduler.encoder_cache_manager.totals
    assert min(ours.preemptions, totals.evictions, totals.left_out_bytes, totals.late_bytes) > 0
    assert ours.scheduler._lazy_transfer._partial.keys() <= ours.scheduler.finished_req_ids, (
        "of ended requests nothing stays"
    )


@pytest.mark.parametrize("is_second", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_aborts_and_resets_tear_no_item(make: MakeFeature, is_second: bool, is_async: bool) -> None:
    ours = make(is_async=is_async, is_second=is_second, **LAZY_TRANSFER)
    interference = Interference(with_resets=not is_async)
    assert ours.run(requests(3), interfere=interference) == []
    assert interference.aborts > 5
    assert is_async or interference.resets > 5
    assert ours.scheduler._lazy_transfer._partial.keys() <= ours.scheduler.finished_req_ids


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(st.tuples(st.lists(_ITEMS, min_size=1, max_size=4), st.sampled_from([1, 40]), st.just(0))))
@pytest.mark.parametrize("is_second", [False, True], ids=["V1", "V2"])
def test_no_requests_are_found_that_tear_an_item(
    one_per_runner: Callable[[bool], Stepped], is_second: bool, asked: list[Asked]
) -> None:
    ours = one_per_runner(is_second)
    assert ours.run(asked, per_step=5) == []


def test_who_leaves_out_what_is_resident_and_never_sends_it_again_is_found(make: MakeFeature) -> None:
    """The control: no encoder output is missing when its request starts, and yet it has to be encoded again."""
    naive = make(**LAZY_TRANSFER)
    naive.scheduler._lazy_transfer._late = lambda *_: {}
    assert naive.run(requests(0)) != []


def test_vllm_leaves_out_what_its_prefix_cache_covers_for_good_and_we_bring_it_back(make: MakeFeature) -> None:
    """A fault of vLLM 0.32 with its first model runner, which ends the engine; its own transfer shows it."""
    assert make().run(requests(2)) != []
    assert make(**LAZY_TRANSFER).run(requests(2)) == []


def test_a_repeat_is_sent_without_its_large_tensors_and_with_its_small_ones(make: MakeFeature) -> None:
    sent = {}
    for name, arguments in (("vLLM", {}), ("semel", LAZY_TRANSFER)):
        stepped = make(**arguments)
        assert stepped.run([([(0, 0), (1, 0)], 1, 0)]) == []
        before, encoded = stepped.sent_bytes, len(stepped.process.encoded)
        assert stepped.run([([(0, 3), (1, 0)], 1, 0)]) == []
        assert len(stepped.process.encoded) == encoded, "both were resident"
        sent[name] = stepped.sent_bytes - before
    assert sent["vLLM"] > LARGE > 10 * sent["semel"]
    assert stepped.scheduler.encoder_cache_manager.totals.left_out_bytes == LARGE
    assert stepped.scheduler.encoder_cache_manager.totals.late_bytes == 0


@pytest.mark.parametrize("is_second", [False, True], ids=["V1", "V2"])
def test_an_item_of_a_later_chunk_travels_with_that_chunk(make: MakeFeature, is_second: bool) -> None:
    ours = make(is_second=is_second, **LAZY_TRANSFER)
    assert ours.run([([(0, 0), (2, 60)], 1, 0)]) == []
    totals = ours.scheduler.encoder_cache_manager.totals
    assert ours.process.encoded == ["item0", "item2"]
    assert (totals.left_out_bytes, totals.late_bytes - 24) == (LARGE, LARGE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend is ray, not mp"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is more than 1"),
    ],
)
def test_where_late_items_would_not_arrive_every_item_is_sent_in_full_and_the_log_says_why(
    make: MakeFeature, change: Mapping[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from semel.engine.vllm.plugins.lazy_transfer import LazyTransfer

    config = make(**LAZY_TRANSFER).scheduler.vllm_config
    for name, value in change.items():
        setattr(config.parallel_config, name, value)
    with caplog.at_level(logging.WARNING, "semel"):
        assert LazyTransfer.from_config(config) is None
    assert said in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel_config.distributed_executor_backend": "uni"}, "no worker processes of its own"),
        ({"model_config.multimodal_config.mm_processor_cache_type": "shm"}, "--mm-processor-cache-type is shm"),
        ({"parallel_config.distributed_executor_backend": "mp"}, ""),
    ],
    ids=["no processes", "shm", "the control"],
)
def test_where_it_would_save_nothing_lazy_transfer_is_off_and_one_line_of_the_log_says_why(
    make: MakeFeature, change: Mapping[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from semel.engine.vllm.plugins.lazy_transfer import LazyTransfer

    config = make(**LAZY_TRANSFER).scheduler.vllm_config
    for path, value in change.items():
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, config), name, value)
    caplog.clear()
    with caplog.at_level(logging.INFO, "semel"):
        assert (LazyTransfer.from_config(config) is None) == bool(said)
    assert [said in line for line in caplog.messages] == [True] * bool(said)


@pytest.mark.parametrize(
    ("is_cpu", "is_cuda", "expected"),
    [(True, False, LAZY_TRANSFER_WORKER), (False, True, LAZY_TRANSFER_WORKER), (False, False, "auto")],
    ids=["CPU", "CUDA", "another platform"],
)
def test_lazy_transfer_is_on_wherever_semel_s_worker_can_stand_for_vllm_s(
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    is_cpu: bool,
    is_cuda: bool,
    expected: str,
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: is_cpu)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: is_cuda)
    arguments = parse_engine_flags(str(tiny("qwen2-vl")), [])
    assert arguments.worker_cls == expected
    assert arguments.scheduler_cls == LAZY_TRANSFER_SCHEDULER, "what grammars cost is limited everywhere (threats S27)"


@pytest.mark.parametrize(
    ("flags", "options", "expected"),
    [
        ([], {}, (LAZY_TRANSFER_SCHEDULER, LAZY_TRANSFER_WORKER)),
        ([], {"encoder_planning": True}, (SCHEDULER, LAZY_TRANSFER_WORKER)),
        ([], {"ship_resident_items": True}, (LAZY_TRANSFER_SCHEDULER, GUARDED_WORKER)),
        ([], {"ship_resident_items": True, "encoder_planning": True}, (SCHEDULER, GUARDED_WORKER)),
        (["--scheduler-cls", "their.Own"], {}, ("their.Own", LAZY_TRANSFER_WORKER)),
        (["--worker-cls", "their.Own"], {}, (LAZY_TRANSFER_SCHEDULER, "their.Own")),
        (["--worker-cls", "their.Own"], {"encoder_planning": True}, (SCHEDULER, "their.Own")),
    ],
)
def test_lazy_transfer_is_plugged_in_unless_the_flags_say_otherwise(
    tiny: Callable[[str], Path], flags: list[str], options: dict[str, Any], expected: tuple[str | None, str]
) -> None:
    arguments = parse_engine_flags(str(tiny("qwen2-vl")), flags, **options)
    assert (arguments.scheduler_cls, arguments.worker_cls) == expected
