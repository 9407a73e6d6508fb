"""The exceptions that semel raises, and nothing else.

Who is at fault decides the branch, and the branch decides the HTTP status::

    SemelError
    ├── RequestError            the client's request is at fault: 4xx
    │   ├── InvalidRequest      400  a field is missing, malformed or out of bounds
    │   ├── HeadTooLarge        431  its request line and headers are over a limit
    │   ├── AmbiguousMedia      409  a name alone that its tenant has given to two contents
    │   ├── InvalidKey          401  no API key, or one that this server does not know
    │   ├── ForeignOrigin       403  a web page of another origin sent the request
    │   ├── MisdirectedRequest  421  the request names another host
    │   ├── MediaError          400  the media cannot be used
    │   │   ├── MediaUndecodable     400  not a file of an accepted format, or a damaged one
    │   │   ├── MediaDegenerate      400  decodes, but is too small or empty to mean anything
    │   │   ├── MediaTooLarge        413  over a limit, which the message names
    │   │   ├── MediaNotAllowed      400  its URL is not one that the operator lets us fetch
    │   │   └── MediaUnavailable     400  its URL could not be fetched
    │   ├── ModelNotFound       404  another model is served here
    │   ├── NoMediaStore        404  there are no files here: the operator has set up no media store
    │   ├── PromptTooLong       400  more tokens than the model takes
    │   ├── RequestTooSlow      408  its body did not come in time
    │   ├── TemplateError       400  the chat template refused the messages
    │   ├── UnknownFeatures     404  items were named by digests that are not held for this tenant
    │   ├── UnknownMedia        404  a file was named that this tenant does not have, or not any more
    │   ├── UnknownResponse     404  a response was named that this tenant does not have, or not any more
    │   │   └── UnknownPreviousResponse 404  the one that a request continues
    │   └── UnsupportedEncoding 415  its body is compressed
    ├── ServiceError            semel or the engine is at fault: 5xx
    │   ├── FeatureRejected     500  a feature breaks the model's contract, or does not fit its encoder's output
    │   ├── EngineFailed        500  the engine gave up on this request
    │   ├── EngineDead          503  the engine is gone
    │   │   └── EngineHung           503  it made no progress, and was ended
    │   ├── WorkerLost          503  the connection to the worker broke while it answered
    │   ├── MediaStoreUnavailable 503  the media store is slow, full or gone
    │   ├── NotReady            503  nothing can be served yet, or not any more
    │   ├── TooManyConnections  503  the server has as many connections as it takes
    │   ├── RequestQuarantined  503  two engines died with the request under way
    │   ├── DeadlineExceeded    504  the request took longer than the operator lets it
    │   └── Busy                429  too many requests wait already
    │       └── TooManyBytes         429  the requests in flight hold too many bytes already
    ├── FeatureMissing          an item was referred to that is not held; repaired between processes, never shown
    ├── ProtocolError           a peer process broke the protocol between frontend and worker
    └── ConfigError             the operator has to change a setting or a file

A message says what is wrong, which value it was, and what to do. Text from decoders and other foreign code never goes
into a message: it stays in the log (threats S7). What a client has written is shown again as an `excerpt`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, Final, Self

__all__ = [
    "AmbiguousMedia",
    "Busy",
    "ConfigError",
    "DeadlineExceeded",
    "EngineDead",
    "EngineFailed",
    "EngineHung",
    "FeatureMissing",
    "FeatureRejected",
    "ForeignOrigin",
    "HeadTooLarge",
    "InvalidKey",
    "InvalidRequest",
    "MediaDegenerate",
    "MediaError",
    "MediaNotAllowed",
    "MediaStoreUnavailable",
    "MediaTooLarge",
    "MediaUnavailable",
    "MediaUndecodable",
    "MisdirectedRequest",
    "ModelNotFound",
    "NoMediaStore",
    "NotReady",
    "PromptTooLong",
    "ProtocolError",
    "RequestError",
    "RequestQuarantined",
    "RequestTooSlow",
    "SemelError",
    "ServiceError",
    "TemplateError",
    "TooManyBytes",
    "TooManyConnections",
    "UnknownFeatures",
    "UnknownMedia",
    "UnknownPreviousResponse",
    "UnknownResponse",
    "UnsupportedEncoding",
    "WorkerLost",
    "error_for",
    "excerpt",
    "told_kinds",
]

_MAX_EXCERPT_CHARS: Final = 256


class SemelError(Exception):
    """The root: `except SemelError` catches everything that semel raises on purpose."""


class RequestError(SemelError):
    """The client's request is at fault; sending it again unchanged fails again."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field of the request that is at fault, where it is one."""

    @classmethod
    def of(cls, param: str, message: str) -> Self:
        """Return the fault of one field: its message begins with the field's name."""
        return cls(f"{param}: {message}", param=param)

    def at(self, param: str) -> Self:
        """Return the same fault as that of one part of a request. A new error: several requests may share this one."""
        return self.of(param, str(self))


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of bounds."""


class AmbiguousMedia(RequestError):
    """An item was named by a `uuid` alone that its tenant has sent with two contents; its bytes have to be sent."""

    status = 409
    code = "ambiguous_media"


class HeadTooLarge(RequestError):
    """The request line and headers are over a limit (threats S19)."""

    status = 431
    code = "request_head_too_large"


class InvalidKey(RequestError):
    """No API key came with the request, or one that this server does not know."""

    status = 401
    code = "invalid_api_key"


class ForeignOrigin(RequestError):
    """A web page of an origin that is not allowed here sent the request (threats S25)."""

    status = 403
    code = "foreign_origin"


class MisdirectedRequest(RequestError):
    """The request names a host that this server is not (threats S25)."""

    status = 421
    code = "misdirected_request"


class MediaError(RequestError):
    """The media cannot be used."""

    code = "invalid_media"


class MediaUndecodable(MediaError):
    """The bytes are not a file of an accepted format, or the file is damaged."""


class MediaDegenerate(MediaError):
    """The media decodes, but is too small or empty to mean anything to a model (threats S8)."""


class MediaTooLarge(MediaError):
    """The media is over a limit; the message names the limit."""

    status = 413
    code = "media_too_large"


class MediaNotAllowed(MediaError):
    """The URL of the media is not one that may be fetched; the message names the flag (threats S1)."""

    code = "media_url_not_allowed"


class MediaUnavailable(MediaError):
    """The URL of the media could not be fetched: whoever named it has to look after it, so it is no fault of ours."""

    code = "media_unavailable"


class ModelNotFound(RequestError):
    """The request is for a model that is not served here."""

    status = 404
    code = "model_not_found"


class NoMediaStore(RequestError):
    """There are no files here: the operator has set up no media store."""

    status = 404
    code = "no_media_store"


class PromptTooLong(RequestError):
    """The prompt has more tokens than the model takes."""

    code = "context_length_exceeded"


class RequestTooSlow(RequestError):
    """The body of the request did not come in time; what had come of it is let go."""

    status = 408
    code = "request_timeout"


class TemplateError(RequestError):
    """The chat template refused the messages."""

    code = "invalid_messages"


class UnknownFeatures(RequestError):
    """Items were named by digests that are not held for this tenant; their media or features have to be sent."""

    status = 404
    code = "unknown_features"


class UnknownMedia(RequestError):
    """A file was named that this tenant does not have, or not any more; another tenant's is answered the same."""

    status = 404
    code = "unknown_media"


class UnknownResponse(RequestError):
    """A response was named that this tenant does not have, or not any more; another tenant's is answered the same."""

    status = 404
    code = "response_not_found"


class UnknownPreviousResponse(UnknownResponse):
    """The response that a request continues is unknown, in the words of OpenAI's API."""

    code = "previous_response_not_found"


class UnsupportedEncoding(RequestError):
    """The body is compressed; the header `Accept-Encoding` says what is taken."""

    status = 415
    code = "unsupported_encoding"
    accepted: ClassVar[str] = "identity"


class ServiceError(SemelError):
    """semel or the engine is at fault; the same request may succeed later."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds until the same request may succeed, where that is known better than "in a moment"."""


class FeatureRejected(ServiceError):
    """A feature breaks the model's contract, or does not fit what the encoder makes of it (threats S9)."""

    code = "feature_rejected"


class EngineFailed(ServiceError):
    """The engine gave up on this request."""

    code = "engine_failed"


class EngineDead(ServiceError):
    """The engine is gone; a new one has to be started."""

    status = 503
    code = "engine_dead"


class EngineHung(EngineDead):
    """The engine made no progress, and was ended; a new one has to be started (threats S22)."""

    code = "engine_hung"


class WorkerLost(ServiceError):
    """The connection to the worker broke while it answered; the request may be sent again."""

    status = 503
    code = "worker_lost"

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0, is_death: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_death = is_death
        """Its engine or its process died, as far as one can see from here."""


class MediaStoreUnavailable(ServiceError):
    """The media store is slow, full or gone; requests that do not need it are served."""

    status = 503
    code = "media_store_unavailable"


class NotReady(ServiceError):
    """Nothing can be served yet, or not any more; the message says what is being waited for."""

    status = 503
    code = "not_ready"


class TooManyConnections(ServiceError):
    """The server has as many connections as it takes; on this one it answers probes only (threats S25)."""

    status = 503
    code = "too_many_connections"


class RequestQuarantined(ServiceError):
    """Two engines died with this content of this tenant under way; it is refused for a while (threats S22)."""

    status = 503
    code = "request_quarantined"


class DeadlineExceeded(ServiceError):
    """The request took longer than it may; what was being done for it is given up."""

    status = 504
    code = "deadline_exceeded"


class Busy(ServiceError):
    """Too many requests wait already: nothing is wrong with this one, and it may be sent again (threats S18)."""

    status = 429
    code = "too_many_requests"


class TooManyBytes(Busy):
    """The requests in flight hold too many bytes already."""

    code = "too_many_bytes"


class FeatureMissing(SemelError):
    """Items were referred to by digest that are not held; a holder of their features sends them."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        self.digests = tuple(digests)
        super().__init__(f"{len(self.digests)} features are not held: {', '.join(d.hex()[:12] for d in self.digests)}")


class ProtocolError(SemelError):
    """A peer process broke the protocol between frontend and worker."""


class ConfigError(SemelError):
    """The operator has to change a setting or a file; the message says which."""


def excerpt(text: str) -> str:
    """Return what a message shows of something that a client has written, whatever its length (threats S7)."""
    return text if len(text) <= _MAX_EXCERPT_CHARS else f"{text[: _MAX_EXCERPT_CHARS - 1]}…"


def error_for(code: str, message: str, fields: Collection[str] = ()) -> RequestError | ServiceError:
    """Return the error that another process reported by its code; an unknown code is the service's fault.

    A message that begins with one of the request's `fields` is about that field: no frame needs to say so.
    """
    for kind in told_kinds():  # of the classes that share a code, the most general
        if kind.code == code:
            error = kind(message)
            name = message.partition(" ")[0].rstrip(":")
            if isinstance(error, RequestError) and name in fields:
                error.param = name
            return error
    return ServiceError(message)


def told_kinds() -> Sequence[type[RequestError | ServiceError]]:
    """Return every error that a client can get, breadth first."""
    kinds: list[type[RequestError | ServiceError]] = [RequestError, ServiceError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds
