"""Every error Ebbtide raises, as one tree; foreign errors are translated into it once, where they enter.

    EbbtideError
    +-- SettingsError                 the operator's file or environment is wrong; refuse to start
    +-- Answer                        what a caller is told: status, type, param, code
    |   +-- BadRequest 400            +-- ContextTooLong 400
    |   +-- Unauthorized 401          +-- Forbidden 403
    |   +-- NotFound 404              +-- ModelNotFound 404      +-- UnknownUrl 404
    |   +-- MethodNotAllowed 405      +-- RequestTimeout 408     +-- Conflict 409
    |   +-- TooLarge 413              +-- UnsupportedContentType 415
    |   +-- RateLimited 429           +-- Overloaded 503
    |   +-- UpstreamUnavailable 502   +-- UpstreamTimeout 504    +-- UnsupportedEndpoint 501
    |   +-- RelayMisconfigured 503    +-- UpstreamError (the node's own status)
    |   +-- Internal 500              +-- InsufficientStorage 507
    +-- ClientLeft                    nobody is there to be told anything
    +-- NodeFailed                    one leg of a call failed; another may be tried
    |   +-- ConnectFailed             +-- FirstByteTimeout       +-- IdleTimeout
    |   +-- Truncated                 +-- BadAnswer              +-- BadStatus
    |   +-- ErrorInStream             +-- NodeRefused            +-- TakenBack
    |   +-- Stopped
    +-- ProbeFailed                   one look at a node failed, or one word to a webhook
    |   +-- HookUnreached             no connection; nothing was sent
    +-- HookRefused                   a webhook's URL or address may not be told
    +-- StoreError                    the database did not do what was asked; nothing was half written
        +-- StoreLost                 no connection, or locked too long; ask again
        +-- StoreFull                 no space

An `Answer` is what crosses the HTTP edge; `NodeFailed` never does.
Status, type and code of each follow OpenAI's error guide and the retry rules of its SDKs (408, 409, 429 and 5xx are
retried unless `x-should-retry: false`; Retry-After is obeyed between 1 and 60 s).
"""

from http import HTTPStatus


class EbbtideError(Exception):
    """Anything that goes wrong in a way Ebbtide knows about."""


class SettingsError(EbbtideError):
    """The settings cannot be used. The message names the source, the key and what to write instead."""


class Answer(EbbtideError):
    """What a caller is told when a call cannot be served.

    `param` names the field at fault (or None); `retry_after_s` is whole seconds, 1 to 60; `retry` says whether an SDK
    should try again (None leaves it to the status).
    """

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    type: str = "invalid_request_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.retry_after_s = None if retry_after_s is None else max(1, min(60, retry_after_s))
        self.retry = retry


class BadRequest(Answer):
    """The request cannot be read or asks for something impossible."""

    status = HTTPStatus.BAD_REQUEST


class ContextTooLong(BadRequest):
    """The prompt is longer than every node's context."""

    code = "context_length_exceeded"


class Unauthorized(Answer):
    """No key, or not one of ours."""

    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"


class Forbidden(Answer):
    """A key of ours, but not one that may do this."""

    status = HTTPStatus.FORBIDDEN
    code = "permission_denied"


class NotFound(Answer):
    """The thing asked for is not here."""

    status = HTTPStatus.NOT_FOUND


class ModelNotFound(NotFound):
    """No node and no relay serves the model."""

    code = "model_not_found"


class UnknownUrl(NotFound):
    """No such path."""

    code = "unknown_url"


class MethodNotAllowed(Answer):
    """The path exists, the method does not."""

    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_supported"


class RequestTimeout(Answer):
    """The client's own deadline passed, or its request did not arrive in time."""

    status = HTTPStatus.REQUEST_TIMEOUT
    type = "timeout_error"
    code = "request_timeout"


class Conflict(Answer):
    """The thing is in a state that does not allow it."""

    status = HTTPStatus.CONFLICT


class TooLarge(Answer):
    """The body is over its limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "payload_too_large"


class UnsupportedContentType(Answer):
    """The body is not of a type this path reads."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported_content_type"


class RateLimited(Answer):
    """The caller holds as much as it may, which no waiting mends."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "insufficient_quota"
    code = "insufficient_quota"


class Overloaded(Answer):
    """No room within patience, or the queue is full."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable_error"
    code = "server_is_overloaded"


class RelayMisconfigured(Answer):
    """The relay was needed and cannot be used as it is set up."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "server_error"
    code = "relay_misconfigured"


class UpstreamUnavailable(Answer):
    """Every leg of the call failed before it could answer."""

    status = HTTPStatus.BAD_GATEWAY
    type = "server_error"
    code = "upstream_unavailable"


class UpstreamError(Answer):
    """The node's own error, passed on with its status after every other leg was tried or ruled out."""

    type = "server_error"
    code = "upstream_error"

    def __init__(self, message: str, status: int, *, code: str | None = None, retry: bool | None = None) -> None:
        super().__init__(message, code=code, retry=retry)
        self.status = status


class UpstreamTimeout(Answer):
    """The node did not begin to answer in time."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "server_error"
    code = "upstream_timeout"


class UnsupportedEndpoint(Answer):
    """The engine does not implement this path."""

    status = HTTPStatus.NOT_IMPLEMENTED
    code = "unsupported_endpoint"


class Internal(Answer):
    """A fault of ours."""

    type = "server_error"
    code = "internal_error"


class InsufficientStorage(Answer):
    """No space to keep what the caller sends."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    type = "server_error"
    code = "insufficient_storage"


class ClientLeft(EbbtideError):
    """The caller closed its connection; logged as 499 and counted against nobody."""


class NodeFailed(EbbtideError):
    """One leg of a call failed through the node or the way to it."""


class ConnectFailed(NodeFailed):
    """No connection within the bound: refused, unreachable, TLS failed."""


class FirstByteTimeout(NodeFailed):
    """The request went out and no response head came within the bound."""


class IdleTimeout(NodeFailed):
    """The answer began and then nothing came for too long."""


class Truncated(NodeFailed):
    """The connection ended inside the answer."""


class BadAnswer(NodeFailed):
    """What came is not HTTP, or is over a bound."""


class BadStatus(NodeFailed):
    """The node answered with a status that says it failed. `body` is an error in OpenAI's shape."""

    def __init__(self, message: str, status: int, body: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class NodeRefused(NodeFailed):
    """The node has no room (429 or 503). Nothing was done, so asking elsewhere costs nothing."""


class TakenBack(NodeFailed):
    """The router took the room back for an interactive call: no fault of the node's, and the call goes on later."""


class Stopped(NodeFailed):
    """The router ends what runs, because it stops. The node did nothing wrong."""


class ErrorInStream(NodeFailed):
    """The node answered 200 and then said it failed, before anything a person would see.

    `body` is its JSON, `status` the HTTP status it would have had.
    """

    def __init__(self, message: str, body: bytes = b"", status: int = 500) -> None:
        super().__init__(message)
        self.body = body
        self.status = status


class ProbeFailed(EbbtideError):
    """A look at a node, or a word to a webhook, failed. `status` is the HTTP status, or None when no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class HookUnreached(ProbeFailed):
    """No connection to a webhook's receiver: nothing was sent, so another address may be tried."""


class HookRefused(EbbtideError):
    """A webhook's URL or address may not be told anything. The message begins small and names no path or query."""


class StoreError(EbbtideError):
    """The database did not do what was asked. Nothing was half written."""


class StoreLost(StoreError):
    """The database cannot be reached, or was locked too long. Asking again is safe."""


class StoreFull(StoreError):
    """The database has no space left."""
