"""The driver of sessions on an engine in this process: each turn is sent when the answer before it is complete."""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.bench.drive import Bench, answer_params
from quire.bench.load.sessions import Session
from quire.bench.metrics import percentile
from quire.core.steplog import StepRecord
from quire.types import ConfigError


@dataclass(slots=True)
class ServedTurn:
    """The times of one turn, in seconds since the start of the run."""

    session: int
    turn: int
    prompt_len: int
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """Return the time from the turn's sending to its last token."""
        return self.token_times_s[-1] - self.sent_s


@dataclass(slots=True)
class SessionsRun:
    """The turns of all sessions in the order of their sending, and the steps of the engine."""

    turns: list[ServedTurn]
    steps: list[StepRecord]
    duration_s: float


@dataclass(slots=True)
class _OpenSession:
    """A session in progress: the tokens of its context, and its next turn."""

    session: Session
    context: list[int]
    next_turn: int = 0


def run_sessions(bench: Bench, sessions: Sequence[Session], params: dict[str, Any]) -> SessionsRun:
    """Serve all sessions, and wait for the last answer.

    Raises:
        ConfigError: if a session outgrows the context.
    """
    longest = max(session.length for session in sessions)
    if longest > bench.info.max_model_len:
        raise ConfigError(
            f"the longest session has {longest} tokens, but max_model_len is {bench.info.max_model_len}; "
            "choose a shorter --preset or a smaller --workload-scale"
        )
    states = [_OpenSession(session, list(session.system)) for session in sessions]
    due = [(session.start_s, index) for index, session in enumerate(sessions)]
    heapq.heapify(due)
    running: dict[str, ServedTurn] = {}
    turns: list[ServedTurn] = []
    steps: list[StepRecord] = []
    begin = time.monotonic()
    while due or running:
        now = time.monotonic() - begin
        while due and due[0][0] <= now:
            at_s, index = heapq.heappop(due)
            state = states[index]
            turn = state.session.turns[state.next_turn]
            state.context += turn.new_tokens
            one = ServedTurn(index, state.next_turn, len(state.context), at_s)
            running[bench.add(list(state.context), answer_params(params, turn.answer_len))] = one
            turns.append(one)
            state.next_turn += 1
        if not running:
            time.sleep(max(due[0][0] - now, 0.0))
            continue
        outputs = bench.poll(steps)
        now = time.monotonic() - begin
        for output in outputs:
            one = running[output.id]
            state = states[one.session]
            one.token_times_s += [now] * len(output.token_ids)
            one.cached_tokens = output.num_cached_tokens
            state.context += output.token_ids
            if output.finish_reason is not None:
                del running[output.id]
                if state.next_turn < len(state.session.turns):
                    pause_s = state.session.turns[state.next_turn].pause_s
                    heapq.heappush(due, (now + pause_s, one.session))
    duration_s = time.monotonic() - begin
    bench.settle()
    return SessionsRun(turns, steps, duration_s)


def session_figures(run: SessionsRun) -> dict[str, Any]:
    """Return the figures of a run. Later turns are those after the first, whose context is largely known."""
    ttfts = [turn.ttft_s * 1e3 for turn in run.turns]
    later = [turn.ttft_s * 1e3 for turn in run.turns if turn.turn]
    latencies = [turn.latency_s * 1e3 for turn in run.turns]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for turn in run.turns:
        first.setdefault(turn.session, turn.sent_s)
        last[turn.session] = turn.token_times_s[-1]
    output_tokens = sum(len(turn.token_times_s) for turn in run.turns)
    return {
        "sessions": len(first),
        "turns": len(run.turns),
        "duration": run.duration_s,
        "mean_ttft_ms": statistics.fmean(ttfts),
        "p99_ttft_ms": percentile(ttfts, 99),
        "mean_later_ttft_ms": statistics.fmean(later) if later else None,
        "mean_turn_latency_ms": statistics.fmean(latencies),
        "mean_session_s": statistics.fmean(last[index] - first[index] for index in first),
        "output_throughput": output_tokens / run.duration_s,
        "cached_share": sum(t.cached_tokens for t in run.turns) / sum(t.prompt_len for t in run.turns),
    }
