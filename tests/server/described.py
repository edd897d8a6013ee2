"""Requests made by schemathesis from the server's own description of itself.

python tests/server/described.py URL 500     # so many for each route, and as many that break the description
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PATIENCE_S = 60.0  # a request that takes longer hangs


def send(url: str, examples: int) -> Counter[tuple[str, int]]:
    """Send `examples` requests of each kind to each route; how often each route answered with which status.

    Raises for an answer that is a 5xx, is not as described, or does not come.
    """
    seen: Counter[tuple[str, int]] = Counter()
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            if mode is GenerationMode.POSITIVE or operation.body:  # else nothing could be broken
                _send(operation, mode, examples, seen)
    return seen


def _send(operation: Any, mode: GenerationMode, examples: int, seen: Counter[tuple[str, int]]) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        answer = case.call(timeout=PATIENCE_S)
        seen[operation.label, answer.status_code] += 1
        timed = isinstance(case.body, dict) and case.body.get("timeout") is not None
        if not (answer.status_code == 504 and timed):  # asked for
            case.validate_response(answer, checks=CHECKS)

    check()


if __name__ == "__main__":
    statuses = send(sys.argv[1], int(sys.argv[2]))
    for (label, status), count in sorted(statuses.items()):
        print(f"{count:>6}  {status}  {label}")
    print(f"{sum(statuses.values()):>6}  requests, all answered as described")
