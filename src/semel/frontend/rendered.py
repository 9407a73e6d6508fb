"""What a client may send that was rendered before: vLLM's `GenerateRequest`, as our own routes for rendering answer it.

It is a completion of tokens, with items in some places, and its sampling parameters in a dict of their own: they are
read and bounded as those of a completion are (`requests`). Features come by digest alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from semel.core import Digest, Item, Modality, Tenant
from semel.errors import InvalidRequest
from semel.frontend.fields import without_refused
from semel.frontend.requests import CompletionRequest, StreamOptions

__all__ = ["Features", "GenerateRequest", "Place", "Shown"]

_NO_SAMPLING: Final = frozenset(
    {
        *("add_special_tokens", "cache_salt", "echo", "model", "priority", "prompt", "request_id", "response_format"),
        *("return_token_ids", "return_tokens_as_token_ids", "stream", "stream_options"),
    }
)
"""Fields of a completion that are no sampling parameters."""

_INSTEAD: Final[Mapping[str, str]] = {
    "content_parts": "send media in a chat",
    "kwargs_data": "tensors do not travel in JSON; inject them, or send the chat",
    "mm_metadata": "features are named by digest alone",
    "reasoning_ended": "it is told for chats alone; send the chat",
    "reasoning_parser_kwargs": "it is told for chats alone; send the chat",
    "token_offsets": "offsets are not looked at; leave them out",
}
"""Not supported but as null: what to do instead."""

_Position = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _say_what_is_not_supported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, instead in _INSTEAD.items():
            if body.get(name) is not None:
                raise InvalidRequest(f"{name}: not supported: {instead}")
        kept = {name: value for name, value in body.items() if name not in _INSTEAD}
        return without_refused(kept, frozenset(cls.model_fields))


class Place(_Strict):
    """Where an item sits in a prompt."""

    offset: _Position
    length: Annotated[int, Field(ge=1, le=2**31 - 1)]
    is_embed: Annotated[list[bool], Field(fail_fast=True)] | None = None
    """vLLM's own types drop it. It is checked if it is there; what counts is what the worker holds."""


class Features(_Strict):
    """The items of a prompt by modality, in three lists of the same length."""

    mm_hashes: dict[Modality, Annotated[list[_Hash], Field(fail_fast=True)]]
    mm_placeholders: dict[Modality, Annotated[list[Place], Field(fail_fast=True)]]
    mm_tags: dict[Modality, Annotated[list[Annotated[str, Field(max_length=64)]], Field(fail_fast=True)]] = Field(
        default_factory=dict
    )
    """What says whose they are. Without it they are nobody's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("mm_placeholders", "mm_tags"):
            given = {kind: len(listed) for kind, listed in getattr(self, name).items()}
            if given != {kind: len(hashes) for kind, hashes in self.mm_hashes.items()} and (given or name != "mm_tags"):
                raise InvalidRequest(f"features.{name}: it needs one entry for each of mm_hashes, by modality")
        return self


@dataclass(frozen=True, slots=True)
class Shown:
    """An item that a request names: what it is said to be, where it sits, and whose it is said to be."""

    item: Item
    place: Place
    tag: str


class GenerateRequest(_Strict):
    """Tokens and the items among them, and how to go on."""

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.completion()
        return self

    def completion(self) -> CompletionRequest:
        """The same without items: what tells how to go on, within the bounds of a completion."""
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        if wrong := sorted(given.keys() & _NO_SAMPLING):
            raise InvalidRequest(f"sampling_params.{wrong[0]}: it is no sampling parameter; leave it out")
        if given.get("logprob_token_ids"):
            given.setdefault("logprobs", 0)  # a completion asks for both; rendered, one stands for the other
        own = {"request_id", "model", "return_token_ids", "stream", "stream_options", "cache_salt", "priority"}
        try:
            return CompletionRequest.model_validate({**self.model_dump(include=own), **given, "prompt": [0]})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"{where if where in own else f'sampling_params.{where}'}: {first['msg']}") from None

    def sampling(self) -> Mapping[str, object]:
        """What the engine needs to know; without a longest answer it is what the context has room for, as in vLLM."""
        asked = dict(self.completion().sampling())
        if self.sampling_params.get("max_tokens") is None:
            del asked["max_tokens"]
        return asked

    def tenant(self, name: str = "") -> Tenant:
        """Whose the items and prefixes are; the name is that of the API key."""
        return Tenant(name, self.cache_salt)

    def shown(self) -> list[Shown]:
        """The items in the order of the prompt."""
        if self.features is None:
            return []
        found = []
        for kind, hashes in self.features.mm_hashes.items():
            tags = self.features.mm_tags.get(kind) or [""] * len(hashes)
            for one, place, tag in zip(hashes, self.features.mm_placeholders[kind], tags, strict=True):
                found.append(Shown(Item(kind, Digest(bytes.fromhex(one))), place, tag))
        return sorted(found, key=lambda one: one.place.offset)
