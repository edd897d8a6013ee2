"""The names of the served model as Ollama writes them: `name:tag`, where the tag `latest` may be left out."""

from __future__ import annotations

from quire.serve.api.context import ServerContext
from quire.serve.http.errors import ApiError

_LATEST = ":latest"


def tagged(name: str) -> str:
    """Return a model's name with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def served_name(server: ServerContext, name: str | None, field: str = "model") -> str:
    """Return the served name that a request means, with or without its tag.

    Raises:
        ApiError: 404 for a model that is not served; it names `field`.
    """
    if name is None:
        return server.names[0]
    for served in server.names:
        if tagged(name) == tagged(served):
            return served
    available = ", ".join(map(tagged, server.names))
    raise ApiError(
        404, f"model {name[:128]!r} not found; this server has {available}", field, "model_not_found"
    )
