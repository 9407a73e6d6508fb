"""The base of the requests of all APIs: bounded types of fields, and the refusal of unsupported fields (S15)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from semel.core import Tenant
from semel.frontend.api.shared.fields import REFUSED, tell_refused, without_refused

__all__ = [
    "Biases",
    "Count",
    "Effort",
    "Int64",
    "OpenModel",
    "OwnedRequest",
    "RequestBody",
    "RequestName",
    "Salt",
    "StrictModel",
    "Token",
    "Tokens",
    "Top",
    "Unread",
    "Words",
]

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Top = Annotated[int, Field(ge=0, le=20)]
Salt = Annotated[str, Field(max_length=1_024)]
Words = Annotated[str, Field(max_length=1_024)]
RequestName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Unread = Annotated[Any, Field(description="Accepted and not looked at.")]
Biases = Annotated[
    dict[Int64, float], Field(max_length=1_024, json_schema_extra={"propertyNames": {"pattern": "^-?[0-9]{1,18}$"}})
]
"""The keys are strings, because JSON has no others."""


class StrictModel(BaseModel):
    """A part of a request in which unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OpenModel(BaseModel):
    """A part of a request as clients' libraries write it: unknown fields are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class RequestBody(StrictModel):
    """The body of a request."""

    refused: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = REFUSED
    """The fields that are refused by name, as in `REFUSED`."""

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _say_what_is_not_supported(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        return without_refused(body, _field_names(cls), cls.refused, info.context)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        tell_refused(inner := handler.resolve_ref_schema(schema), cls.refused)
        inner["additionalProperties"] = True  # with a warning, unless the operator refuses them
        return schema


@cache  # there are as many as kinds of requests
def _field_names(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(kind.model_fields)


class OwnedRequest(RequestBody):
    """A request whose items and prefixes belong to a tenant."""

    cache_salt: Salt | None = None

    def tenant(self, name: str = "") -> Tenant:
        """The tenant of the items and prefixes; `name` is the one bound to the API key."""
        return Tenant(name, self.cache_salt)
