"""A guard around the encoder in vLLM's worker processes: an item that does not fit ends its request, not the engine.

vLLM takes what the encoder makes of an item for what the prompt has room for. Too few embeddings end the engine for
everybody; too many are cut, and the answer is about something else. An encoder that raises ends the engine as well.

Here the embeddings are counted before they are stored, an integer compare per item. If an item of a batch does not fit,
nothing of the batch is stored, since such an item may have been encoded from its neighbours' rows: each item runs again
alone. An output that does not fit then is padded with zeros or cut, so that the step goes on, and the step's output
says so (`rejection`). No encoder-output connector saves it. It stays where it is until the scheduler has the worker
processes drop it: steps that are on their way may count on it, and their requests are ended too.

A batch on which the encoder raises is treated in the same way, but on a CPU only. A GPU reports its faults late and
cannot go on after most of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from semel.engine.vllm.compat import encode_sample, num_embeds, received_features, runs_encoder
from semel.engine.vllm.rejection import Rejection, with_rejections

__all__ = ["EncoderGuard"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Input:
    """One item that a step encodes."""

    request_id: str
    index: int
    identifier: str
    modality: str
    embeds: int


class EncoderGuard:
    """Runs the encoder of vLLM's first model runner, and counts what it makes."""

    def __init__(self, worker: Any, *, outlives_errors: bool) -> None:
        self._worker = worker
        self._runner = runner = worker.model_runner
        self._outlives_errors = outlives_errors
        self._execute, runner._execute_mm_encoder = runner._execute_mm_encoder, self.execute
        self._store, runner._cache_encoder_output = runner._cache_encoder_output, self.store
        self._made: dict[str, tuple[Any, ...]] = {}
        """What the last run of the encoder would store, by identifier: the arguments of vLLM's own method."""

        self._like: dict[str, torch.Tensor] = {}
        """No rows, as wide as the encoder's outputs are, by modality."""

        self._rejections: list[Rejection] = []

    @classmethod
    def of(cls, worker: Any, *, outlives_errors: bool) -> Self | None:
        """For a worker process whose model runner is there; None if its encoder cannot be guarded."""
        if not runs_encoder(worker):
            return None
        if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
            logger.warning(
                "--pipeline-parallel-size is more than 1: a request whose item does not fit the encoder's output is "
                "answered, and only the log says that the answer is wrong"
            )
        return cls(worker, outlives_errors=outlives_errors)

    def execute(self, scheduler_output: Any) -> list[torch.Tensor]:
        """Encode what a step has to encode. vLLM calls this."""
        self._rejections.clear()  # nobody took them, with pipeline parallelism
        inputs = self._scheduled(scheduler_output)
        if not self._encodes(scheduler_output, inputs):
            for one in inputs:
                if len(inputs) == 1 or not self._encodes(_only(one, scheduler_output), [one]):
                    self._reject(one)
        self._made = {}
        # Only an encoder-decoder takes them from here; all its items are of one modality, so this is their order.
        return [_fitted(self._runner.encoder_cache[one.identifier], one.embeds) for one in inputs]

    def store(self, identifier: str, output: torch.Tensor, *step: Any) -> None:
        """Take what the encoder made of an item. vLLM calls this, when it has encoded the whole batch."""
        self._made[identifier] = (output, *step)

    def tell(self, output: Any) -> Any:
        """What a step gave, with what was rejected in it if that is already its output."""
        if not self._rejections or not isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput):
            return output
        rejections, self._rejections = tuple(self._rejections), []
        return with_rejections(output, rejections)

    def _scheduled(self, scheduler_output: Any) -> list[_Input]:
        inputs = []
        for request_id, indices in scheduler_output.scheduled_encoder_inputs.items():
            features = received_features(self._worker, request_id)
            for index in indices:
                feature = features[index]
                if feature.data is not None:  # vLLM leaves these out as well
                    one = _Input(request_id, index, feature.identifier, feature.modality, num_embeds(feature))
                    inputs.append(one)
        return inputs

    def _encodes(self, scheduler_output: Any, inputs: Sequence[_Input]) -> bool:
        """Encode a batch, and store what was made if all of it fits."""
        self._made = {}
        try:
            self._execute(scheduler_output)
        except Exception as error:
            if not (inputs and self._outlives_errors):
                raise
            logger.warning("the encoder failed on a batch of %d items: %r", len(inputs), error)
            logger.debug("where it failed", exc_info=True)
            self._made = {}
            return False
        if any(self._rows(one) != one.embeds for one in inputs):
            return False
        for one in inputs:
            if one.modality not in self._like:
                self._like[one.modality] = self._made[one.identifier][0][:0].clone()
        for identifier, made in self._made.items():
            self._store(identifier, *made)
        return True

    def _reject(self, one: _Input) -> None:
        """Store something that fits an item on which the encoder, alone with it, has failed."""
        rejection = Rejection(one.identifier, one.modality, one.embeds, self._rows(one))
        logger.warning("%s (%s): its request has to end", rejection, one.identifier)
        self._rejections.append(rejection)
        output = self._sample(one.modality) if rejection.rows is None else self._made[one.identifier][0]
        self._runner.encoder_cache[one.identifier] = _fitted(output, one.embeds)

    def _rows(self, one: _Input) -> int | None:
        """The embeddings that the last run of the encoder made of an item; None if it made nothing of it."""
        made = self._made.get(one.identifier)
        return None if made is None else len(made[0])

    def _sample(self, modality: str) -> torch.Tensor:
        """An output without a row."""
        if modality not in self._like:
            self._like[modality] = encode_sample(self._runner, modality)[:0].clone()
        return self._like[modality]


def _only(one: _Input, scheduler_output: Any) -> Any:
    """A step that encodes one item of another step."""
    step = copy(scheduler_output)
    step.scheduled_encoder_inputs = {one.request_id: [one.index]}
    return step


def _fitted(output: torch.Tensor, rows: int) -> torch.Tensor:
    """An output with so many rows: cut, or with zeros at its end."""
    missing = rows - len(output)
    if missing <= 0:
        return output if missing == 0 else output[:rows].clone()
    return torch.cat([output, output.new_zeros((missing, *output.shape[1:]))])
