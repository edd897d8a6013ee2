"""Results of steps on a GPU: the times that the device gives them."""

from __future__ import annotations

import time

import pytest
import torch

from quire.worker.results import Results, StepOutput


def work(turns: int) -> None:
    x = torch.full((2048, 2048), 1e-3, device="cuda")
    for _ in range(turns):
        x = x @ x


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [False, True])
def test_steps_are_timed_by_the_device(copies: bool) -> None:
    """A host that launches slowly, or asks late, does not change the time of the step in front."""
    results = Results(torch.device("cuda"), turns=3)
    tokens = torch.zeros(1, 1, dtype=torch.int32, device="cuda" if copies else "cpu")
    work(1)
    torch.cuda.synchronize()
    handles, begin = [], time.perf_counter()
    for step, pause_s in enumerate((0.0, 2.0)):
        results.begin(step)
        work(20)
        time.sleep(pause_s)  # far longer than the work
        handles.append(results.handle(StepOutput(step, None, tokens)))
    first, second = (handle.wait().times for handle in handles)
    took_s = time.perf_counter() - begin
    assert first and second
    assert 0 < first.since_start_s < 1.0 < second.since_start_s <= second.since_last_s + 1e-3
    assert first.since_start_s + second.since_last_s <= took_s


def test_a_cpu_has_no_clock() -> None:
    results = Results(torch.device("cpu"), turns=3)
    results.begin(0)
    assert results.handle(StepOutput(0, None, torch.zeros(1, 1, dtype=torch.int32))).wait().times is None
