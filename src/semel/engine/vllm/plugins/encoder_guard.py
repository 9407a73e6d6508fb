"""A guard around the encoder in vLLM's worker processes: an item that does not fit ends its request, not the engine.

vLLM takes what the encoder makes of an item for what the prompt has room for. Too few embeddings end the engine for
everybody; too many are cut, and the answer is about something else. An encoder that raises ends the engine as well.

Here the embeddings are counted before they are stored, an integer compare per item. If an item of a batch does not fit,
nothing of the batch is stored, since such an item may have been encoded from its neighbours' rows: each item runs again
alone. An output that does not fit then is padded with zeros or cut, so that the step goes on, and the step's output
says so (`rejection`). It stays where it is until the scheduler has the worker processes drop it: steps that are on
their way may count on it, and their requests are ended too. An encoder-output connector does not save it, but for one
under the second model runner, which saves whatever is new.

Outputs that fit and have NaN or infinity in them are counted (`finite_outputs`), and no step waits for that.

A batch on which the encoder raises is treated in the same way, but on a CPU only. A GPU reports its faults late and
cannot go on after most of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from semel.engine.vllm.compat.internals import (
    encode_sample,
    encoder_runner,
    num_embeds,
    received_features,
    runs_encoder,
)
from semel.engine.vllm.plugins.finite_outputs import FiniteOutputs
from semel.engine.vllm.plugins.rejection import Rejection, with_rejections

__all__ = ["EncoderGuard", "FirstRunnerGuard", "Replay", "SecondRunnerGuard", "create_guard"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Input:
    """One item that a step encodes."""

    request_id: str
    index: int
    identifier: str
    modality: str
    embeds: int

    @classmethod
    def from_feature(cls, request_id: str, index: int, feature: Any) -> Self:
        """Return an item of a request."""
        return cls(request_id, index, feature.identifier, feature.modality, num_embeds(feature))


@dataclass(slots=True)
class Replay:
    """The second run of the items of a batch, each alone."""

    is_on: bool = True
    """False if it was found wrong: then all items of a batch that does not fit are rejected."""

    _is_forced: bool = False
    _was_done: bool = False

    def force(self) -> None:
        """Run the items of the next batch again in any case."""
        self._is_forced, self._was_done = True, False

    def take(self) -> bool:
        """Return whether those of this batch are to run again in any case."""
        if not (self._is_forced and self.is_on):
            return False
        self._is_forced, self._was_done = False, True
        return True

    def was_done(self) -> bool:
        """Return whether they have; no batch runs again for that any more."""
        self._is_forced = False
        return self._was_done

    def concerns(self, batch: Sequence[Any], is_forced: bool) -> bool:
        """Return whether the items of a batch that was not kept run again."""
        return self.is_on and (is_forced or len(batch) > 1)


class EncoderGuard(Protocol):
    """A guard that compares the sizes of the encoder's outputs, and rejects what does not fit."""

    replay: Replay

    def tell(self, output: Any) -> Any:
        """Return what a step gave, with what was rejected in it if that is already its output."""


def create_guard(worker: Any, *, outlives_errors: bool) -> EncoderGuard | None:
    """Create the guard of a worker process whose model is loaded; None if its encoder cannot be guarded."""
    if not runs_encoder(worker):
        return None
    if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
        logger.warning(
            "--pipeline-parallel-size is more than 1: a request whose item does not fit the encoder's output is "
            "answered, and only the log says that the answer is wrong"
        )
    if worker.use_v2_model_runner:
        return SecondRunnerGuard(worker, outlives_errors=outlives_errors)
    return FirstRunnerGuard(worker, outlives_errors=outlives_errors)


class _Findings:
    """Rejections that were not reported yet, and the width of the encoder's outputs."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._like: dict[str, torch.Tensor] = {}
        """No rows, as wide as the encoder's outputs are, by modality."""

        self._rejections: list[Rejection] = []
        self._finite = FiniteOutputs()
        self._not_finite = 0
        """Outputs that were counted and not yet said."""

    def clear(self) -> None:
        """Forget what nobody took: with pipeline parallelism, of all stages but the last."""
        self._rejections.clear()

    def learn(self, inputs: Sequence[_Input], outputs: Sequence[torch.Tensor]) -> None:
        """Take note of outputs that fit."""
        for one, output in zip(inputs, outputs, strict=True):
            if one.modality not in self._like:
                self._like[one.modality] = output[:0].clone()
        self._finite.ask([one.identifier for one in inputs], outputs)

    def reject(self, one: _Input, output: torch.Tensor | None) -> torch.Tensor:
        """Reject an item that the encoder, alone with it, made this or nothing of. Returns an output that fits."""
        rejection = Rejection(one.identifier, one.modality, one.embeds, None if output is None else len(output))
        logger.warning("%s (%s): its request has to end", rejection, one.identifier)
        self._rejections.append(rejection)
        return _fitted(self._sample(one.modality) if output is None else output, one.embeds)

    def tell(self, output: Any) -> Any:
        """Return what a step gave, with what was rejected in it if that is already its output."""
        self._not_finite += self._finite.take()
        if not (self._rejections or self._not_finite):
            return output
        if not isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput):
            return output
        rejections, self._rejections = tuple(self._rejections), []
        not_finite, self._not_finite = self._not_finite, 0
        return with_rejections(output, rejections, not_finite)

    def _sample(self, modality: str) -> torch.Tensor:
        """Return an output without a row."""
        if modality not in self._like:
            self._like[modality] = encode_sample(self._runner, modality)[:0].clone()
        return self._like[modality]


class FirstRunnerGuard:
    """The guard for vLLM's first model runner."""

    def __init__(self, worker: Any, *, outlives_errors: bool) -> None:
        self._worker = worker
        self._runner = runner = worker.model_runner
        self._outlives_errors = outlives_errors
        self._execute, runner._execute_mm_encoder = runner._execute_mm_encoder, self.execute
        self._store, runner._cache_encoder_output = runner._cache_encoder_output, self.store
        self._findings = _Findings(runner)
        self.replay = Replay()
        self._made: dict[str, tuple[Any, ...]] = {}
        """Outputs that the last run of the encoder would store, by identifier: the arguments of vLLM's own method."""

    def execute(self, scheduler_output: Any) -> list[torch.Tensor]:
        """Encode what a step has to encode. vLLM calls this."""
        self._findings.clear()
        inputs = self._scheduled(scheduler_output)
        is_forced = bool(inputs) and self.replay.take()
        if not self._encodes(scheduler_output, inputs, keeps=not is_forced):
            replays = self.replay.concerns(inputs, is_forced)
            for one in inputs:
                if not (replays and self._encodes(_only(one, scheduler_output), [one])):
                    output = self._output(one) if replays or len(inputs) == 1 else None
                    self._runner.encoder_cache[one.identifier] = self._findings.reject(one, output)
        self._made = {}
        # Only an encoder-decoder takes them from here; all its items are of one modality, so this is their order.
        return [_fitted(self._runner.encoder_cache[one.identifier], one.embeds) for one in inputs]

    def store(self, identifier: str, output: torch.Tensor, *step: Any) -> None:
        """Take what the encoder made of an item. vLLM calls this, when it has encoded the whole batch."""
        self._made[identifier] = (output, *step)

    def tell(self, output: Any) -> Any:
        """Return what a step gave, with what was rejected in it if that is already its output."""
        return self._findings.tell(output)

    def _scheduled(self, scheduler_output: Any) -> list[_Input]:
        inputs = []
        for request_id, indices in scheduler_output.scheduled_encoder_inputs.items():
            features = received_features(self._worker, request_id)
            for index in indices:
                feature = features[index]
                if feature.data is not None:  # vLLM leaves these out as well
                    inputs.append(_Input.from_feature(request_id, index, feature))
        return inputs

    def _encodes(self, scheduler_output: Any, inputs: Sequence[_Input], *, keeps: bool = True) -> bool:
        """Encode a batch, and store what was made if all of it fits; unless it `keeps` nothing."""
        self._made = {}
        try:
            self._execute(scheduler_output)
        except Exception as error:
            if not (inputs and self._outlives_errors):
                raise
            _log_failure(inputs, error)
            self._made = {}
            return False
        if not keeps or any((output := self._output(one)) is None or len(output) != one.embeds for one in inputs):
            return False
        self._findings.learn(inputs, [self._made[one.identifier][0] for one in inputs])
        for identifier, made in self._made.items():
            self._store(identifier, *made)
        return True

    def _output(self, one: _Input) -> torch.Tensor | None:
        """Return what the last run of the encoder made of an item; None if it made nothing of it."""
        made = self._made.get(one.identifier)
        return None if made is None else made[0]


class SecondRunnerGuard:
    """The guard for vLLM's second model runner, which asks what to encode and then has it encoded."""

    def __init__(self, worker: Any, *, outlives_errors: bool) -> None:
        self._worker = worker
        self._outlives_errors = outlives_errors
        runner = encoder_runner(worker)
        self._prepare, runner.prepare_mm_inputs = runner.prepare_mm_inputs, self.prepare
        self._execute, runner.execute_mm_encoder = runner.execute_mm_encoder, self.execute
        self._findings = _Findings(worker.model_runner)
        self.replay = Replay()
        self._inputs: list[_Input] = []
        """The batch that is encoded next."""

    def prepare(self, scheduled: Mapping[str, Sequence[int]]) -> tuple[list[str], list[Any]]:
        """Return which items of a step to encode. vLLM calls this."""
        self._findings.clear()
        self._inputs = []
        identifiers, items = [], []
        for request_id, indices in scheduled.items():
            features = received_features(self._worker, request_id)
            for index in indices:
                found, item = self._prepare({request_id: [index]})  # none, if the output is there already
                if found:
                    self._inputs.append(_Input.from_feature(request_id, index, features[index]))
                    identifiers += found
                    items += item
        return identifiers, items

    def execute(self, items: Sequence[Any]) -> list[torch.Tensor]:
        """Encode items. vLLM calls this, with those of the step, or with some of its own at the start."""
        inputs, self._inputs = self._inputs, []
        if len(inputs) != len(items):
            return list(self._execute(items))
        outputs = self._encoded(items, inputs)
        is_forced = bool(inputs) and self.replay.take()
        if is_forced or outputs is None or any(map(_misfits, inputs, outputs)):
            batch, outputs = outputs if len(inputs) == 1 else None, []
            replays = self.replay.concerns(inputs, is_forced)
            for one, item in zip(inputs, items, strict=True):
                outputs.append(self._alone(one, self._encoded([item], [one]) if replays else batch))
        return outputs

    def tell(self, output: Any) -> Any:
        """Return what a step gave, with what was rejected in it if that is already its output."""
        return self._findings.tell(output)

    def _encoded(self, items: Sequence[Any], inputs: Sequence[_Input]) -> list[torch.Tensor] | None:
        try:
            outputs: list[torch.Tensor] = self._execute(items)
        except Exception as error:
            if not self._outlives_errors:
                raise
            _log_failure(inputs, error)
            return None
        if len(outputs) == len(inputs) and not any(map(_misfits, inputs, outputs)):
            self._findings.learn(inputs, outputs)
        return outputs

    def _alone(self, one: _Input, outputs: list[torch.Tensor] | None) -> torch.Tensor:
        """Return what an item gets of which this was made when it was encoded alone."""
        output = None if outputs is None else outputs[0]
        return self._findings.reject(one, output) if output is None or _misfits(one, output) else output


def _misfits(one: _Input, output: torch.Tensor) -> bool:
    return len(output) != one.embeds


def _log_failure(inputs: Sequence[_Input], error: Exception) -> None:
    logger.warning("the encoder failed on a batch of %d items: %r", len(inputs), error)
    logger.debug("where it failed", exc_info=error)


def _only(one: _Input, scheduler_output: Any) -> Any:
    """Return a step that encodes one item of another step."""
    step = copy(scheduler_output)
    step.scheduled_encoder_inputs = {one.request_id: [one.index]}
    return step


def _fitted(output: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an output with so many rows: cut, or with zeros at its end."""
    missing = rows - len(output)
    if missing <= 0:
        return output if missing == 0 else output[:rows].clone()
    return torch.cat([output, output.new_zeros((missing, *output.shape[1:]))])
