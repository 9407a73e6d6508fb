"""Encoder outputs that are not finite are counted, by both guards, and no step waits for a device to say so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from semel.engine.vllm.plugins.encoder_metrics import EncoderTotals
from semel.engine.vllm.plugins.rejection import read_not_finite, with_rejections
from tests.engine.test_encoder_guard import Guarded, Item, SecondGuarded, make

__all__ = ["make"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

INFINITY = float("inf")


class Overflow(Item):
    """An item of which the encoder makes infinity."""

    @property
    def sign(self) -> float:
        return INFINITY


class LateDevice:
    """Copies that are complete some looks later; to read one before is to wait for the device."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.waits = 0

    def to_host(self, flags: Any) -> tuple[Any, Callable[[], bool]]:
        left, device = self.looks, self

        class Copy:
            def tolist(self) -> list[bool]:
                device.waits += left > 0
                found: list[bool] = flags.tolist()
                return found

        def is_there() -> bool:
            nonlocal left
            left -= 1
            return left <= 0

        return Copy(), is_there


def tell(guarded: Guarded | SecondGuarded) -> int:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    return read_not_finite(guarded.guard.tell(EMPTY_MODEL_RUNNER_OUTPUT))


def outputs_on(device: LateDevice, guarded: Guarded | SecondGuarded) -> None:
    from semel.engine.vllm.plugins.finite_outputs import FiniteOutputs

    guarded.guard._findings._finite = FiniteOutputs(device.to_host)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [Guarded, SecondGuarded])
def test_an_output_that_is_not_finite_is_counted_once_and_named_by_the_beginning_of_its_digest(
    kind: type[Guarded | SecondGuarded], caplog: pytest.LogCaptureFixture
) -> None:
    guarded = kind(Item("right", 2, 2), Overflow("0123456789abcdef", 3, 3), Item("few", 2, 4))
    with caplog.at_level(logging.WARNING, "semel"):
        assert guarded.execute()["0123456789abcdef"] == [INFINITY] * 3, "it is used as vLLM uses it"
        assert [tell(guarded) for _ in range(3)] == [1, 0, 0]
    assert "of the item 0123456789ab…" in caplog.text
    assert "0123456789abc" not in caplog.text


@pytest.mark.parametrize("kind", [Guarded, SecondGuarded])
def test_a_device_that_answers_two_steps_later_is_not_waited_for(kind: type[Guarded | SecondGuarded]) -> None:
    device = LateDevice(3)
    guarded = kind(Item("right", 2, 2), Overflow("over", 3, 3))
    outputs_on(device, guarded)
    guarded.execute()
    assert [tell(guarded) for _ in range(4)] == [0, 0, 1, 0]
    assert device.waits == 0


def test_mutant_that_reads_at_once_waits_for_the_device() -> None:
    from semel.engine.vllm.plugins.finite_outputs import FiniteOutputs

    class AtOnce(FiniteOutputs):
        def take(self) -> int:
            answers = [answer._replace(is_there=lambda: True) for answer in self._pending]
            self._pending.clear()
            self._pending.extend(answers)
            return super().take()

    device = LateDevice(3)
    guarded = Guarded(Overflow("over", 3, 3))
    guarded.guard._findings._finite = AtOnce(device.to_host)  # type: ignore[attr-defined]
    guarded.execute()
    assert tell(guarded) == 1
    assert device.waits == 1


def reads_of_scalars(ask: Callable[[Sequence[str], Sequence[Any]], None]) -> int:
    """How often Python takes a number out of a tensor meanwhile, for which it waits on a GPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):  # type: ignore[misc]
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    mode: Any = Reads
    with mode() as reads:
        ask(["a", "b"], [torch.ones(3, 4), torch.full((2, 4), INFINITY)])
    return int(reads.count)


def test_to_ask_takes_no_number_out_of_a_tensor_and_a_mutant_that_asks_one_by_one_does() -> None:
    import torch

    from semel.engine.vllm.plugins.finite_outputs import FiniteOutputs

    class OneByOne(FiniteOutputs):
        def ask(self, identifiers: Sequence[str], outputs: Sequence[torch.Tensor]) -> None:
            super().ask(identifiers, [output for output in outputs if bool(torch.isfinite(output).all())])

    ours = FiniteOutputs()
    assert reads_of_scalars(ours.ask) == 0
    assert ours.take() == 1
    assert reads_of_scalars(OneByOne().ask) > 0


def test_a_device_that_never_answers_costs_no_memory_without_bound() -> None:
    import torch

    from semel.engine.vllm.plugins.finite_outputs import MAX_PENDING, FiniteOutputs

    finite = FiniteOutputs(LateDevice(1 << 30).to_host)
    for _ in range(3 * MAX_PENDING):
        finite.ask(["a"], [torch.ones(1)])
        assert finite.take() == 0
    assert len(finite._pending) == MAX_PENDING


def test_a_count_waits_for_a_step_with_an_output_and_travels_with_its_rejections() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput

    class Awaited(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> Any:
            return EMPTY_MODEL_RUNNER_OUTPUT

    guarded = Guarded(Overflow("over", 3, 3))
    guarded.execute()
    assert guarded.guard.tell(None) is None
    assert tell(guarded) == 1
    assert read_not_finite(with_rejections(Awaited(), (), 3).get_output()) == 3
    assert read_not_finite(EMPTY_MODEL_RUNNER_OUTPUT) == 0, "vLLM shares it"


@pytest.mark.parametrize("kind", ["cache", "planning"])
def test_the_scheduler_counts_them_for_the_worker_s_metrics(make: Any, kind: Any) -> None:
    scheduled = make(kind)
    scheduled.add("one", ("right", 3))
    step = scheduled.stepper.plan()
    scheduled.scheduler.update_from_output(step.output, with_rejections(scheduled.stepper.result(step), (), 2))
    assert scheduled.scheduler.encoder_cache_manager.totals.not_finite == 2


def test_the_totals_fit_their_row() -> None:
    from dataclasses import fields

    from semel.engine.vllm.plugins import encoder_metrics

    assert len(fields(EncoderTotals)) < encoder_metrics._COLUMNS
