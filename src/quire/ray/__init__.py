"""Quire on a Ray cluster (extra `ray`): ranks placed over nodes, and a Ray Serve deployment.

`quire serve MODEL --ray` uses cluster.py and engine_process.py; `build_app` (app.py) makes an application for Ray Serve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.ray.app import build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> Any:
    if name == "build_app":  # deferred, because it imports ray.serve
        from quire.ray.app import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
