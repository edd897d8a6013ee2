from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server, serving


@pytest.fixture(scope="session")
def dry() -> Iterator[Server]:
    """A server without a model: it answers with the prompt."""
    with serving("demo", "--dry-run", "--check-invariants") as server:
        yield server


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """The demo model, in float32 so that batches do not change a token."""
    with serving("demo", "--dtype", "float32") as server:
        yield server
