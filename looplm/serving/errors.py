"""What goes wrong, in OpenAI's form: a status, and a body that says what to change."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from looplm.errors import UserError
from looplm.serving.worker import CLOSING, Busy, EngineFailed

log = logging.getLogger("looplm.serving")

KINDS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "forbidden_host"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "timeout"),
}
"""Status -> OpenAI's `type` and `code`."""


class ApiError(Exception):
    """An answer other than 200. `param`: the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})
        kind, usual = KINDS.get(status, ("invalid_request_error" if status < 500 else "server_error", None))
        self.kind, self.code = kind, code or usual

    def body(self) -> dict[str, Any]:
        """As OpenAI's servers write it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> "Json":
        """The answer."""
        return Json(self.body(), self.status, self.headers)


class Json(Response):
    """A JSON answer. Escapes all but ASCII, so that half of a surrogate pair in a message cannot fail it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """UTF-8 without line breaks."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"})
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, TimeoutError):
        return ApiError(504, "The answer took longer than this server allows. Ask for fewer tokens.")
    if isinstance(error, EngineFailed):
        return ApiError(503 if str(error) == CLOSING else 500, str(error))
    log.error("A request failed", exc_info=error)
    return ApiError(500, "The server failed on this request; its log says more.")
