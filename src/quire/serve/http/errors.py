"""Errors as HTTP answers, in the forms of OpenAI's, Anthropic's and Ollama's APIs.

Every error carries its status, the request field at fault (`param`) and, where programs act on it, a word for its kind
(`code`). Nothing here reads them out of a message.
"""

from __future__ import annotations

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
_ANTHROPIC_TYPES = {413: "request_too_large", 429: "rate_limit_error", 499: "invalid_request_error"}
_MESSAGE_CHARS, _PARAM_CHARS = 2048, 128
_TOO_LONG = "context_length_exceeded"
# Agents shorten a conversation when they see these words: not all of them look at the code.
_TOO_LONG_WORDS = f"; this model's maximum context length is exceeded ({_TOO_LONG})"


class ApiError(Exception):
    """An error with its HTTP status.

    Args:
        status: the HTTP status.
        message: one sentence for the user; it is cut if it repeats too much of what a client sent.
        param: the request field at fault, or None.
        code: a word that identifies the kind of error to programs, or None.
        headers: headers for the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > _MESSAGE_CHARS:
            message = f"{message[:_MESSAGE_CHARS]} ..."
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = param and param[:_PARAM_CHARS]
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the body of the response in the form of OpenAI's API."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Return the body of the response in the form of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status) or _TYPES.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "api_error")
        # Anthropic's clients know a conversation that is too long by the beginning of the message.
        prefix = "prompt is too long: " if self.code == _TOO_LONG else ""
        error = {"type": kind, "message": prefix + self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    def ollama_body(self) -> dict[str, Any]:
        """Return the body of the response in the form of Ollama's API, with the field at fault."""
        return {"error": self.message} if self.param is None else {"error": self.message, "param": self.param}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """Return an error with status 503 and the whole seconds after which the client may retry."""
    headers = {"Retry-After": str(max(1, round(retry_after_s)))}
    return ApiError(503, message, code="overloaded", headers=headers)


def as_api_error(error: Exception) -> ApiError:
    """Return the HTTP answer to an exception: 400, 503 or 500, or the exception itself if it is an ApiError."""
    match error:
        case ApiError():
            return error
        case RequestError():
            message = str(error) + (_TOO_LONG_WORDS if error.code == _TOO_LONG else "")
            return ApiError(400, message, _field_of(error.param), error.code)
        case Overloaded():
            return overloaded(str(error), 1)
        case EngineDead():
            return ApiError(500, str(error), code="engine_dead")
    return ApiError(500, f"an error inside the server: {type(error).__name__}", code="internal_error")


def _field_of(path: str | None) -> str | None:
    """Return the request field of a path such as messages[2].content."""
    return path and path.partition("[")[0].partition(".")[0]


# The engine calls the prompt `prompt` or `messages` and a constraint on the output `structured_outputs`. The fields
# that carry them on the routes:
_PROMPTS = ("messages", "input", "prompt")
_CONSTRAINTS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format",
    "json_schema", "regex", "ebnf", "grammar", "structural_tag",
    "text", "output_config", "output_format", "format", "tools",
)  # fmt: skip


def with_client_field(error: ApiError, request: object) -> ApiError:
    """Return `error` with the name of the field at fault that the client used.

    Args:
        error: an error whose `param` may be a name that only the engine uses.
        request: the decoded request, or None if there is none yet.
    """
    given = {name for name in (*_PROMPTS, *_CONSTRAINTS, "chat_template") if getattr(request, name, None)}
    prompt = next((name for name in _PROMPTS if getattr(request, name, None) is not None), error.param)
    message, param = error.message, error.param
    own = getattr(request, "client_fields", {}).get(param)
    if param is not None and own is not None and getattr(request, own.partition(".")[0]) is not None:
        return ApiError(error.status, message.replace(param, own, 1), own, error.code, error.headers)
    match param:
        case "prompt":
            param = prompt
            if param == "input":
                message = message.replace("prompt", "input", 1)
        case "messages":
            param = prompt
        case "chat_template" if "chat_template" not in given:
            param = prompt  # the template is the server's, so the conversation does not suit it
        case "structured_outputs":
            free = {"type": "text"}  # a format that constrains nothing
            carriers = [n for n in _CONSTRAINTS if n in given and getattr(request, n) != free]
            if carriers and carriers != [param]:
                param = carriers[0]
                message = f"{' or '.join(carriers)}: {message}"
        case _:
            return error
    return ApiError(error.status, message, param, error.code, error.headers)
