"""A guard around the encoder in vLLM's worker processes: an item that does not fit ends its request, not the engine.

vLLM takes what the encoder makes of an item for what the prompt has room for. Too few embeddings end the engine for
everybody; too many are cut, and the answer is about something else. An encoder that raises ends the engine as well.

Here the embeddings are counted where they are stored, an integer compare per item. An output that does not fit is
padded with zeros or cut, so that the step goes on, and the step's output says so (`rejection`). It is never saved by an
encoder-output connector. It stays where it is until the scheduler has the worker processes drop it: steps that are on
their way may count on it, and their requests are ended too.

Where an encoder raises on several items, each of them runs again alone, so that only those are rejected on which it
raises. That is done on a CPU only. A GPU reports its faults late and cannot go on after most of them.
"""

from __future__ import annotations

import logging
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

    def rejection(self, rows: int | None) -> Rejection:
        """What is said of it if the encoder made so many embeddings of it."""
        return Rejection(self.identifier, self.modality, self.embeds, rows)


class EncoderGuard:
    """Runs the encoder of vLLM's first model runner, and counts what it makes."""

    def __init__(self, worker: Any, *, outlives_errors: bool) -> None:
        self._worker = worker
        self._runner = runner = worker.model_runner
        self._outlives_errors = outlives_errors
        self._execute, runner._execute_mm_encoder = runner._execute_mm_encoder, self.execute
        self._store, runner._cache_encoder_output = runner._cache_encoder_output, self.store
        self._inputs: dict[str, _Input] = {}
        """What is being encoded, by identifier."""

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
        self._inputs = {one.identifier: one for one in inputs}
        try:
            self._execute(scheduler_output)
        except Exception as error:
            if not (inputs and self._outlives_errors):
                raise
            logger.warning("the encoder failed on a batch of %d items: %r", len(inputs), error)
            logger.debug("where it failed", exc_info=True)
            for one in inputs:
                if len(inputs) == 1 or not self._encodes_alone(one, scheduler_output):
                    self._reject(one, None)
                    self._runner.encoder_cache[one.identifier] = self._blank(one)
        finally:
            self._inputs = {}
        # Only an encoder-decoder, all of whose items are of one modality, takes them from here.
        return [_fitted(self._runner.encoder_cache[one.identifier], one.embeds) for one in inputs]

    def store(self, identifier: str, output: torch.Tensor, *step: Any) -> None:
        """Store what the encoder made of an item. vLLM calls this."""
        one = self._inputs.get(identifier)
        if one is None or len(output) == one.embeds:
            if one is not None and one.modality not in self._like:
                self._like[one.modality] = output[:0].clone()
            self._store(identifier, output, *step)
            return
        self._reject(one, len(output))
        self._runner.encoder_cache[identifier] = _fitted(output, one.embeds)

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

    def _encodes_alone(self, one: _Input, scheduler_output: Any) -> bool:
        """Encode an item whose batch has failed, if that does not fail as well."""
        step = copy(scheduler_output)
        step.scheduled_encoder_inputs = {one.request_id: [one.index]}
        try:
            self._execute(step)
        except Exception:
            logger.debug("it failed on %s", one.identifier, exc_info=True)
            return False
        return True

    def _blank(self, one: _Input) -> torch.Tensor:
        if (like := self._like.get(one.modality)) is None:
            like = self._like[one.modality] = encode_sample(self._runner, one.modality)[:0].clone()
        return like.new_zeros((one.embeds, *like.shape[1:]))

    def _reject(self, one: _Input, rows: int | None) -> None:
        rejection = one.rejection(rows)
        logger.warning("%s (%s): its request has to end", rejection, one.identifier)
        self._rejections.append(rejection)


def _fitted(output: torch.Tensor, rows: int) -> torch.Tensor:
    """An output with so many rows: cut, or with zeros at its end."""
    missing = rows - len(output)
    if missing <= 0:
        return output if missing == 0 else output[:rows].clone()
    return torch.cat([output, output.new_zeros((missing, *output.shape[1:]))])
