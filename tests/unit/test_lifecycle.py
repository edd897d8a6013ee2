"""The states of requests and the transitions between them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from quire.core.lifecycle import TRANSITIONS, move
from quire.types import EngineRequest, Request, RequestOrder, RequestStatus, SamplingParams

CORE = Path(__file__).resolve().parents[2] / "src" / "quire" / "core"


def request(status: RequestStatus) -> Request:
    source = EngineRequest("r", [1, 2], SamplingParams())
    return Request(
        "r",
        2,
        [1, 2],
        source.params,
        RequestOrder(0, 0.0, 0),
        9,
        frozenset(),
        frozenset(),
        0,
        source,
        status=status,
    )


@pytest.mark.parametrize("before", get_args(RequestStatus))
def test_only_transitions_of_the_table_are_allowed(before: RequestStatus) -> None:
    for after in get_args(RequestStatus):
        moved = request(before)
        if after in TRANSITIONS[before]:
            move(moved, after)
            assert moved.status == after
        else:
            with pytest.raises(AssertionError, match=f"{before} -> {after}"):
                move(moved, after)


def test_every_state_is_reachable_and_leads_to_the_end() -> None:
    assert TRANSITIONS.keys() == set(get_args(RequestStatus))
    assert set().union(*TRANSITIONS.values(), {"waiting"}) == set(TRANSITIONS)
    ends = {"finished"}
    for _ in TRANSITIONS:
        ends |= {state for state, after in TRANSITIONS.items() if after & ends}
    assert ends == set(TRANSITIONS)


def test_one_function_writes_the_state() -> None:
    writes = []
    for path in CORE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            writes += [path.name for t in targets for n in ast.walk(t) if getattr(n, "attr", "") == "status"]
    assert writes == ["lifecycle.py"]
