"""Requests with a rendered prompt: vLLM's `GenerateRequest`, in the form that semel's own render routes return.

Such a request is a completion of tokens with items at some positions. Its sampling parameters are in a dict of their
own; they are parsed and bounded as those of a completion (`requests`). Features are named by digest, or their tensors
are sent: in vLLM's form, as base64 inside the JSON, or in the file that contains the JSON. This module does not read
the tensors; `semel.frontend.items.client_features` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from semel.core import Feature, Modality, Tenant
from semel.errors import InvalidRequest
from semel.frontend.api.openai.requests import CompletionRequest, StreamOptions
from semel.frontend.api.shared.faults import fault_of, split_field
from semel.frontend.api.shared.fields import tell_nulls, tell_refused, without_refused
from semel.interchange.safetensors import DIGEST

__all__ = ["Features", "GenerateRequest", "Place", "RequestItem"]

_NO_SAMPLING: Final = frozenset(
    {
        *("add_special_tokens", "cache_salt", "echo", "model", "priority", "prompt", "request_id", "response_format"),
        *("return_token_ids", "return_tokens_as_token_ids", "stream", "stream_options"),
    }
)
"""Fields of a completion that are not sampling parameters."""

_OWN: Final = {"request_id", "model", "return_token_ids", "stream", "stream_options", "cache_salt", "priority"}
"""Fields of a completion that this request has too, with the same bounds."""

_IGNORED: Final = frozenset({"output_kind", "skip_clone", "skip_reading_prefix_cache"})
"""Settings of vLLM's own engine that its render route adds to the sampling parameters. They do not affect the answer.
"""

_INSTEAD: Final[Mapping[str, str]] = {
    "content_parts": "send media in a chat",
    "reasoning_ended": "it is told for chats alone; send the chat",
    "reasoning_parser_kwargs": "it is told for chats alone; send the chat",
    "token_offsets": "offsets are not looked at; leave them out",
}
"""Supported as null only: what to do instead."""

_Position = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Name = Annotated[str, Field(max_length=256)]
_Mark = Annotated[str, Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _say_what_is_not_supported(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        for name, instead in _INSTEAD.items():
            if body.get(name) is not None:
                raise InvalidRequest.of(name, f"not supported: {instead}")
        kept = {name: value for name, value in body.items() if name not in _INSTEAD}
        return without_refused(
            kept, frozenset(cls.model_fields), unknown=info.context if issubclass(cls, GenerateRequest) else None
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler(core)
        schema = handler.resolve_ref_schema(json_schema)
        for name, instead in _INSTEAD.items():
            schema["properties"][name] = {"type": "null", "description": f"Not supported: {instead}."}
        tell_nulls(schema)
        return json_schema


class Place(_Strict):
    """Where an item sits in a prompt."""

    offset: _Position
    length: Annotated[int, Field(ge=1, le=2**31 - 1)]
    is_embed: Annotated[list[bool], Field(fail_fast=True)] | None = None
    """Optional: vLLM's own types drop it. If present, it is checked; the mask of the worker's feature is the one in
    use.
    """


class Features(_Strict):
    """The items of a prompt by modality, in lists of the same length."""

    mm_hashes: dict[Modality, Annotated[list[_Name], Field(fail_fast=True)]]
    """Digests. If the tensors of an item are sent, its entry may be any name and is ignored."""

    mm_placeholders: dict[Modality, Annotated[list[Place], Field(fail_fast=True)]]
    mm_tags: dict[Modality, Annotated[list[_Mark], Field(fail_fast=True)]] = Field(default_factory=dict)
    """The tags that prove to which tenant the digests belong. A digest without a tag belongs to no tenant."""

    mm_seals: dict[Modality, Annotated[list[_Mark], Field(fail_fast=True)]] = Field(default_factory=dict)
    """The seals that prove that the fleet made the tensors. Without a seal, the bytes of the tensors are their
    identity.
    """

    kwargs_data: dict[Modality, Annotated[list[str | None], Field(fail_fast=True)]] = Field(default_factory=dict)
    """The tensors of items, in vLLM's encoding."""

    mm_metadata: dict[Modality, Annotated[list[str | None], Field(fail_fast=True)]] = Field(default_factory=dict)
    """A copy of some of these tensors, which vLLM's render route returns apart."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = {kind: len(hashes) for kind, hashes in self.mm_hashes.items()}
        for name in ("mm_placeholders", "mm_tags", "mm_seals", "kwargs_data", "mm_metadata"):
            sampling = {kind: len(listed) for kind, listed in getattr(self, name).items()}
            if name == "mm_metadata":  # vLLM omits modalities without metadata
                sampling = {**counts, **sampling}
            if sampling != counts and (sampling or name == "mm_placeholders"):
                raise InvalidRequest.of(f"features.{name}", "it needs one entry for each of mm_hashes, by modality")
        return self


@dataclass(frozen=True, slots=True)
class RequestItem:
    """An item of a request: its position, and either its name and tag or its tensors."""

    modality: Modality
    name: str
    place: Place
    tag: str = ""
    seal: str = ""
    packed: tuple[str, ...] = ()
    feature: Feature | None = None

    @property
    def is_sent(self) -> bool:
        """Return whether the request has its tensors."""
        return bool(self.packed) or self.feature is not None


class GenerateRequest(_Strict):
    """Tokens and the items among them, and how to go on."""

    unsupported: ClassVar[Mapping[str, str]] = _INSTEAD
    """The fields that must be null."""

    token_ids: Annotated[list[_Position], Field(fail_fast=True, min_length=1)]
    sampling_params: dict[str, Any]
    features: Features | None = None
    request_id: str | None = None
    model: str | None = None
    return_token_ids: bool = False
    output_mode: Literal["tokens"] = "tokens"
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    _tensors: Mapping[str, Feature] = PrivateAttr(default_factory=dict)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = super().__get_pydantic_json_schema__(core, handler)
        schema = handler.resolve_ref_schema(json_schema)
        completion = handler.resolve_ref_schema(handler(CompletionRequest.__pydantic_core_schema__))
        fields = deepcopy(completion["properties"])
        schema["properties"] |= {name: fields[name] for name in _OWN}
        sampling = {"type": "object", "properties": fields, "additionalProperties": {"type": "null"}}
        tell_refused(sampling)
        for name in _NO_SAMPLING:
            del fields[name]
        schema["properties"]["sampling_params"] = sampling
        tell_refused(schema)
        schema["additionalProperties"] = True  # with a warning, unless the operator refuses them
        return json_schema

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.completion()
        return self

    @property
    def is_packed(self) -> bool:
        """True if its JSON has tensors."""
        return self.features is not None and bool(self.features.kwargs_data)

    def completion(self) -> CompletionRequest:
        """The request as a completion without items: all parameters of generation, with the same bounds."""
        sampling = {
            name: value for name, value in self.sampling_params.items() if value is not None and name not in _IGNORED
        }
        if wrong := sorted(sampling.keys() & _NO_SAMPLING):
            raise InvalidRequest.of(f"sampling_params.{wrong[0]}", "it is no sampling parameter; leave it out")
        if sampling.get("logprob_token_ids"):
            sampling.setdefault("logprobs", 0)  # a completion needs both fields, a rendered prompt one
        try:
            return CompletionRequest.model_validate({**self.model_dump(include=_OWN), **sampling, "prompt": [0]})
        except (InvalidRequest, ValidationError) as error:
            fault = error if isinstance(error, InvalidRequest) else fault_of(error)
            if split_field(fault.param or "")[0] not in _OWN:
                fault = InvalidRequest(f"sampling_params.{fault}", param=f"sampling_params.{fault.param}")
            raise fault from None

    def sampling(self) -> Mapping[str, object]:
        """The engine's sampling parameters. Without `max_tokens` the answer may fill the context, as in vLLM."""
        sampling = dict(self.completion().sampling())
        if self.sampling_params.get("max_tokens") is None:
            del sampling["max_tokens"]
        return sampling

    def tenant(self, name: str = "") -> Tenant:
        """The tenant of the items and prefixes; `name` is the one bound to the API key."""
        return Tenant(name, self.cache_salt)

    @property
    def is_file(self) -> bool:
        """True if the request came in a file with tensors."""
        return bool(self._tensors)

    def with_tensors(self, tensors: Mapping[str, Feature]) -> Self:
        """The same request with the tensors of its file, by the names of its items."""
        named = set() if self.features is None else {one for kind in self.features.mm_hashes.values() for one in kind}
        if astray := sorted(tensors.keys() - named):
            raise InvalidRequest.of("features.mm_hashes", f"the file has {astray[0]}, which the prompt does not show")
        copy = self.model_copy()
        copy._tensors = tensors
        return copy

    def without_features(self) -> Self:
        """The same request without its items: they may be large, and the caller has extracted them already."""
        copy = self.model_copy(update={"features": None})
        copy._tensors = {}
        return copy

    def items(self) -> list[RequestItem]:
        """The items in the order of the prompt."""
        if (features := self.features) is None:
            return []
        found = []
        for kind, names in features.mm_hashes.items():
            columns = (features.mm_tags, features.mm_seals, features.kwargs_data, features.mm_metadata)
            marks = (column.get(kind) or [None] * len(names) for column in columns)
            for name, place, *rest in zip(names, features.mm_placeholders[kind], *marks, strict=True):
                tag, seal, data, metadata = rest
                packed = () if data is None else (data,) if metadata is None else (data, metadata)
                one = RequestItem(kind, name, place, tag or "", seal or "", packed, self._tensors.get(name))
                if not one.is_sent:
                    _check_named(one, metadata)
                found.append(one)
        return sorted(found, key=lambda one: one.place.offset)


def _check_named(one: RequestItem, metadata: str | None) -> None:
    if metadata is not None:
        raise InvalidRequest.of("features.mm_metadata", f"{one.name!a} has metadata and no kwargs_data: send both")
    if not DIGEST.fullmatch(one.name):
        raise InvalidRequest.of(
            "features.mm_hashes",
            f"{one.name!a} is no digest of ours, which has 64 hexadecimal digits in lower case: send its tensors",
        )
