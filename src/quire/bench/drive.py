"""Load on an engine in this process.

Requests are added at their arrival times, whatever is still running (open loop), and every token gets a time stamp. The
work per output is that of `LLM.generate`, without detokenization.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from quire.assembly.device import pick_device, pick_dtype
from quire.assembly.parts import prefill_rule
from quire.bench.cost import CostModel, Machine
from quire.bench.energy import energy_meter
from quire.bench.load.workloads import Workload
from quire.bench.machine import measure
from quire.bench.run import Run, ServedRequest
from quire.config import EngineConfig
from quire.core.steplog import StepRecord
from quire.frontend.client.base import InProcessClient
from quire.frontend.location import locate_model
from quire.frontend.output import OutputAssembler, RequestState
from quire.frontend.processor import InputProcessor
from quire.frontend.tokenizer.tokenizer import NoTokenizer
from quire.host import build_engine
from quire.models.config.load import load_spec
from quire.types import ConfigError, DraftCounts, EngineInfo, EngineOutputs, SamplingParams

_POLL_S = 1.0


class Bench:
    """An engine under load, with its cost model and its machine's limits.

    The limits are measured before the engine is built, unless they are given.
    """

    def __init__(self, config: EngineConfig, machine: Machine | None = None) -> None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size must be 1 for an engine in this process, got {config.data_parallel_size}; measure "
                "replicas with `quire serve` and `quire bench serve`"
            )
        self.spec = load_spec(locate_model(config.model, config.revision).path)
        if machine is None:
            device = pick_device(config.device)
            machine = measure(device, pick_dtype(config.dtype, self.spec, device))
        self.machine, self.config = machine, config
        self.client = InProcessClient(*build_engine(config))
        self.info = self.client.info
        self.costs = CostModel(
            self.spec, self.info, prefill_rule(config, self.spec, torch.device(self.info.device))
        )
        self._meter = energy_meter(self.info.device)
        self._log = self.client.engine.log
        self._processor = InputProcessor(
            NoTokenizer(), self.info.vocab_size, self.info.max_model_len, self.info.eos_ids, config.seed
        )
        self._assembler = OutputAssembler()
        self._count = 0

    def run(
        self,
        work: Workload,
        params: dict[str, Any],
        arrivals_s: Sequence[float] | None = None,
        max_concurrency: int | None = None,
        show_progress: bool = False,
    ) -> Run:
        """Serve a workload and wait for its last request. Every answer has exactly the length that `work` gives.

        Args:
            work: prompts and output lengths.
            params: sampling parameters of all requests.
            arrivals_s: arrival time of each request in seconds, ascending; default: all at once.
            max_concurrency: limit of open requests; default: none.
            show_progress: whether to show a progress bar on a terminal.

        Raises:
            ConfigError: if a request does not fit the context.
        """
        check_fits(work, self.info)
        arrivals_s = arrivals_s or [0.0] * len(work)
        served = [ServedRequest(len(ids), at) for (ids, _), at in zip(work, arrivals_s)]
        waiting = deque((ids, answer_params(params, count), one) for (ids, count), one in zip(work, served))
        running: dict[str, ServedRequest] = {}
        steps: list[StepRecord] = []
        limit = max_concurrency or math.inf
        bar = tqdm(
            total=len(work),
            desc="Serving",
            unit="req",
            disable=None if show_progress else True,
            dynamic_ncols=True,
        )
        tokens = 0
        drafts = self.drafts()
        held = False  # whether max_concurrency holds the next request back
        with bar, self._meter.measure() as energy:
            begin = time.monotonic()  # here, because reading the counters takes a moment
            while waiting or running:
                now = time.monotonic() - begin
                while waiting and waiting[0][2].start_s <= now and len(running) < limit:
                    ids, sampling, one = waiting.popleft()
                    if held:
                        one.start_s = now
                    running[self.add(ids, sampling)] = one
                held = bool(waiting) and len(running) >= limit
                if not running:
                    time.sleep(max(waiting[0][2].start_s - now, 0.0))
                    continue
                outputs = self.poll(steps)
                now = time.monotonic() - begin
                tokens += sum(len(output.token_ids) for output in outputs)
                bar.set_postfix_str(f"{tokens / max(now, 1e-9):,.0f} tok/s out", refresh=False)
                bar.update(_book(outputs, running, now))
        self.settle()
        return Run(served, steps, begin, energy=energy, drafts=self.drafts().since(drafts))

    def drafts(self) -> DraftCounts:
        """Return the counts of draft tokens since the start of the engine."""
        return DraftCounts.of_totals(asdict(self._log.totals))

    def add(self, ids: Sequence[int], params: SamplingParams) -> str:
        """Queue a request and return its id."""
        name = str(self._count)
        self._count += 1
        requests = self._processor.process(name, ids, params)
        self._assembler.add(RequestState(name, None, requests, None))
        self.client.add(requests[0])
        return name

    def poll(self, steps: list[StepRecord]) -> EngineOutputs:
        """Let the engine run a step and return its outputs. Append the records of new steps to `steps`."""
        before = self._log.totals.steps
        outputs = self.client.poll(_POLL_S)
        self._assembler.apply(outputs)
        if new := self._log.totals.steps - before:
            steps += self._log.newest(new)
        return outputs

    def settle(self, abort: Sequence[str] = ()) -> None:
        """Abort the requests `abort`, and run the engine until no request is left."""
        self.client.abort(list(abort))
        while self.client.engine.has_work:
            self.poll([])

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_fits(work: Workload, info: EngineInfo) -> None:
    """Raise ConfigError if a request exceeds the context, which would end its answer early."""
    longest = max(len(ids) + count for ids, count in work)
    if longest > info.max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens, but max_model_len is {info.max_model_len}; "
            "choose another workload, or --input-len and --output-len that fit"
        )


def answer_params(params: dict[str, Any], count: int) -> SamplingParams:
    """Return sampling parameters with the fields `params` that generate exactly `count` tokens."""
    return SamplingParams(**{**params, "max_tokens": count, "ignore_eos": True})


def _book(outputs: EngineOutputs, running: dict[str, ServedRequest], now_s: float) -> int:
    """Store the time stamps of the tokens of one poll, and return how many requests finished."""
    ended = 0
    for output in outputs:
        one = running[output.id]
        for _ in output.token_ids:
            one.token_times_s.append(now_s)
        one.cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            one.error = output.error.message if output.error else None
            del running[output.id]
            ended += 1
    return ended


def synchronize(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
