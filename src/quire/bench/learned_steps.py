"""Step times learnt from a run, and simulated steps that vary as much as these did."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable

from quire.bench.step_padding import StepPadding
from quire.core.step_time import StepLoad, StepTimeModel

_HIDDEN = 0.7  # of the usual time: the device ran a part of such a step while the host was still busy


class LearnedSteps:
    """The times of steps with their padding, and the time of a capture.

    Args:
        padding: that of the engine whose steps are observed.
        model: fitted to the steps.
    """

    def __init__(self, padding: StepPadding, model: StepTimeModel | None = None) -> None:
        self.padding, self.model = padding, model or StepTimeModel()
        self._captures: list[
            tuple[StepLoad, float, float]
        ] = []  # seconds of the step before, and of the step itself

    def follow(self, loads: Iterable[StepLoad]) -> None:
        """Note steps whose times say nothing, such as those that compile kernels."""
        for load in loads:
            self.padding.run(load)

    def observe(self, steps: Iterable[tuple[StepLoad, float]]) -> None:
        """Learn from successive steps: what each did, and its seconds.

        A step that captures its graph keeps the host busy, which therefore sees the end of the step before it late. Neither
        says how long the device takes.
        """
        done = [(*self.padding.run(load), seconds) for load, seconds in steps]
        for index, (run, captures, seconds) in enumerate(done):
            if captures:
                before_s = done[index - 1][2] if index else 0.0
                self._captures.append((run, before_s, seconds))
            elif not any(after for _, after, _ in done[index + 1 : index + 2]):
                self.model.observe(run, seconds)

    @property
    def capture_s(self) -> float:
        """Return the seconds for which a capture keeps the host busy; 0 while none has been seen.

        Where the device took longer than the host, the step seems no shorter than usual, which says nothing. The lower
        median is taken, because some captures also compile kernels.
        """
        found = [
            before_s + took_s
            for run, before_s, took_s in self._captures
            if took_s < _HIDDEN * (self.model.predict(run) or 0.0)
        ]
        return statistics.median_low(found) if found else 0.0


class UnevenSteps:
    """Predicted step times that vary as much as the steps did from which they were learnt.

    Args:
        learned: the predictions, and the padding with which the steps begin.
        seed: of the choice among the steps that were seen.
    """

    def __init__(self, learned: LearnedSteps, seed: int = 0) -> None:
        self._model, self._padding, self._capture_s = learned.model, learned.padding.copy(), learned.capture_s
        self._choose = random.Random(seed)
        self._run = StepLoad(0, 0.0, 0, 0.0)

    def launch_s(self, load: StepLoad) -> float:
        self._run, captures = self._padding.run(load)
        return captures * self._capture_s

    def predict(self, load: StepLoad) -> float | None:
        if (predicted := self._model.predict(self._run)) is None:
            return None
        return predicted * self._choose.choice(self._model.ratios(self._run))
