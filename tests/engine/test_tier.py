"""The embedding tier over vLLM's real scheduler, with ranks of our own: what a step needs is there, and is right.

No engine process is started. The ranks are dicts of tensors beside one memory, with the copies that a worker process
has (`tiered`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.compat.internals import LAZY_TRANSFER_SCHEDULER
from semel.engine.vllm.plugins.rejection import Rejection, with_rejections
from semel.engine.vllm.tier.config import TIER, TIER_MODULE, TierConfig
from semel.errors import ConfigError
from semel.lab.bench.stepping import Kind, Stepper
from tests.engine.tiered import BLOCK_BYTES, ROWS, TIER_ROWS, WIDTH, Make, create, identifier, random_requests

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> Make:
    return create(tiny)


@pytest.mark.parametrize("kind", ["cache", "planning"])
@pytest.mark.parametrize(("policy", "is_async"), [("fcfs", False), ("fcfs", True), ("priority", False)])
@pytest.mark.parametrize(("ranks", "fleet"), [(1, False), (2, False), (2, True)])
def test_whatever_is_evicted_preempted_or_lost_every_step_finds_the_right_embeddings(
    make: Make, kind: Kind, policy: str, is_async: bool, ranks: int, fleet: bool
) -> None:
    from vllm.v1.request import RequestStatus

    tiered = make(kind, ranks=ranks, is_async=is_async, scheduling_policy=policy, fleet=fleet)
    rng = random.Random(1)
    tiered.loses = lambda: rng.random() < 0.1
    resets = aborts = 0

    def interfere() -> None:
        nonlocal resets, aborts
        if tiered.scheduler.requests and rng.random() < 0.15:
            tiered.scheduler.finish_requests(
                rng.choice(list(tiered.scheduler.requests)), RequestStatus.FINISHED_ABORTED
            )
            aborts += 1
        if not is_async and rng.random() < 0.05:
            tiered.change_weights()
            resets += 1

    assert tiered.run(random_requests(0), interfere) == []
    totals = tiered.totals
    assert min(totals.tier_loads, totals.tier_saves, totals.evictions, aborts, resets or is_async) > 0
    assert totals.planned > tiered.encodes, "what was loaded was not encoded"
    assert totals.tier_held_bytes <= totals.tier_capacity_bytes == TIER_ROWS * BLOCK_BYTES
    if tiered.host is not None:
        assert totals.tier_prefetched > 0
        tiered.loses = lambda: False
        assert tiered.run([([99], 0), ([98], 0)]) == []  # whose reports end whatever is still open
        tiered.host.review()
        assert tiered.host.staged_blocks == 0, "every lease is done"


def test_a_picture_that_was_evicted_comes_back_without_an_encode(make: Make) -> None:
    tiered = make()
    for turn in range(3):
        for number in range(5):  # three of them fit on the device
            tiered.add(f"{turn}.{number}", [number], max_new_tokens=1)
            while tiered.scheduler.requests:
                assert tiered.step() == []
    assert tiered.encodes == 5
    assert tiered.totals.tier_loads == 10
    assert tiered.totals.tier_load_bytes == 10 * ROWS * BLOCK_BYTES
    assert tiered.totals.tier_pinned_bytes == 0


def test_after_new_weights_nothing_of_before_is_loaded(make: Make) -> None:
    """The control is vLLM's own scheduler, which does not tell its connectors."""
    for scheduler, expected in ((LAZY_TRANSFER_SCHEDULER, []), (None, [identifier(0)])):
        tiered = make(scheduler_cls=scheduler)
        for name, number in (("a", 0), ("b", 1), ("c", 2), ("d", 3)):
            tiered.add(name, [number], max_new_tokens=1)
            while tiered.scheduler.requests:
                tiered.step()
        tiered.change_weights()
        tiered.add("again", [0], max_new_tokens=1)
        assert tiered.step() == expected


def test_new_weights_of_a_worker_process_reach_the_tier_with_its_next_report(make: Make) -> None:
    tiered = make()
    tiered.add("a", [0], max_new_tokens=1)
    tiered.step()
    tiered.copies[0].forget()
    assert tiered.scheduler.ec_connector.books.host_cache.filled(identifier(0)) is not None
    tiered.add("b", [1], max_new_tokens=1)
    tiered.step()
    assert tiered.scheduler.ec_connector.books.host_cache.filled(identifier(0)) is None


def test_what_the_encoder_failed_on_is_not_kept(make: Make) -> None:
    tiered = make()
    tiered.fails = {identifier(0)}
    tiered.add("a", [0, 1], max_new_tokens=1)
    tiered.step()
    host_cache = tiered.scheduler.ec_connector.books.host_cache
    assert host_cache.filled(identifier(0)) is None
    assert host_cache.filled(identifier(1)) is not None
    assert (host_cache.reserved, tiered.totals.tier_not_saved) == (0, 1)


def test_an_output_that_was_rejected_after_it_was_saved_is_forgotten(make: Make) -> None:
    """The second model runner saves whatever is new."""
    from vllm.v1.outputs import ECConnectorOutput

    tiered = make()
    tiered.add("a", [0], max_new_tokens=3)
    step = tiered.stepper.plan()
    _, reports = tiered.execute(step.output)
    result = tiered.stepper.result(step)
    result.ec_connector_output = ECConnectorOutput(ec_connector_worker_meta=reports)
    rejected = with_rejections(result, (Rejection(identifier(0), "image", ROWS, ROWS - 1),))
    tiered.scheduler.update_from_output(step.output, rejected)
    assert tiered.totals.tier_saves == 1
    assert tiered.scheduler.ec_connector.books.host_cache.filled(identifier(0)) is None


def test_a_key_with_another_number_of_embeddings_is_not_loaded(make: Make) -> None:
    tiered = make()
    books = tiered.scheduler.ec_connector.books
    tiered.add("a", [0], max_new_tokens=1)
    tiered.step()
    same = Stepper.request("b", [(identifier(0), 0, ROWS)], tokens=20)
    other = Stepper.request("c", [(identifier(0), 0, ROWS + 1)], tokens=20)
    for request, expected in ((same, True), (other, False)):
        tiered.scheduler.ec_connector.ensure_cache_available(request, 0)
        assert books.has(identifier(0)) is expected
    books.consider(None)
    assert not books.has(identifier(0))


class _CountedFeature:
    """An item that counts how often somebody looks whose it is."""

    reads = 0

    def __init__(self, number: int, rows: int = 1) -> None:
        self._identifier = identifier(number)
        self.mm_position = SimpleNamespace(length=rows, is_embed=None)

    @property
    def identifier(self) -> str:
        type(self).reads += 1
        return self._identifier


def books_of(features: list[_CountedFeature], *, is_linear: bool = False) -> Any:
    """Books in which all outputs are in the host cache, and a request with these items."""
    from semel.engine.vllm.tier.connector import TierBooks

    class Linear(TierBooks):
        """A mutant: searches the prompt for every item."""

        def _features_of(self, request: Any) -> Any:
            class Search:
                def get(self, key: str) -> Any:
                    return next((one for one in request.mm_features if one.identifier == key), None)

            return Search()

    books: Any = (Linear if is_linear else TierBooks)(1, BLOCK_BYTES, BLOCK_BYTES)
    books.host_cache = SimpleNamespace(filled=lambda _: SimpleNamespace(rows=1))
    books.consider(SimpleNamespace(request_id="a", mm_features=features, ec_transfer_params=None))
    return books


@pytest.mark.parametrize(("is_linear", "per_item"), [(False, 1), (True, 500)])
def test_looking_for_the_items_of_a_prompt_takes_one_look_at_each(is_linear: bool, per_item: int) -> None:
    """The control looks at half of all items for each one."""
    count = 1_000
    features = [_CountedFeature(number) for number in range(count)]
    books = books_of(features, is_linear=is_linear)
    _CountedFeature.reads = 0
    assert all(books.has(identifier(number)) for number in range(count))
    assert not books.has(identifier(count))
    assert per_item * count <= _CountedFeature.reads <= (per_item + 2) * count


def test_what_is_known_of_a_requests_items_follows_the_request_and_ends_with_it() -> None:
    features = [_CountedFeature(0), _CountedFeature(0, rows=2)]
    books = books_of(features)
    assert books.has(identifier(0)), "the first of two"
    assert not books.has(identifier(1))
    features.append(_CountedFeature(1))
    assert books.has(identifier(1)), "its input is streamed"
    books.finish(SimpleNamespace(request_id="a", ec_transfer_params=None))
    assert not books._features


def test_a_key_that_is_no_digest_is_not_kept(make: Make) -> None:
    """vLLM puts the name of an adapter before it."""
    tiered = make()
    tiered.stepper.add("a", [(f"adapter:{identifier(0)}", 0, ROWS)], tokens=12, max_new_tokens=1)
    step = tiered.stepper.plan()
    assert not step.output.ec_connector_metadata.step.saves
    assert step.output.scheduled_encoder_inputs


@pytest.mark.parametrize("change", ["rows", "width", "dimensions", "type"])
def test_an_output_of_another_shape_is_not_saved(change: str) -> None:
    import torch

    from semel.encoder.transfers import Save
    from semel.encoder.transfers import Step as Copied
    from semel.engine.vllm.tier.copies import HostCopies

    copies = HostCopies(torch.zeros(8 * BLOCK_BYTES, dtype=torch.uint8), BLOCK_BYTES, 0)
    step = Copied(1, {"x": Save(1, 2, ((0, 1), (3, 1)))}, {})
    outputs = {
        "rows": torch.ones(3, WIDTH),
        "width": torch.ones(2, 2 * WIDTH),
        "dimensions": torch.ones(2, WIDTH, 1),
        "type": torch.ones(2, WIDTH, dtype=torch.int32),
    }
    copies.save(step, "x", outputs[change])
    report = copies.report(step)
    assert report is not None
    assert (report.report.saved, report.report.closed) == ((), 1)
    assert report.row_bytes == (2 * BLOCK_BYTES if change == "width" else 0), "the next one gets as much as it needs"
    copies.save(step, "x", torch.ones(2, WIDTH))  # the control
    again = copies.report(step)
    assert again is not None
    assert [one.form for one in again.report.saved] == [(2, WIDTH, "torch.float32")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_saved_in_pieces_is_loaded_bit_by_bit(dtype: str) -> None:
    import torch

    from semel.encoder.transfers import Load, Save
    from semel.encoder.transfers import Step as Copied
    from semel.engine.vllm.tier.copies import HostCopies

    memory = torch.zeros(16 * BLOCK_BYTES, dtype=torch.uint8)
    first, second = (HostCopies(memory, BLOCK_BYTES, rank) for rank in (0, 1))
    output = torch.randn(7, WIDTH).to(getattr(torch, dtype))
    extents = ((5, 2), (0, 4), (12, 1))
    for copies in (second, first):  # only the first one saves
        assert not memory.any()
        copies.save(Copied(1, {"x": Save(1, 7, extents)}, {}), "x", output)
    report = first.report(Copied(1, {"x": Save(1, 7, extents)}, {}))
    assert report is not None
    form = report.report.saved[0].form
    tensors: dict[str, Any] = {}
    second.load(Copied(2, {}, {"x": Load(2, extents, form)}), tensors)
    assert tensors["x"].dtype == output.dtype
    assert tensors["x"].equal(output)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2"),
        (["--scheduler-cls", "their.Scheduler"], "leave --scheduler-cls out"),
        (["--ec-manager-config", '{"encoder_cache_manager_cls": "their.Cache"}'], "semel's encoder cache"),
        (
            ["--ec-transfer-config", '{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}'],
            "--ec-transfer-config names another",
        ),
    ],
)
def test_flags_beside_which_there_can_be_no_tier_are_refused(
    flags: list[str], words: str, tiny: Callable[[str], Path]
) -> None:
    from semel.engine.vllm.arguments import create_config, parse_engine_flags

    with pytest.raises(ConfigError, match=words):
        create_config(parse_engine_flags(str(tiny("qwen2-vl")), flags, embedding_tier=TierConfig(1 << 20, "x")))


def test_a_tier_changes_nothing_that_a_client_or_a_contract_sees(tiny: Callable[[str], Path]) -> None:
    """A consumer of vLLM's takes embeddings from clients, and counts videos that are switched off."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    from semel.engine.vllm.arguments import create_config, parse_engine_flags

    flags = ["--dtype", "float32", "--max-num-batched-tokens", "512", "--max-model-len", "4096"]
    flags += ["--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--mm-processor-kwargs", '{"max_pixels": 100352}']
    sizes = []
    for tier in (None, TierConfig(1 << 20, "x")):
        config = create_config(parse_engine_flags(str(tiny("qwen2-vl")), flags, embedding_tier=tier))
        assert not config.model_config.multimodal_config.enable_mm_embeds
        sizes.append(MultiModalBudget(config, MULTIMODAL_REGISTRY).encoder_cache_size)
    assert sizes == [512, 512]
    assert config.ec_transfer_config.ec_role == "ec_consumer"
    assert (config.ec_transfer_config.ec_connector, config.ec_transfer_config.ec_connector_module_path) == (
        TIER,
        TIER_MODULE,
    )
    assert config.scheduler_config.scheduler_cls == LAZY_TRANSFER_SCHEDULER


def test_a_model_that_keeps_no_outputs_has_no_tier(tiny: Callable[[str], Path]) -> None:
    from semel.engine.vllm.arguments import create_config, parse_engine_flags

    arguments = parse_engine_flags(str(tiny("whisper")), ["--dtype", "float32"], embedding_tier=TierConfig(1, "x"))
    assert create_config(arguments).ec_transfer_config is None


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"ec_cpu_bytes": 0},
        {"ec_cpu_bytes": 1, "eviction": "x"},
        {"ec_cpu_bytes": 1, "path": "x"},
        {"ec_cpu_bytes": 1, "staging": 1},
        {"ec_cpu_bytes": 8, "staging": -1},
    ],
)
def test_settings_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TierConfig.parse(wrong)


def test_memory_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    from semel.engine.vllm.tier.copies import map_region

    assert len(map_region(str(tmp_path / "region"), 8_192)) == 8_192
    with pytest.raises(ConfigError, match="no memory for an embedding tier"):
        map_region(str(tmp_path / "large"), 1 << 60)


def test_a_request_that_waits_for_its_first_step_looks_for_no_prefix_of_old_weights(make: Make) -> None:
    """Those that have begun have found theirs; one that comes later has another salt (`EngineCaches`)."""
    tiered = make()
    tiered.add("begun", [0], max_new_tokens=9)
    tiered.step()
    tiered.add("waits", [1])
    tiered.scheduler.reset_encoder_cache()
    tiered.add("later", [2])
    skips = {name: request.skip_reading_prefix_cache for name, request in tiered.scheduler.requests.items()}
    assert skips == {"begun": False, "waits": True, "later": False}
