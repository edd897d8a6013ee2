"""Errors that Quire raises on purpose. The text of each is one sentence for the user."""

from __future__ import annotations


class QuireError(Exception):
    """Base class of the errors that Quire raises on purpose."""


class ConfigError(QuireError):
    """A setting, or a combination of settings, that cannot work."""


class ModelError(QuireError):
    """A checkpoint, config or tokenizer that is missing, corrupt or not supported."""


class RequestError(QuireError):
    """A request that cannot be served as it is (HTTP 400). The message names the field, its value and its limit.

    Args:
        message: one sentence for the user.
        param: the request field at fault, or None if no single field is.
        code: an identifier for programs, such as "context_length_exceeded", or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Overloaded(QuireError):
    """A lack of room for the request at this moment (HTTP 503 with Retry-After)."""


class StepFailed(QuireError):
    """A step that ran out of memory. Its results are void, and its requests end with this error (HTTP 500)."""


class EngineDead(QuireError):
    """The end of the engine. Every open request fails with its cause (HTTP 500)."""
