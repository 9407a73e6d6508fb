"""vLLM's parameters of one request: sampling parameters with what reads the answer, or pooling parameters.

Whatever takes long, such as compiling what an answer is held to, is done here, before the request has a place in the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from semel.core import Submission
from semel.core.token_limits import check_tokens_left
from semel.engine.vllm.compat.internals import takes_seeds
from semel.engine.vllm.grammars.content import client_outputs, constrained_field
from semel.engine.vllm.grammars.trial import Grammars
from semel.engine.vllm.requests.parsing import AnswerReader, Parsers
from semel.engine.vllm.requests.pooling import pooling_params
from semel.engine.vllm.requests.sampling import Defaults, refusals, refuse_extra_args, sampling_params
from semel.errors import InvalidRequest

__all__ = ["ParamsBuilder", "PreparedSubmission"]


class ParamsBuilder:
    """The builder of one engine's parameters."""

    def __init__(self, config: Any, parsers: Parsers, grammars: Grammars) -> None:
        self._parsers = parsers
        self._grammars = grammars
        self._defaults = Defaults.from_config(config.model_config)
        self._takes_seeds = takes_seeds(config)

    async def prepare(self, submission: Submission) -> Submission:
        """Compile what the answer is held to, if anything."""
        self._grammars.see(submission)
        if constrained_field(submission) is None:
            return submission
        return PreparedSubmission.from_submission(submission, *await self.build(submission))

    async def build(self, submission: Submission) -> tuple[Any, AnswerReader | None]:
        """Return vLLM's parameters, and for a chat what reads its answer; what is long is done in a thread."""
        if isinstance(submission, PreparedSubmission):
            return submission.params, submission.reader
        if submission.pools:
            return pooling_params(submission.sampling), None
        if constrained_field(submission) is None:
            return self._params(submission)
        params, reader = await asyncio.to_thread(self._params, submission)
        await self._grammars.admit(submission, params)
        return params, reader

    def _params(self, submission: Submission) -> tuple[Any, AnswerReader | None]:
        prompt_ids, reader = submission.prompt.token_ids, None
        refuse_extra_args(submission.sampling)
        self._grammars.check_sizes(submission, client_outputs(submission))
        with refusals():
            sampling: Mapping[str, Any] = self._defaults.complete(submission.sampling, len(prompt_ids))
        if submission.parsing is not None and self._parsers.concerns(submission.parsing, sampling):
            with refusals(constrained_field(submission)):
                reader = self._parsers.begin(submission.parsing, sampling, prompt_ids)
            sampling = reader.sampling
        params = sampling_params(sampling)
        if params.seed is not None and params.temperature > 0 and not self._takes_seeds:
            raise InvalidRequest(
                "seed: this engine would not outlive it; leave it out, set temperature to 0, or start the worker "
                "without --worker-cls"
            )
        self._grammars.check_sizes(submission, params.structured_outputs)
        if params.structured_outputs is not None:
            check_tokens_left(sampling, constrained_field(submission) or "structured_outputs")
        return params, reader


@dataclass(frozen=True, slots=True)
class PreparedSubmission(Submission):
    """A submission that only has to be handed to vLLM."""

    params: Any = None
    reader: AnswerReader | None = None

    @classmethod
    def from_submission(cls, submission: Submission, params: Any, reader: AnswerReader | None) -> Self:
        """Return a submission with its parameters."""
        values = {field.name: getattr(submission, field.name) for field in fields(Submission)}
        return cls(**values, params=params, reader=reader)
