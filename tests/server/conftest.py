from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from serving import Check, Server, serving

from processes import MODULE_MARK, no_process_is_left, no_process_of_the_module_is_left  # noqa: F401

_UNMARKED = {MODULE_MARK: ""}  # servers of the whole session outlive the module that first uses them


@pytest.fixture(scope="session")
def dry() -> Iterator[Server]:
    """Start a server without a model, which answers with the prompt."""
    with serving(
        "demo", "--dry-run", "--check-invariants", "--trust-request-chat-template", env=_UNMARKED
    ) as server:
        yield server


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """Start a server with the demo model in float32, so that tokens do not depend on the batch."""
    with serving("demo", "--dtype", "float32", env=_UNMARKED) as server:
        yield server


@pytest.fixture(scope="session")
def check(data: Path) -> Check:
    """Return a function that raises unless a body matches the named schema of OpenAI's API description."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = yaml.load((data / "api" / "openapi.yaml").read_text(), loader)
    schemas = modern(found["components"]["schemas"])

    def run(body: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
        jsonschema.Draft202012Validator(schema).validate(body)

    return run


def modern(schema: Any) -> Any:
    """Convert `nullable` of OpenAPI 3.0, which the description uses in places, to JSON Schema 2020-12."""
    if isinstance(schema, list):
        return [modern(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: modern(value) for key, value in schema.items() if key not in ("nullable", "example")}
    if schema.get("nullable") is True:
        return {"anyOf": [found, {"type": "null"}]}
    return found
