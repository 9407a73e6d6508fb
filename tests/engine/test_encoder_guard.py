"""The guard around the encoder, and what vLLM's real scheduler makes of its findings, stepped by hand.

A test runner encodes as vLLM's first model runner does, in as far as the guard has to do with it; of the second, the
encoder runner is vLLM's own. Real engines are in `test_hostile_features` and `test_matrix`, and what becomes of one
without the guard in `test_hostile_starts`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.compat.internals import LAZY_TRANSFER_SCHEDULER, LAZY_TRANSFER_WORKER
from semel.engine.vllm.plugins.rejection import Rejection, read_rejections, with_rejections
from semel.lab.bench.stepping import Kind, Step, Stepper

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WIDTH = 3
FEW = Rejection("few", "image", 4, 2)


@dataclass
class Item:
    """An item of a request, with the embeddings that the encoder will make of it."""

    identifier: str
    rows: int
    room: int
    raises: bool = False
    surplus: int = 0
    """Rows of its tensors that the encoder takes for the next item's."""

    modality: str = "image"
    mask: Any = None

    @property
    def sign(self) -> float:
        """What its embeddings are made of."""
        return float(ord(self.identifier[0]))

    @property
    def feature(self) -> Any:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        data: Any = self
        return MultiModalFeatureSpec(data, self.modality, self.identifier, PlaceholderRange(0, self.room, self.mask))


@dataclass
class Runner:
    """Encodes like vLLM's first model runner: all items of a step in one batch, then one output after the other."""

    requests: dict[str, Any] = field(default_factory=dict)
    encoder_cache: dict[str, Any] = field(default_factory=dict)
    mm_budget: None = None
    saved: list[str] = field(default_factory=list)
    """What a connector of encoder outputs got."""

    batches: list[list[str]] = field(default_factory=list)

    def _execute_mm_encoder(self, scheduler_output: Any) -> list[Any]:
        steps = scheduler_output.scheduled_encoder_inputs.items()
        items = [self.requests[name].mm_features[index].data for name, indices in steps for index in indices]
        self.batches.append([item.identifier for item in items])
        outputs = encoded(items)
        for item, output in zip(items, outputs, strict=True):
            self._cache_encoder_output(item.identifier, output, None, [])
        return outputs

    def _cache_encoder_output(self, identifier: str, output: Any, metadata: None, freed: list[str]) -> None:
        assert (metadata, freed) == (None, [])
        self.encoder_cache[identifier] = output
        self.saved.append(identifier)


def encoded(items: list[Item]) -> list[Any]:
    """What an encoder makes of a batch."""
    import torch

    if any(item.raises for item in items):
        raise IndexError("index out of range")
    rows = torch.tensor([sign for item in items for sign in [item.sign] * (item.rows + item.surplus)])
    sizes = [item.rows for item in items]
    return list(rows[: sum(sizes), None].expand(-1, WIDTH).split(sizes))


class SecondGuarded:
    """A worker process with vLLM's second model runner, and one request per item: a row for each of its pixels."""

    def __init__(self, *items: Item, outlives_errors: bool = True, is_guarded: bool = True) -> None:
        import torch
        from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
        from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

        from semel.engine.vllm.plugins.encoder_guard import create_guard

        self.batches: list[list[int]] = []
        self.known, device = EncoderCache(), torch.device("cpu")
        for item in items:
            self.known.add_request(item.identifier, [replace(item.feature, data=pixels_of(item))])
        model = SimpleNamespace(embed_multimodal=self._embed)
        self.runner = EncoderRunner(model, 8, WIDTH, self.known, torch.float32, device)
        self.state = SimpleNamespace(encoder_runner=self.runner, encoder_cache=self.known)
        config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
        model_runner = SimpleNamespace(model_state=self.state, encoder_cache=self.known, model=model, device=device)
        worker = SimpleNamespace(use_v2_model_runner=True, model_runner=model_runner, vllm_config=config)
        self.guard: Any = create_guard(worker, outlives_errors=outlives_errors) if is_guarded else None
        self.scheduled = {item.identifier: [0] for item in items}

    def _embed(self, pixels: Any) -> list[Any]:
        self.batches.append([len(one) for one in pixels])
        if any(one.isnan().any() for one in pixels):
            raise IndexError("index out of range")
        return [one[:, None].expand(-1, WIDTH) for one in pixels]

    def execute(self) -> dict[str, list[float]]:
        """One step; the first number of every embedding that is stored then."""
        from vllm.v1.worker.gpu.model_states.interface import ModelState

        ModelState.execute_mm_encoder(self.state, self.scheduled)
        return {name: output[:, 0].tolist() for name, output in self.known.encoder_outputs.items()}

    def rejections(self) -> tuple[Rejection, ...]:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        return read_rejections(self.guard.tell(EMPTY_MODEL_RUNNER_OUTPUT))


def pixels_of(item: Item) -> Any:
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    pixels = torch.full((item.rows,), float("nan") if item.raises else item.sign)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(pixels, MultiModalBatchedField())})


class Guarded:
    """A worker process of one request per item."""

    def __init__(self, *items: Item, outlives_errors: bool = True) -> None:
        from semel.engine.vllm.plugins.encoder_guard import create_guard

        self.runner = Runner({item.identifier: SimpleNamespace(mm_features=[item.feature]) for item in items})
        config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
        worker = SimpleNamespace(use_v2_model_runner=False, model_runner=self.runner, vllm_config=config)
        guard = create_guard(worker, outlives_errors=outlives_errors)
        assert guard is not None
        self.guard = guard
        self.step = SimpleNamespace(scheduled_encoder_inputs={item.identifier: [0] for item in items})

    def execute(self) -> dict[str, list[float]]:
        """One step; the first number of every embedding that is stored then."""
        outputs = self.runner._execute_mm_encoder(self.step)
        stored = {name: output[:, 0].tolist() for name, output in self.runner.encoder_cache.items()}
        assert [output[:, 0].tolist() for output in outputs] == [stored[name] for name in self.runner.requests]
        return stored

    def rejections(self) -> tuple[Rejection, ...]:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        assert self.guard.tell(None) is None, "there is no output yet"
        told = read_rejections(pickle.loads(pickle.dumps(self.guard.tell(EMPTY_MODEL_RUNNER_OUTPUT))))
        assert read_rejections(EMPTY_MODEL_RUNNER_OUTPUT) == (), "vLLM shares it"
        assert read_rejections(self.guard.tell(EMPTY_MODEL_RUNNER_OUTPUT)) == (), "it is told once"
        return told


R, F, M = (float(ord(letter)) for letter in "rfm")


def test_an_output_that_does_not_fit_is_padded_or_cut_and_is_not_saved() -> None:
    import torch

    masked = torch.tensor([True, False, True])
    guarded = Guarded(Item("right", 2, 2), Item("few", 2, 4), Item("many", 5, 4), Item("masked", 2, 3, mask=masked))
    assert guarded.execute() == {"right": [R, R], "few": [F, F, 0, 0], "many": [M] * 4, "masked": [M, M]}
    assert guarded.runner.saved == ["right", "masked"]
    assert guarded.rejections() == (FEW, Rejection("many", "image", 4, 5))


def test_what_fits_is_encoded_once_and_stored_as_it_is() -> None:
    guarded = Guarded(Item("right", 2, 2), Item("more", 3, 3))
    assert guarded.execute() == {"right": [R, R], "more": [M] * 3}
    assert guarded.runner.batches == [["right", "more"]]
    assert guarded.rejections() == ()


def test_what_the_second_model_runner_encodes_is_padded_or_cut_and_said_once() -> None:
    items = Item("right", 2, 2), Item("few", 2, 4), Item("many", 5, 4)
    assert SecondGuarded(*items, is_guarded=False).execute() == {"right": [R, R], "few": [F, F], "many": [M] * 5}
    guarded = SecondGuarded(*items)
    assert guarded.execute() == {"right": [R, R], "few": [F, F, 0, 0], "many": [M] * 4}
    assert guarded.batches == [[2, 2, 5], [2], [2], [5]]
    assert guarded.rejections() == (FEW, Rejection("many", "image", 4, 5))
    assert guarded.rejections() == ()


def test_the_second_model_runner_encodes_what_fits_once_and_nothing_that_it_has() -> None:
    guarded = SecondGuarded(Item("right", 2, 2), Item("more", 3, 3))
    assert guarded.execute() == guarded.execute() == {"right": [R, R], "more": [M] * 3}
    assert guarded.batches == [[2, 3]]
    assert guarded.rejections() == ()


def test_items_of_the_second_model_runner_s_own_are_not_counted() -> None:
    """vLLM measures its encoder at the start, with items that no request has."""
    guarded = SecondGuarded(Item("right", 2, 2))
    own = [("image", pixels_of(Item("own", 7, 9)))]
    assert [len(output) for output in guarded.runner.execute_mm_encoder(own)] == [7]
    assert guarded.rejections() == ()


def test_an_error_of_the_second_model_runner_s_encoder_ends_one_request_or_is_not_caught() -> None:
    items = Item("right", 2, 2), Item("few", 2, 4, raises=True)
    guarded = SecondGuarded(*items)
    assert guarded.execute() == {"right": [R, R], "few": [0.0] * 4}
    assert guarded.rejections() == (Rejection("few", "image", 4, None),)
    with pytest.raises(IndexError):
        SecondGuarded(*items, outlives_errors=False).execute()


@pytest.mark.parametrize("wrong", [{"raises": True}, {}], ids=["raises", "does not fit"])
def test_the_others_of_a_batch_run_again_alone(wrong: dict[str, Any]) -> None:
    guarded = Guarded(Item("right", 2, 2), Item("few", 2, 4, **wrong), Item("more", 3, 3))
    zeros = [0.0, 0.0]
    assert guarded.execute() == {"right": [R, R], "few": [*(zeros if wrong else [F, F]), *zeros], "more": [M] * 3}
    assert guarded.runner.batches == [["right", "few", "more"], ["right"], ["few"], ["more"]]
    assert guarded.runner.saved == ["right", "more"]
    assert guarded.rejections() == (Rejection("few", "image", 4, None if wrong else 2),)


@pytest.mark.parametrize("kind", [Guarded, SecondGuarded])
def test_the_proof_at_start_has_a_batch_run_again_once(kind: Callable[..., Any]) -> None:
    guarded = kind(Item("right", 2, 2), Item("more", 3, 3))
    guarded.guard.replay.force()
    assert guarded.execute() == {"right": [R, R], "more": [M] * 3}
    assert guarded.guard.replay.was_done()
    assert (len(getattr(guarded, "batches", ())) or len(guarded.runner.batches)) == 3
    assert guarded.rejections() == ()


@pytest.mark.parametrize("kind", [Guarded, SecondGuarded])
def test_a_batch_that_does_not_fit_ends_whole_where_running_it_again_was_found_wrong(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("semel.engine.vllm.plugins.encoder_guard.encode_sample", lambda *_: torch.ones(1, WIDTH))
    guarded = kind(Item("right", 2, 2), Item("few", 2, 4))
    guarded.guard.replay.force()
    guarded.guard.replay.is_on = False
    assert guarded.execute() == {"right": [0.0] * 2, "few": [0.0] * 4}
    assert guarded.rejections() == (Rejection("right", "image", 2, None), replace(FEW, rows=None))


def test_an_item_is_not_made_of_the_rows_of_one_before_it_that_does_not_fit() -> None:
    """The first item has two rows more than its grid says, which the encoder takes for those of the next."""
    items = Item("few", 2, 4, surplus=2), Item("right", 3, 3)
    naive = Runner({item.identifier: SimpleNamespace(mm_features=[item.feature]) for item in items})
    guarded = Guarded(*items)
    naive._execute_mm_encoder(guarded.step)
    assert naive.encoder_cache["right"][:, 0].tolist() == [F, F, R], "the control: without the guard"
    assert guarded.execute() == {"few": [F, F, 0, 0], "right": [R] * 3}


def test_a_single_item_is_not_tried_twice_and_a_sample_tells_how_wide_its_zeros_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    samples: list[str] = []

    def encode_sample(_: Any, modality: str) -> Any:
        samples.append(modality)
        return torch.ones(7, WIDTH)

    monkeypatch.setattr("semel.engine.vllm.plugins.encoder_guard.encode_sample", encode_sample)
    guarded = Guarded(Item("raises", 9, 3, raises=True, modality="audio"))
    for _ in range(2):
        assert guarded.execute() == {"raises": [0, 0, 0]}
        assert guarded.rejections() == (Rejection("raises", "audio", 3, None),)
    assert guarded.runner.batches == [["raises"], ["raises"]]
    assert samples == ["audio"]


@pytest.mark.parametrize(
    ("model", "modality", "field"),
    [
        ("qwen2-vl", "image", "pixel_values"),
        ("qwen2.5-vl", "video", "pixel_values_videos"),
        ("llava", "image", "pixel_values"),
        ("idefics3", "image", "pixel_values"),
        ("gemma3", "image", "pixel_values"),
        ("qwen2-audio", "audio", "input_features"),
        ("whisper", "audio", "input_features"),
    ],
)
def test_a_sample_is_a_small_item_of_the_model_s_own_processor(
    tiny: Callable[[str], Path], model: str, modality: str, field: str
) -> None:
    import torch
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from semel.engine.vllm.arguments import parse_engine_flags
    from semel.engine.vllm.compat.internals import encode_sample

    arguments = parse_engine_flags(str(tiny(model)), ["--dtype", "float32", "--enforce-eager"])
    processor = MULTIMODAL_REGISTRY.create_processor(arguments.create_engine_config().model_config)
    batches: list[dict[str, Any]] = []

    def embed_multimodal(**batch: Any) -> list[Any]:
        batches.append(batch)
        return [torch.ones(7, WIDTH)]

    encoder = SimpleNamespace(embed_multimodal=embed_multimodal)
    budget = SimpleNamespace(processor=processor)
    runner = SimpleNamespace(mm_budget=budget, model=encoder, device=torch.device("cpu"))
    assert encode_sample(runner, modality).shape == (7, WIDTH)
    (batch,) = batches
    assert 0 < batch[field].nbytes < 4 << 20


def test_where_an_encoder_s_error_is_not_survived_it_is_not_caught() -> None:
    guarded = Guarded(Item("raises", 9, 3, raises=True), outlives_errors=False)
    with pytest.raises(IndexError):
        guarded.execute()


def test_an_output_that_is_awaited_brings_its_rejections_when_it_comes() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput

    class Awaited(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> Any:
            return EMPTY_MODEL_RUNNER_OUTPUT

    told = with_rejections(Awaited(), (FEW,))
    assert isinstance(told, AsyncModelRunnerOutput)
    assert read_rejections(told.get_output()) == (FEW,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"use_v2_model_runner": True, "model_runner": SimpleNamespace(model_state=SimpleNamespace())},
            "has no prepare_mm_inputs, execute_mm_encoder",
        ),
        ({"model_runner": SimpleNamespace(encoder_cache={}, requests={})}, "has no _execute_mm_encoder, _cache_enc"),
    ],
)
def test_an_encoder_that_is_not_as_semel_knows_it_is_left_alone_and_the_log_says_so(
    change: Mapping[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from semel.engine.vllm.plugins.encoder_guard import create_guard

    worker = SimpleNamespace(**{"use_v2_model_runner": False, "model_runner": Runner(), **change})
    with caplog.at_level(logging.WARNING, "semel"):
        assert create_guard(worker, outlives_errors=True) is None
    assert said in caplog.text


def test_with_pipeline_parallelism_the_log_says_that_nobody_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    from semel.engine.vllm.plugins.encoder_guard import create_guard

    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    worker = SimpleNamespace(use_v2_model_runner=False, model_runner=Runner(), vllm_config=config)
    with caplog.at_level(logging.WARNING, "semel"):
        assert create_guard(worker, outlives_errors=True) is not None
    assert "--pipeline-parallel-size is more than 1" in caplog.text


@pytest.mark.parametrize("rejection", [FEW, Rejection("lora:few", "audio", 4, None)])
def test_a_rejection_travels_as_a_stop_reason_and_other_reasons_are_none(rejection: Rejection) -> None:
    assert Rejection.of_reason(rejection.reason) == rejection
    assert [Rejection.of_reason(reason) for reason in (None, 7, "", "stop", "semel-encoder:image:1:2")] == [None] * 5


def test_its_words_have_the_modality_and_both_numbers() -> None:
    assert str(FEW) == "the encoder made 2 embeddings of the image feature, its layout has 4"
    assert str(Rejection("x", "audio", 4, None)).startswith("the encoder failed on the audio feature")


# The scheduler's side.

TOKENS_OF_AN_ITEM = 20
WRONG = Rejection("wrong", "image", TOKENS_OF_AN_ITEM, 7)
PARTS = ["stock", "cache", "planning"]
MakeScheduler = Callable[..., "Scheduled"]


class Scheduled:
    """vLLM's scheduler over a worker process that rejects an item each time that it encodes it."""

    def __init__(self, stepper: Stepper, *, steps_ahead: int) -> None:
        self.stepper = stepper
        self.scheduler = stepper.scheduler
        self.steps_ahead = steps_ahead
        self.unanswered: list[tuple[Step, tuple[Rejection, ...]]] = []
        self.tensors: set[str] = set()
        self.encoded: list[str] = []
        self.outputs: dict[str, list[Any]] = {}

    def add(self, name: str, *items: tuple[str, int], max_new_tokens: int = 4) -> None:
        """A request with items at some offsets, whose blocks may be found by their prefix."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        request = Request(
            name,
            prompt_token_ids=[0] * (max(offset for _, offset in items) + TOKENS_OF_AN_ITEM + 30),
            sampling_params=SamplingParams(max_tokens=max_new_tokens, ignore_eos=True),
            pooling_params=None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", item, PlaceholderRange(offset, TOKENS_OF_AN_ITEM))
                for item, offset in items
            ],
            block_hasher=get_request_block_hasher(16, sha256),
        )
        self.scheduler.add_request(request)

    def step(self) -> None:
        step = self.stepper.plan()
        self.tensors.difference_update(step.output.free_encoder_mm_hashes)
        encoded = list(self._encoded(step.output))
        self.tensors.update(encoded)
        self.encoded += encoded
        self.unanswered.append((step, (WRONG,) if WRONG.identifier in encoded else ()))
        if len(self.unanswered) > self.steps_ahead:
            self.answer()

    def answer(self) -> None:
        step, rejections = self.unanswered.pop(0)
        result = self.stepper.result(step)
        result.prompt_logprobs_dict = {name: object() for name, samples in step.samples.items() if samples}
        told = self.scheduler.update_from_output(step.output, with_rejections(result, rejections))
        for output in (output for of_client in told.values() for output in of_client.outputs):
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self) -> None:
        for _ in range(40):
            if not self.scheduler.requests:
                break
            self.step()
        while self.unanswered:
            self.answer()
        assert not self.scheduler.requests

    def end(self, name: str) -> tuple[str, Rejection | None, int]:
        """How a request ended: its finish reason, what was rejected, and the tokens that its client got."""
        *_, last = self.outputs[name]
        tokens = sum(len(output.new_token_ids) for output in self.outputs[name])
        return str(last.finish_reason), Rejection.of_reason(last.stop_reason), tokens

    def _encoded(self, output: Any) -> Iterator[str]:
        for name, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                yield self.scheduler.requests[name].mm_features[index].identifier


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> MakeScheduler:
    def made(kind: Kind, *, is_async: bool = False, is_naive: bool = False, **arguments: Any) -> Scheduled:
        if not is_naive and kind != "planning":
            arguments["scheduler_cls"] = LAZY_TRANSFER_SCHEDULER
        stepper = Stepper.create(
            kind,
            tiny("qwen2-vl"),
            is_async=is_async,
            enable_prefix_caching=True,
            worker_cls=LAZY_TRANSFER_WORKER,
            **arguments,
        )
        return Scheduled(stepper, steps_ahead=int(is_async))

    return made


REJECTED = ("error", WRONG, 0)
ANSWERED = ("length", None, 4)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_request_whose_item_does_not_fit_ends_without_a_token_and_others_go_on(
    make: MakeScheduler, kind: Kind, is_async: bool
) -> None:
    scheduled = make(kind, is_async=is_async)
    scheduled.add("running", ("right", 3))
    scheduled.step()
    scheduled.add("hostile", ("wrong", 3))
    scheduled.add("hostile, one token", ("right", 0), ("wrong", 40), max_new_tokens=1)
    scheduled.add("beside it", ("other", 3))
    scheduled.run()
    assert scheduled.end("hostile") == scheduled.end("hostile, one token") == REJECTED
    assert scheduled.end("running") == scheduled.end("beside it") == ANSWERED
    assert len(scheduled.outputs["hostile"]) == 1, "its client hears of the error alone"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", PARTS)
def test_neither_the_output_nor_the_prefix_of_a_rejected_item_is_found_by_a_later_request(
    make: MakeScheduler, kind: Kind, is_async: bool
) -> None:
    scheduled = make(kind, is_async=is_async)
    scheduled.add("hostile", ("right", 3), ("wrong", 40))
    scheduled.run()
    scheduled.add("again", ("right", 3), ("wrong", 40))
    scheduled.add("next", ("right", 3))
    scheduled.run()
    assert scheduled.end("hostile") == scheduled.end("again") == REJECTED
    assert scheduled.end("next") == ANSWERED
    assert scheduled.encoded == ["right", "wrong", "wrong"], "what fits is kept"
    scheduled.add("last", ("right", 3))
    scheduled.step()
    assert scheduled.tensors == {"right"}, "the worker processes have dropped it"
    manager = scheduled.scheduler.encoder_cache_manager
    assert manager.num_free_slots in (manager.cache_size - TOKENS_OF_AN_ITEM, manager.cache_size)
    if kind != "stock":
        assert manager.totals.rejected == 2


@pytest.mark.parametrize("kind", PARTS)
def test_a_request_of_a_step_under_way_that_uses_it_ends_too(make: MakeScheduler, kind: Kind) -> None:
    """Of asynchronous scheduling: the step is planned before it is known that the output is wrong."""
    scheduled = make(kind, is_async=True)
    scheduled.add("hostile", ("wrong", 3))
    scheduled.step()
    scheduled.add("counts on it", ("wrong", 9))
    scheduled.add("counts on its prefix", ("wrong", 3))
    scheduled.run()
    assert scheduled.encoded == ["wrong"], "or it would be ended for itself"
    for name in ("hostile", "counts on it", "counts on its prefix"):
        assert scheduled.end(name) == REJECTED


def test_a_request_with_room_for_what_there_was_goes_on() -> None:
    """It has the item under the same name, with a layout that is right."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    right = MultiModalFeatureSpec(None, "image", "wrong", PlaceholderRange(3, 7))
    wrong = MultiModalFeatureSpec(None, "image", "wrong", PlaceholderRange(50, 20))
    assert WRONG.concerns([right]) is None
    assert WRONG.concerns([right, wrong]) is wrong
    assert Rejection("wrong", "image", 20, None).concerns([right]) is right, "an encoder that raises made nothing"


@pytest.mark.parametrize("kind", ["stock", "cache"])
def test_vllm_s_own_scheduler_answers_and_lets_a_later_request_use_it(make: MakeScheduler, kind: Kind) -> None:
    """The control: the guard alone keeps the step alive, and no more."""
    naive = make(kind, is_naive=True)
    naive.add("hostile", ("wrong", 3))
    naive.run()
    naive.add("again", ("wrong", 3))
    naive.run()
    assert naive.end("hostile") == naive.end("again") == ANSWERED
    assert naive.encoded == ["wrong"]


@pytest.mark.parametrize("part", ["_withhold", "forget_prefix"])
def test_without_a_part_of_it_a_client_gets_a_token_or_a_later_request_the_prefix(
    make: MakeScheduler, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above."""
    monkeypatch.setattr(f"semel.engine.vllm.plugins.scheduler.{part}", lambda *_: None)
    scheduled = make("cache")
    scheduled.add("hostile", ("wrong", 3), max_new_tokens=1)
    scheduled.run()
    scheduled.add("again", ("wrong", 3), max_new_tokens=1)
    scheduled.run()
    assert [scheduled.end("hostile"), scheduled.end("again")] != [REJECTED, REJECTED]
