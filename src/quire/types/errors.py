"""Errors that Quire raises on purpose; the text of each is one sentence for the user."""

from __future__ import annotations


class QuireError(Exception):
    """Base of every error that Quire raises on purpose; its text is one sentence for the user."""


class ConfigError(QuireError):
    """A setting, or a combination of settings, that cannot work."""


class ModelError(QuireError):
    """A checkpoint, config or tokenizer that is missing, corrupt or not supported."""


class RequestError(QuireError):
    """A request that cannot be served as it is (HTTP 400); names the field and the limit."""


class Overloaded(QuireError):
    """No room for the request now (HTTP 503 with Retry-After)."""


class StepFailed(QuireError):
    """A step ran out of memory: its results will never come, and its requests end with this error (HTTP 500)."""


class EngineDead(QuireError):
    """The engine stopped; every open request fails with the cause."""
