"""The state of a frontend: the model that it serves, or the reason why it serves none."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn, Protocol, Self
from weakref import WeakValueDictionary

from msgspec import UNSET

from semel.cells.check import CELL_HEADER, CONTRACT_HEADER
from semel.core import Adapter, Contract, Modality, PoolingModel, PoolingTask
from semel.core.flag import MIB
from semel.errors import InvalidRequest, ModelNotFound, NotReady, PromptTooLong, excerpt
from semel.fleet.compatibility import contract_id
from semel.fleet.fleet import Fleet
from semel.frontend.api.anthropic.request import MESSAGES_REFUSED, MessagesRequest
from semel.frontend.api.openai.audio_request import SPEECH_REFUSED, TranscriptionRequest, TranslationRequest
from semel.frontend.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from semel.frontend.api.pooling.cohere_embed import CohereEmbedRequest
from semel.frontend.api.pooling.requests import PoolingRequest
from semel.frontend.api.pooling.score_requests import SCORING_REFUSED, RerankRequest, ScoreRequest
from semel.frontend.api.responses.request import RESPONSES_REFUSED, ResponsesRequest
from semel.frontend.api.shared.fields import REFUSED
from semel.frontend.api.shared.unknown_fields import UnknownFields, UnknownFieldsMode
from semel.frontend.api.tokens.generate_request import GenerateRequest
from semel.frontend.budget import Budget
from semel.frontend.http.body import BodyLimits
from semel.frontend.http.ignored_fields import IgnoredFields
from semel.frontend.middleware.concurrency import RequestLimiter
from semel.frontend.middleware.refusal_rate import RefusalLimits, RefusalThrottle
from semel.render import Pipeline, check_chars
from semel.store.records import SealedRecords
from semel.store.store import MediaStore

__all__ = ["SCORING_ROUTES", "FrontendState", "ServedModel"]

_REQUESTS: Final = (
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, GenerateRequest),
    *(TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest),
    *(PoolingRequest, ScoreRequest, RerankRequest, CohereEmbedRequest),
)
_API_FIELDS: Final = frozenset(GenerateRequest.unsupported).union(
    *(kind.model_fields for kind in _REQUESTS),
    *(kind.form_fields() for kind in (TranscriptionRequest, TranslationRequest)),
    *(REFUSED, RESPONSES_REFUSED, MESSAGES_REFUSED, SPEECH_REFUSED, SCORING_REFUSED),
)
"""The top-level fields of all APIs: served, without effect, or refused by name."""

_POOLING_ROUTES: Final[Mapping[PoolingTask, tuple[str, ...]]] = {
    "embed": ("/v1/embeddings", "/v2/embed"),
    "classify": ("/classify",),
}
SCORING_ROUTES: Final = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")

_NOUNS: Final[Mapping[Modality, str]] = {"audio": "audio", "image": "images", "video": "videos"}


class _OfModality(Protocol):
    @property
    def modality(self) -> Modality: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The workers, and the pipeline that renders for them."""

    fleet: Fleet
    contract: Contract
    pipeline: Pipeline

    adapter: str | None = None
    """The adapter that a request names."""

    @property
    def model(self) -> str:
        """The name that clients know the model by, or the adapter that they named."""
        return self.adapter or self.contract.model

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may call the model by; the first is the one in responses."""
        return self.contract.model, *self.contract.aliases

    def named(self, name: str | None, usable: Callable[[], Collection[str]]) -> Self:
        """Return this for the model or adapter that a request names, or refuse the request if it is not served.

        `usable` gives the names of the adapters that its tenant may use.
        """
        if name is None or name == self.contract.model or name in self.contract.aliases:
            return self
        if name in (adapters := usable()):
            return replace(self, adapter=name)
        served = ", ".join(map(repr, (*self.names, *adapters)))
        verb = " is" if served == repr(self.contract.model) else " are"
        raise ModelNotFound.of("model", f"{excerpt(repr(excerpt(name)))} is not served here; {excerpt(served)}{verb}")

    def check_length(self, tokens: int) -> None:
        """Refuse a prompt that is empty, or so long that it would hold up the link for all others."""
        if not tokens:
            raise InvalidRequest("the prompt is empty: send a text that has tokens")
        if tokens >= (limit := self.contract.max_tokens) and tokens > self.contract.max_prompt_tokens:
            answer = " with the answer" if self.contract.pooling is UNSET else ""
            raise PromptTooLong(f"the prompt has {tokens:,} tokens; {self.model} takes {limit:,}{answer}")

    def refuse_to_generate(self, pooling: PoolingModel) -> NoReturn:
        """Refuse a request for tokens of a model that pools."""
        raise InvalidRequest(
            f"{self.model} generates no text: it is served for pooling (--runner pooling). Use "
            f"{' or '.join(_routes_of(pooling))}"
        )

    def pooling(self, route: str) -> PoolingModel:
        """Return what the model pools, or refuse a request to a route that it cannot serve."""
        if (pooling := self.contract.pooling) is UNSET:
            raise InvalidRequest(
                f"{self.model} generates text and pools nothing: use /v1/chat/completions or /v1/completions here, or "
                "serve a model with --runner pooling for this route"
            )
        if route not in (routes := _routes_of(pooling)):
            raise InvalidRequest(
                f"{self.model} is served for {pooling.task} (--pooler-config.task), which {route} cannot use: use "
                f"{' or '.join(routes)}"
            )
        return pooling

    @property
    def max_chars(self) -> int:
        """The most characters that a prompt can have."""
        return self.contract.max_tokens * self.pipeline.tokenizer.longest

    def check_text(self, prompt: str | Sequence[int]) -> None:
        """Refuse a text that is longer than any prompt can be, before tokens are made of it."""
        if isinstance(prompt, str):
            check_chars(len(prompt), self.max_chars)

    def check_items(self, items: Sequence[_OfModality], places: Sequence[str] = ()) -> None:
        """Refuse more items of a modality than a prompt may have, before one of them is fetched or processed.

        `places` are the parts of the request that name them, for the error.
        """
        for modality, count in Counter(item.modality for item in items).items():
            if count > (limit := self.contract.max_items.get(modality, 0)):
                error = InvalidRequest(self._too_many(modality, count, limit))
                if not places:
                    raise error
                of_modality = [place for item, place in zip(items, places, strict=True) if item.modality == modality]
                raise error.at(of_modality[limit])

    def _too_many(self, modality: Modality, count: int, limit: int) -> str:
        if modality in self.contract.max_items:
            return (
                f"the prompt has {count:,} {_NOUNS[modality]}; {self.model} takes {limit:,}: send fewer, or raise it "
                "with the worker's --limit-mm-per-prompt"
            )
        others = [_NOUNS[one] for one, most in self.contract.max_items.items() if most]
        return f"{self.model} takes no {_NOUNS[modality]}: send {' and '.join(['text', *others])}"


def _routes_of(pooling: PoolingModel) -> tuple[str, ...]:
    """Return the routes that a model which pools can serve."""
    scoring = SCORING_ROUTES if pooling.scores else ()
    return *_POOLING_ROUTES.get(pooling.task, ()), *scoring, "/pooling"


@dataclass(slots=True)
class FrontendState:
    """The state behind the routes: ready with something to serve, or not and the reason."""

    body: BodyLimits = field(default_factory=BodyLimits)
    budget: Budget = field(default_factory=Budget)
    refusals: RefusalLimits = field(default_factory=RefusalLimits)
    limiter: RequestLimiter = field(default_factory=RequestLimiter)

    unknown_fields_mode: UnknownFieldsMode = "warn"
    """The treatment of top-level fields of a request that its API does not have."""

    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)

    priority_tenants: frozenset[str] = frozenset()
    """The tenants whose requests may set a priority, where there are API keys."""

    adapter_tenants: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The tenants that may use an adapter, by its name; one that is not here is for all."""

    metrics_per_tenant: bool = False
    """True if metrics of single tenants are exported."""

    cell: str | None = None
    """The cell that this frontend belongs to, if there are several."""

    media_store: MediaStore | None = None
    """The store of files; without one there are none."""

    response_records: SealedRecords | None = None
    """The responses that clients may continue, if they are stored."""

    stored_responses: Counter[str] = field(default_factory=Counter)
    """The number of responses that were to be stored, by what became of them."""

    max_file_bytes: int = 64 * MIB
    """The most bytes of one file that is uploaded; over it the answer is 413."""

    max_tensor_bytes: int = 1024**3
    """The most bytes of tensors in one answer to an inspection; over it the answer is 413."""

    pooling_turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By tenant: of the prompts of its requests with several, one begins in a turn of the event loop."""

    started: int = field(default_factory=lambda: int(time.time()))
    _serving: ServedModel | None = None
    _reason: str = "the frontend is starting"
    _leaving: str = ""
    _pool_reason: Callable[[], str] = str  # an empty one
    _throttles: dict[str, RefusalThrottle] = field(default_factory=dict)

    def begin(self, serving: ServedModel) -> None:
        """Serve from now on."""
        self._serving, self._reason = serving, ""

    def suspend(self, reason: str) -> None:
        """Refuse new requests, with the reason."""
        self._serving, self._reason = None, reason

    def watch_pool(self, reason: Callable[[], str]) -> None:
        """Let a pool say why it takes no item: a frontend that can make no feature is not ready, though it may chat."""
        self._pool_reason = reason

    @property
    def reason(self) -> str:
        """Why nothing can be served, or nothing with media; empty when it can."""
        return self.limiter.closed or self._leaving or self._reason or self._pool_reason()

    @property
    def identity(self) -> dict[str, str]:
        """The cell and the contract of this frontend, as headers of `/ready`."""
        serving = self._serving
        cell = {} if self.cell is None else {CELL_HEADER: self.cell}
        return cell if serving is None else cell | {CONTRACT_HEADER: contract_id(serving.contract)}

    def leave(self, reason: str) -> None:
        """Count as not ready, for good; requests are taken until it drains."""
        self._leaving = reason

    def drain(self, reason: str) -> None:
        """Take no more requests, for good; those that were taken are answered, also if no worker is left meanwhile."""
        self.limiter.close(reason)

    def adapters(self, tenant: str) -> dict[str, Adapter]:
        """Return the adapters that a tenant may use: for it there are no others."""
        loaded, closed = self.serving().fleet.adapters, self.adapter_tenants
        return {name: one for name, one in loaded.items() if name not in closed or tenant in closed[name]}

    def check_priority(self, priority: int, tenant: str) -> None:
        """Refuse a priority of a tenant that may not set one: it would go before all others. Without keys all may."""
        if priority and tenant and tenant not in self.priority_tenants:
            raise InvalidRequest.of(
                "priority", "this API key's tenant may not set it; leave it out, or name it with --priority-tenant"
            )

    def unknown_fields(self) -> UnknownFields:
        """Return a counter and judge of the unknown fields of one request."""
        return UnknownFields(self.unknown_fields_mode, _API_FIELDS)

    def refusal_wait_s(self, tenant: str) -> float:
        """Return how long the next refusal of a tenant has to wait; the operator has named all tenants."""
        if (throttle := self._throttles.get(tenant)) is None:
            throttle = self._throttles[tenant] = RefusalThrottle(self.refusals)
        return throttle.wait_s()

    def serving(self) -> ServedModel:
        """Return the served model, or raise `NotReady`."""
        if self._serving is None:
            raise NotReady(f"{self._reason}; try again in a moment")
        return self._serving
