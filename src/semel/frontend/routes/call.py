"""Serves one request with a body: admission, reading, parsing, the response, and its accounting.

The account charges all bytes of a request from the first one. It closes with the response. For a streamed answer it
closes with the first output (`execution`): by then the request's data is dropped. For a download it closes when the
last byte is sent, because it charges the bytes that are not sent yet (`semel.frontend.http.download`). Until its answer
begins, a request can be called back for the sake of another tenant (threats S21).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from semel.core import Tenant
from semel.frontend.budget import Account
from semel.frontend.http.body import CLIENT_CLOSED, parse_body, read, unless_disconnected
from semel.frontend.http.download import Download
from semel.frontend.http.sse import EventStream
from semel.frontend.limits import BodyLimits
from semel.frontend.middleware.authentication import tenant_name
from semel.frontend.service import FrontendState, ServedModel
from semel.render import ChatRequest, Intent, ParsedRequest, Pipeline, has_parts
from semel.telemetry.request_context import current_request, own_id

__all__ = ["Call", "ChatLike", "prompt_limits", "read_prompt_json", "serve_call"]

_CHAR_BYTES: Final = 200
"""Memory of one character while its text becomes tokens."""

_FEW_CHARS: Final = 8_192
_TOKEN_BYTES: Final = 16
"""The size of a token and its `is_embed` in JSON."""


class _Addressed(Protocol):
    """A request that may name a model."""

    @property
    def model(self) -> str | None: ...


class ChatLike(Protocol):
    """A request with one chat."""

    def chat(self) -> ChatRequest:
        """Return the parts of the request that determine the prompt."""
        ...

    def tenant(self, name: str = "", /) -> Tenant:
        """Return the tenant of the items and prefixes; `name` is the one bound to the API key."""
        ...


_T = TypeVar("_T", bound=_Addressed)


@dataclass(slots=True)
class Call:
    """One call of a route, without its body."""

    state: FrontendState
    serving: ServedModel
    tenant: str
    """The name bound to the API key."""

    account: Account
    request_id: str
    """semel's own id of the request. The ids of its submissions begin with it."""

    client_id: str | None = None
    """The client's id of the request, from the header `X-Request-Id`."""

    def answer_id(self, named: str | None = None) -> str:
        """The last part of the response's id: the id in the header, or `named`, the one in the body, or semel's own."""
        return self.client_id or named or self.request_id

    def admit(self, parsed: _T) -> _T:
        """Take the adapter that a request names. Refuses another model, and a priority that its tenant may not set."""
        self.use(parsed.model)
        self.state.check_priority(getattr(parsed, "priority", 0), self.tenant)
        return parsed

    def use(self, model: str | None) -> None:
        """Take the adapter that a request names, if its tenant may use it. Refuses another model."""
        self.serving = self.serving.named(model, lambda: self.state.adapters(self.tenant))

    async def read_chat(
        self,
        parsed: ChatLike,
        intent: Intent = "execute",
        *,
        pipeline: Pipeline | None = None,
        is_charged: bool = False,
    ) -> ParsedRequest:
        """Parse a chat. Charges its decoded base64 first: at most three quarters of the body's length.

        Its pipeline is that of chats unless one is named. `is_charged` tells that of a request with several chats the
        base64 of all is charged.
        """
        chat = parsed.chat()
        if not is_charged and has_parts(chat.messages):
            self.account.take(3 * self.account.charged // 4)
        return await (pipeline or self.serving.pipeline).read_chat(
            chat,
            parsed.tenant(self.tenant),
            intent=intent,
            admit=self.serving.check_items,
            spend=self.account.take,
            pin=self.account.pin,
            spend_feature=self.account.take_feature if intent == "execute" else None,
            max_chars=self.serving.max_chars,
            room=self.text_room,
        )

    def text_room(self, chars: int) -> AbstractContextManager[object]:
        """Charge the memory in which a text of so many characters becomes tokens; of a few it is little."""
        return nullcontext() if chars <= _FEW_CHARS else self.account.lend(_CHAR_BYTES * chars)


async def serve_call(
    request: Request,
    service: FrontendState,
    kind: TypeAdapter[_T],
    work: Callable[[Call, _T], Coroutine[Any, Any, Response]],
    ask: Callable[[Request, FrontendState, TypeAdapter[_T], Call], Coroutine[Any, Any, _T]] | None = None,
) -> Response:
    """Serve a request of this `kind` with `work`, until the client disconnects. `ask` reads what is not JSON."""
    context = current_request()
    client_id = None if context is None else context.client_id
    tenant = tenant_name(request.scope)
    call = Call(service, service.serving(), tenant, service.budget.open(tenant), own_id(), client_id)
    try:
        # This frame keeps no reference to the body or the parsed request, so that `work` can drop them.
        with call.account.revocable():
            response = await unless_disconnected(
                request, work(call, await (ask or _read_json)(request, service, kind, call))
            )
    except ClientDisconnect:
        call.account.close()
        return Response(status_code=CLIENT_CLOSED)
    except BaseException:
        call.account.close()
        raise
    if isinstance(response, EventStream):
        response.account = call.account
    elif not isinstance(response, Download):  # these two close the account themselves
        call.account.close()
    return response


async def read_prompt_json(request: Request, service: FrontendState, kind: TypeAdapter[_T], call: Call) -> _T:
    """Read a JSON body whose prompt may be a list of tokens."""
    return await _read_json(request, service, kind, call, prompt_limits(service, call))


async def _read_json(
    request: Request, service: FrontendState, kind: TypeAdapter[_T], call: Call, limits: BodyLimits | None = None
) -> _T:
    limits = limits or service.body
    unknown = service.unknown_fields()
    body = await read(request, limits, call.account)
    parsing = parse_body(body, kind, limits, unknown)
    del body  # the parser drops it early
    parsed = await parsing
    if unknown.count:
        service.ignored_fields.tell(request, unknown)
    return call.admit(parsed)


def prompt_limits(service: FrontendState, call: Call) -> BodyLimits:
    """The limits of a body, plus the longest prompt that semel's own routes render: each token and its `is_embed`."""
    body, tokens = service.body, call.serving.contract.max_tokens
    return replace(
        body, max_values=body.max_values + 2 * tokens, max_text_bytes=body.max_text_bytes + _TOKEN_BYTES * tokens
    )
