"""What goes wrong, as clients of OpenAI's API know it: a status, and an object that names field and limit."""

from __future__ import annotations

import re
from typing import Any

from quire.types import EngineDead, Overloaded, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    499: "client_closed_request",
    503: "overloaded_error",
    504: "timeout_error",
}


_MESSAGE_CHARS, _PARAM_CHARS = 2048, 128
# The words by which agents know that they have to shorten a conversation: not all of them look at the code.
_TOO_LONG = "; this model's maximum context length is exceeded (context_length_exceeded)"


class ApiError(Exception):
    """An answer that is an error. `param` is the field of the request that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > _MESSAGE_CHARS:  # it repeats something that a client sent
            message = f"{message[:_MESSAGE_CHARS]} ..."
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = param and param[:_PARAM_CHARS]
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# Fields that mean the same on different routes, and what errors about them begin with.
_PROMPTS = ("messages", "input", "prompt")
_CONSTRAINTS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format",
    "text", "output_config", "output_format", "tools",
)  # fmt: skip
_CONSTRAINT_WORDS = ("json", "regex", "choice", "grammar")


def with_field(error: ApiError, asked: object) -> ApiError:
    """`error`, naming that field of the request `asked` by which the prompt or the structured output came."""
    message, param = error.message, error.param
    if message.startswith("prompt "):
        param = next((name for name in _PROMPTS if hasattr(asked, name)), param)
        message = message.replace("prompt", "input", 1) if param == "input" else message
    elif message.startswith("the chat template") and param is None:
        param = "chat_template" if getattr(asked, "chat_template", None) else "messages"
    elif message.startswith(_CONSTRAINT_WORDS) and param is None:
        given = [name for name in _CONSTRAINTS if getattr(asked, name, None)]
        if len(given) == 1:
            param, message = given[0], f"{given[0]}: {message}"
    return ApiError(error.status, message, param, error.code, error.headers)


_MESSAGES_TYPES = {413: "request_too_large", 429: "rate_limit_error", 499: "invalid_request_error"}


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The same in the shape of Anthropic's API."""
    known = _MESSAGES_TYPES.get(error.status) or _TYPES.get(error.status)
    kind = known or ("invalid_request_error" if error.status < 500 else "api_error")
    too_long = error.code == "context_length_exceeded"  # in words that Anthropic's clients know
    body = {"type": kind, "message": f"prompt is too long: {error.message}" if too_long else error.message}
    return {"type": "error", "error": body, "request_id": request_id}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """503 with the whole seconds after which to try again."""
    headers = {"Retry-After": str(max(1, round(retry_after_s)))}
    return ApiError(503, message, code="overloaded", headers=headers)


def as_api_error(error: Exception, fields: frozenset[str] = frozenset()) -> ApiError:
    """The answer to an exception. A RequestError begins with the name of the field that it is about."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        message = str(error)
        word = re.match(r"\w*", message)[0]  # type: ignore[index]
        param = word if word in fields else None
        if "max_model_len" in message:
            return ApiError(400, message + _TOO_LONG, param, "context_length_exceeded")
        return ApiError(400, message, param)
    if isinstance(error, Overloaded):
        return overloaded(str(error), 1)
    if isinstance(error, EngineDead):
        return ApiError(500, str(error), code="engine_dead")
    return ApiError(500, f"an error inside the server: {type(error).__name__}", code="internal_error")
