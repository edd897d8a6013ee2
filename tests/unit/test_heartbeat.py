"""The heartbeat of the engine process: which silences are reported as overdue."""

from __future__ import annotations

from quire.serve.engine_heartbeat import Heartbeat


class Engine:
    """A simulated process with its own clock: during `run` it may use CPU time and may answer."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 0.0
        self.asked = 0
        self.heartbeat = Heartbeat(self._ask, lambda: self.cpu_s, lambda: self.now_s)

    def _ask(self) -> None:
        self.asked += 1

    def run(self, seconds: int, answers: bool, works: bool = False) -> float:
        """Advance the clock and return the longest silence reported meanwhile."""
        worst = 0.0
        for _ in range(seconds):
            self.heartbeat.check()
            self.now_s += 1
            self.cpu_s += 0.5 if works else 0.001
            if answers:
                self.heartbeat.beat()
            worst = max(worst, self.heartbeat.overdue_s())
        return worst


def test_an_engine_that_answers_is_never_overdue() -> None:
    engine = Engine()
    assert engine.run(100, answers=True) == 0 and engine.asked == 100
    assert engine.run(100, answers=True, works=True) == 0


def test_a_stopped_process_is_reported_within_some_seconds_and_recovers() -> None:
    engine = Engine()
    engine.run(10, answers=True)
    assert engine.run(5, answers=False) == 0
    assert 5 < engine.run(3, answers=False) < 10
    assert engine.asked == 11, "no question is asked twice"
    engine.heartbeat.beat()
    assert engine.heartbeat.overdue_s() == 0 and engine.run(20, answers=True) == 0


def test_a_process_that_stops_in_the_middle_of_a_long_step() -> None:
    engine = Engine()
    assert engine.run(20, answers=False, works=True) == 0
    assert engine.run(10, answers=False) > 20


def test_a_step_that_compiles_or_captures_is_not_overdue() -> None:
    engine = Engine()
    engine.run(5, answers=True)
    assert engine.run(55, answers=False, works=True) == 0
    engine.heartbeat.beat()
    assert engine.run(300, answers=False, works=True) == 0, "this model's steps take long"


def test_a_process_that_only_spins() -> None:
    engine = Engine()
    engine.run(5, answers=True)
    assert engine.run(90, answers=False, works=True) > 60
