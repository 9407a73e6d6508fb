"""Sampling parameters on their way into vLLM, and its results on their way out.

Parameters come under vLLM's names. What a request leaves open is the model's default, as in vLLM's own server; the
longest answer is what the context has room for.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from traceback import walk_tb
from types import NoneType
from typing import Any, Final, Self

import msgspec

from semel.core import DEFAULT_WEIGHTS, Output, PromptLogprob
from semel.engine.vllm.compat.internals import copy_params
from semel.errors import InvalidRequest, ServiceError, excerpt

__all__ = ["Defaults", "checked", "refusals", "refuse_extra_args", "sampling_params", "to_outputs"]

_MAX_PROMPT_LOGPROBS: Final = 131_072
"""The number that fits into one message to a frontend, at 128 bytes each (S18)."""

_GRAMMARS: Final = "vllm.v1.structured_output."
"""The package in which vLLM calls the compilers of grammars."""

_NUMBERS: Final = (int, float, NoneType)
_MAX_INT: Final = 2**63 - 1
_MAX_DISTINCT: Final = 256
_ENCODER: Final = msgspec.msgpack.Encoder()
_OURS: Final = "semel."
_TYPES: Final = "the engine refuses the sampling parameters: check their types and ranges"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling parameters where a request has none."""

    parameters: Mapping[str, Any]
    """The model's, of its generation config."""

    max_context: int
    """Tokens of a prompt and its answer."""

    max_answer: int | None
    """The operator's limit for an answer."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Return those of vLLM's `ModelConfig`."""
        parameters = config.get_diff_sampling_param()
        is_own = config.generation_config not in ("auto", "vllm")
        max_answer = parameters if is_own else {"max_tokens": config.override_generation_config.get("max_new_tokens")}
        return cls(parameters, config.max_model_len, max_answer.get("max_tokens"))

    def complete(self, requested: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
        """Return the parameters of a request with all that it leaves open."""
        room, wanted = self.max_context - prompt_tokens, _number(requested, "max_tokens")
        if wanted is not None and wanted > self.max_context:
            raise InvalidRequest(
                f"max_tokens is {wanted:,}; the model takes {self.max_context:,} with the prompt: ask for fewer, or "
                "leave it out"
            )
        prompt_logprobs = _number(requested, "prompt_logprobs")
        entries = 0 if prompt_logprobs is None else prompt_tokens * (1 + prompt_logprobs)
        if entries > _MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs of {prompt_tokens:,} tokens would be {entries:,} entries; the limit is "
                f"{_MAX_PROMPT_LOGPROBS:,}: ask for fewer, or send a shorter prompt"
            )
        longest = (room, self.parameters.get("max_tokens") if wanted is None else wanted, self.max_answer)
        return {**self.parameters, **requested, "max_tokens": min(limit for limit in longest if limit is not None)}


def sampling_params(sampling: Mapping[str, Any]) -> Any:
    """Return vLLM's sampling parameters, for one request to change.

    If all of them are numbers they are made once per distinct value, which saves 60 of 70 µs. A text or a list may be
    one tenant's secret, and how long it takes would tell another that it was sent before. So would a seed, or the
    longest answer, which is the longer the shorter the prompt is: they are set on a copy of the others.
    """
    with refusals():
        if not all(isinstance(value, _NUMBERS) for value in sampling.values()):
            return _checked_params(sampling)
        shared = dict(sampling)
        max_tokens, seed = shared.pop("max_tokens", None), shared.pop("seed", None)
        lowest = max(1, shared.get("min_tokens") or 0)
        if not (_is_whole(max_tokens, lowest) and (seed is None or _is_whole(seed, 0))):
            return _checked_params(sampling)  # it is refused, or means something else
        params = copy_params(_numeric_params(_ENCODER.encode(shared)))
        params.max_tokens, params.seed = max_tokens, seed
        return params


def _is_whole(value: Any, lowest: float) -> bool:
    """Return whether a value is a whole number, this or a larger one, that the engine core's decoder takes."""
    return type(value) is int and lowest <= value <= _MAX_INT


@lru_cache(_MAX_DISTINCT)
def _numeric_params(packed: bytes) -> Any:
    return _checked_params({**msgspec.msgpack.decode(packed), "max_tokens": None})


def _checked_params(sampling: Mapping[str, Any]) -> Any:
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

    # vLLM need not copy deeply what belongs to one request; its own server says so too.
    requested = {**sampling, "output_kind": RequestOutputKind.DELTA, "skip_clone": True}
    if isinstance(requested.get("structured_outputs"), Mapping):
        requested["structured_outputs"] = _structured(requested["structured_outputs"])
    if isinstance(requested.get("repetition_detection"), Mapping):
        detection = requested["repetition_detection"]
        requested["repetition_detection"] = _made(RepetitionDetectionParams, detection)
    return checked(SamplingParams, _made(SamplingParams.from_optional, requested))


def checked(kind: Callable[..., Any], params: Any) -> Any:
    """Decode vLLM's parameters of this kind as its engine core will: a wrong type that is found only there is fatal."""
    return _decoder(kind).decode(_ENCODER.encode(params))


def refuse_extra_args(sampling: Mapping[str, Any]) -> None:
    """Refuse what would reach vLLM's connectors and plug-ins: a worker alone says from where an item comes."""
    if sampling.get("extra_args"):
        raise InvalidRequest("extra_args: arguments for plug-ins are the operator's to give; leave them out")


def _invalid(error: Exception) -> InvalidRequest:
    """vLLM's refusal of a request; the parameter that it is about, if any, is the first word."""
    text, parameter = excerpt(str(error.args[0]) if error.args else str(error)), getattr(error, "parameter", None)
    if not parameter or text.startswith(parameter):
        return InvalidRequest(text, param=parameter)
    return InvalidRequest.of(parameter, text)


@contextmanager
def refusals(field: str | None = None) -> Iterator[None]:
    """Map what vLLM refuses to the request's fault, in words that it wrote for clients, without the refused value.

    Of the schemas of a field it passes none on: they quote what was sent, or what a compiler said (threats S7). A call
    of ours that does not fit this vLLM is not the request's fault.
    """
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, msgspec.ValidationError) as error:
        if field is None and not _is_of_grammar(error):
            raise _invalid(error) from error
        logger.info("vLLM refused %s: %r", field or "a schema or grammar", error)
        named = "" if field is None else f"{field}: "
        raise InvalidRequest(f"{named}the engine refuses the schema or grammar: simplify it, or correct it") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, AttributeError | TypeError) and _caller_of(error).startswith(_OURS):
            logger.exception("semel calls vLLM in a way that it does not know")
            raise ServiceError("the worker failed on this request; its log says why") from error
        logger.info("vLLM refused a request: %r", error)
        raise InvalidRequest(_TYPES) from error


def _number(requested: Mapping[str, Any], name: str) -> int | None:
    """Return a parameter that is a whole number, if it is there."""
    value = requested.get(name)
    if value is not None and not isinstance(value, int):
        raise InvalidRequest(_TYPES)
    return value


def _made(make: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Build vLLM's parameters of fields that a client sent; an unknown or missing one is the client's fault."""
    known, required = _parameters(make)
    if not required <= fields.keys() <= known:
        logger.info(
            "vLLM does not take what a request has: %r", sorted(fields.keys() - known or required - fields.keys())
        )
        raise InvalidRequest(_TYPES)
    return make(**fields)


@cache
def _decoder(kind: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _parameters(make: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters of a function of vLLM's, and those that it cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [one for one in inspect.signature(make).parameters.values() if one.kind in kinds]
    required = frozenset(one.name for one in named if one.default is inspect.Parameter.empty)
    return frozenset(one.name for one in named), required


def _modules_of(error: BaseException) -> list[str]:
    """Return the names of the modules that it passed through, the one that raised it last."""
    return [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]


def _caller_of(error: BaseException) -> str:
    """Return the module that asked for what is not there: an attribute of a pydantic model is missed by pydantic."""
    modules = _modules_of(error)
    return next((name for name in reversed(modules) if not name.startswith("pydantic.")), modules[-1])


def _is_of_grammar(error: BaseException) -> bool:
    """Return whether it was raised where vLLM calls the compilers of grammars: its text is theirs."""
    return _modules_of(error)[-1].startswith(_GRAMMARS)


def to_outputs(result: Any, *, is_first: bool) -> list[Output]:
    """Convert vLLM's output of all sequences at one time; with that of the prompt, if it is the first."""
    outputs: list[Output] = []
    for part in result.outputs:
        more: dict[str, Any] = {}
        if is_first and not outputs:
            more = {
                "cached_tokens": result.num_cached_tokens,
                "created_cache_tokens": result.num_cache_creation_tokens,
                "prompt_logprobs": result.prompt_logprobs and tuple(map(_prompt_step, result.prompt_logprobs)),
            }
        spans = getattr(part, "weight_versions", None)  # of the last output; vLLM 0.31 has none
        if spans and (len(spans) > 1 or spans[0].version != DEFAULT_WEIGHTS):
            more["weight_versions"] = tuple((span.version, span.start, span.end) for span in spans)
        steps = part.logprobs or ()
        outputs.append(
            Output(
                part.index,
                part.text,
                tuple(part.token_ids),
                tuple({token: entry.logprob for token, entry in step.items()} for step in steps) or None,
                part.finish_reason,
                part.stop_reason,
                tuple({token: entry.decoded_token or "" for token, entry in step.items()} for step in steps) or None,
                **more,
            )
        )
    return outputs


def _prompt_step(step: Any) -> dict[int, PromptLogprob] | None:
    if step is None:
        return None
    return {token: (entry.logprob, entry.rank, entry.decoded_token) for token, entry in step.items()}


def _structured(requested: Mapping[str, Any]) -> Any:
    from vllm.entrypoints.generate.base.protocol import validate_structured_outputs_structural_tag
    from vllm.sampling_params import StructuredOutputsParams

    with refusals("structured_outputs"):
        validate_structured_outputs_structural_tag(dict(requested))
        return _made(StructuredOutputsParams, requested)
