"""Errors that Quire raises on purpose; the text of each is one sentence for the user."""

from __future__ import annotations


class QuireError(Exception):
    """Base of every error that Quire raises on purpose; its text is one sentence for the user."""


class ConfigError(QuireError):
    """A setting, or a combination of settings, that cannot work."""


class ModelError(QuireError):
    """A checkpoint, config or tokenizer that is missing, corrupt or not supported."""


class RequestError(QuireError):
    """A request that cannot be served as it is (HTTP 400). The message names the field, its value and its limit.

    Args:
        message: one sentence for the user.
        param: the request field at fault, or None if no single field is.
        code: a word by which programs tell this error from others, such as "context_length_exceeded".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Overloaded(QuireError):
    """No room for the request now (HTTP 503 with Retry-After)."""


class StepFailed(QuireError):
    """A step ran out of memory: its results will never come, and its requests end with this error (HTTP 500)."""


class EngineDead(QuireError):
    """The engine stopped; every open request fails with the cause."""
