"""From a request to its answer, the same for every route with a body: admitted, read, parsed, answered, accounted for.

What a request brings is in its account from the first byte. The account closes with the answer, or where one is
streamed with its first output (`execution`): by then nothing of what came is held any more. Of a download it closes
when that has been sent, since what is still to be sent is in it (`downloads`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from semel.core import Tenant
from semel.frontend.budget import Account
from semel.frontend.http.body import CLIENT_CLOSED, parse, read, unless_disconnected
from semel.frontend.http.download import Download
from semel.frontend.http.sse import EventStream
from semel.frontend.middleware.authentication import tenant_name
from semel.frontend.service import FrontendState, ServedModel
from semel.render import ChatRequest, Intent, ParsedRequest
from semel.telemetry.request_context import current_request, own_id

__all__ = ["Call", "Chatting", "serve_call"]


class _Addressed(Protocol):
    """A request that may name a model."""

    @property
    def model(self) -> str | None: ...


class Chatting(Protocol):
    """A request with a chat in it."""

    def chat(self) -> ChatRequest:
        """What decides the prompt."""
        ...

    def tenant(self, name: str = "") -> Tenant:
        """Whose items these are; the name is that of the API key."""
        ...


_T = TypeVar("_T", bound=_Addressed)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a route, besides its body."""

    state: FrontendState
    serving: ServedModel
    tenant: str
    """The name that goes with its API key."""

    account: Account
    request_id: str
    """Our own, which its submissions begin with."""

    client_id: str | None = None
    """What its client calls it, by a header."""

    def answer_id(self, named: str | None = None) -> str:
        """What the id of the answer ends with: by the header, else by the body, else our own."""
        return self.client_id or named or self.request_id

    def admit(self, parsed: _T) -> _T:
        """Refuse a request for another model, and a priority that its tenant may not set."""
        self.serving.check_model(parsed.model)
        self.state.check_priority(getattr(parsed, "priority", 0), self.tenant)
        return parsed

    async def read_chat(self, parsed: Chatting, intent: Intent = "execute") -> ParsedRequest:
        """The draft of a chat. What its base64 decodes to is taken ahead: three quarters of its length at most."""
        self.account.take(3 * self.account.charged // 4)
        return await self.serving.pipeline.read_chat(
            parsed.chat(),
            parsed.tenant(self.tenant),
            intent=intent,
            admit=self.serving.check_items,
            spend=self.account.take,
            max_chars=self.serving.max_chars,
        )


async def serve_call(
    request: Request,
    service: FrontendState,
    kind: TypeAdapter[_T],
    work: Callable[[Call, _T], Coroutine[Any, Any, Response]],
    ask: Callable[[Request, FrontendState, TypeAdapter[_T], Call], Coroutine[Any, Any, _T]] | None = None,
) -> Response:
    """What `work` answers to a request of this kind, read by `ask` if it is no JSON; cancelled if the client goes."""
    context = current_request()
    client_id = None if context is None else context.client_id
    call = Call(service, service.serving(), tenant_name(request), service.budget.open(), own_id(), client_id)
    try:
        # Nothing here keeps the body, or what was asked: it is for `work` to let go of.
        response = await unless_disconnected(
            request, work(call, await (ask or _read_json)(request, service, kind, call))
        )
    except ClientDisconnect:
        call.account.close()
        return Response(status_code=CLIENT_CLOSED)
    except BaseException:
        call.account.close()
        raise
    if not isinstance(response, EventStream | Download):  # which close it themselves
        call.account.close()
    return response


async def _read_json(request: Request, service: FrontendState, kind: TypeAdapter[_T], call: Call) -> _T:
    parsed = parse(await read(request, service.body, call.account), kind)
    return call.admit(parsed)
