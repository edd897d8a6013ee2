"""The engine in simulated time: the real scheduler and step loop over steps that take as long as a model predicts.

A simulation of some minutes of load takes seconds, so that many rates and settings can be tried. What it leaves out is
the device: tokens are artificial, so answers have the lengths of the load.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.bench.load.workloads import Workload
from quire.bench.run import Run, ServedRequest
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.step_time import StepLoad
from quire.core.steplog import StepLog
from quire.types import (
    COMMON_STEP_TOKENS,
    EngineInfo,
    EngineRequest,
    KVGroup,
    SamplingParams,
    StepHandle,
    StepPlan,
    StepResult,
    TokenMasks,
)
from quire.wiring import wire_engine

_TOKEN = 7


class TimedSteps(Protocol):
    """The times of successive steps."""

    def launch_s(self, load: StepLoad) -> float:
        """Return the seconds for which the launch of the next step delays the host, beyond the time of usual launches."""
        ...

    def predict(self, load: StepLoad) -> float | None:
        """Return the seconds that the device takes for it; None if such steps are unknown. Called after `launch_s`."""
        ...


class SimulatedClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SimulatedExecutor:
    """An executor whose steps run one after the other on a simulated clock.

    Args:
        model: gives the time of a step.
        clock: is set to the end of a step when its result is awaited.
    """

    def __init__(self, model: TimedSteps, clock: SimulatedClock) -> None:
        self._model, self._clock = model, clock
        self._plans: dict[int, StepPlan] = {}
        self._busy_until_s = 0.0

    def forward(self, plan: StepPlan) -> None:
        self._plans[plan.step] = plan

    def drafts(self) -> np.ndarray:
        raise AssertionError("simulated steps have no draft tokens")

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        plan = self._plans.pop(step)
        load = load_of_plan(plan)
        launch_s, predicted = self._model.launch_s(load), self._model.predict(load)
        assert predicted is not None, "the model has not seen such steps"
        self._busy_until_s = max(self._busy_until_s, self._clock.now_s) + predicted
        self._clock.now_s += launch_s
        result = StepResult(step, np.full((int(plan.samples.sum()), 1), _TOKEN, np.int32))
        return _SimulatedHandle(result, self._busy_until_s, self._clock)

    def warm_up(self) -> bool:
        return False

    def close(self) -> None:
        self._plans.clear()


class _SimulatedHandle:
    is_timed = False

    def __init__(self, result: StepResult, ready_s: float, clock: SimulatedClock) -> None:
        self._result, self._ready_s, self._clock = result, ready_s, clock

    def ready(self) -> bool:
        return self._clock.now_s >= self._ready_s

    def wait(self) -> StepResult:
        self._clock.now_s = max(self._clock.now_s, self._ready_s)
        return self._result


def load_of_plan(plan: StepPlan) -> StepLoad:
    """Return what the step of a plan does. Rows of one token count as decoding."""
    ones = plan.num_tokens == 1
    starts, counts = plan.starts[~ones].astype(float), plan.num_tokens[~ones].astype(float)
    context = float((plan.starts[ones] + 1).sum())
    return StepLoad(
        int(ones.sum()),
        context / 1e3,
        int(counts.sum()),
        float((counts * (starts + counts // 2)).sum()) / 1e3,
    )


def simulate(
    config: EngineConfig,
    info: EngineInfo,
    model: TimedSteps,
    work: Workload,
    arrivals_s: Sequence[float],
    max_concurrency: int | None = None,
) -> Run:
    """Serve a load in simulated time.

    Args:
        config: settings; those of the scheduler count.
        info: the engine whose sizes are simulated.
        model: gives the time of a step.
        work: prompts and output lengths.
        arrivals_s: arrival time of each request in seconds, ascending.
        max_concurrency: limit of open requests; default: none.

    Returns:
        The run, with the times of all tokens.
    """
    clock = SimulatedClock()
    engine = _engine(config, info, model, clock)
    served = [ServedRequest(len(ids), at) for (ids, _), at in zip(work, arrivals_s)]
    waiting = deque(enumerate(zip(work, served)))
    running: dict[str, ServedRequest] = {}
    steps, limit = [], max_concurrency or math.inf
    while waiting or running:
        if not running and waiting[0][1][1].start_s > clock.now_s:
            clock.now_s = waiting[0][1][1].start_s
        while waiting and waiting[0][1][1].start_s <= clock.now_s and len(running) < limit:
            index, ((ids, count), one) = waiting.popleft()
            one.start_s = clock.now_s if max_concurrency else one.start_s
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            engine.add(EngineRequest(str(index), list(ids), params))
            running[str(index)] = one
        before = engine.log.totals.steps
        for output in engine.step():
            one = running[output.id]
            one.token_times_s += [clock.now_s] * len(output.token_ids)
            if output.finish_reason is not None:
                del running[output.id]
        if engine.log.totals.steps > before:
            steps.append(engine.log.last)
    engine.close()
    return Run(served, steps, 0.0)


def _engine(config: EngineConfig, info: EngineInfo, model: TimedSteps, clock: SimulatedClock) -> Engine:
    return wire_engine(
        config.resolved(0 if info.device == "cpu" else 1 << 36, info.max_model_len),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        executor=SimulatedExecutor(model, clock),
        grammar=NoGrammar("a model, and this is a simulation"),
        groups=[KVGroup((), window) for _, window in info.kv_groups],
        step_sizes=COMMON_STEP_TOKENS if info.device.startswith("cuda") and config.cuda_graphs else (),
        log=StepLog(now=clock),
    )
