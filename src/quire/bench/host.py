"""Host overhead of a step: the real scheduler and step loop, with an executor that does nothing. Needs no torch.

Prompts differ in length, so that a share of the rows gets a new block in each step, as in a server.
"""

from __future__ import annotations

import statistics
import time

from quire.core import collector
from quire.core.block_pool import LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy
from quire.core.prefix_cache import HashPrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.stats import figures_of, load_of
from quire.core.steplog import StepLog
from quire.frontend.client import ipc as msg
from quire.types import EngineRequest, SamplingParams
from quire.worker.constant_executor import ConstantExecutor


def host_cost(
    rows: int = 256, steps: int = 1000, prompt_len: int = 128, block_size: int = 16
) -> dict[str, float]:
    """Measure the host time per decode step.

    Args:
        rows: requests in the batch.
        steps: decode steps to time.
        prompt_len: tokens per prompt.
        block_size: tokens per block.

    Returns:
        The median and the 99th percentile of a step, and the medians of its parts, in microseconds: scheduling, retiring,
        and the message that an engine process sends.
    """
    max_len = prompt_len + block_size + steps + 64
    pool = BlockPool(rows * -(-max_len // block_size), LRU())
    log = StepLog()
    limits = SchedulerLimits(rows, 8192, max_len, block_size)
    scheduler = Scheduler(Blocks(pool, HashPrefixCache(pool, block_size), block_size), Policy(), limits, log)
    engine = Engine(scheduler, ConstantExecutor(1000), NoGrammar(), 2, log)
    for i in range(rows):
        prompt = [(7 * i + j) % 1000 for j in range(prompt_len + i % block_size)]
        engine.add(EngineRequest(f"r{i}", prompt, SamplingParams(max_tokens=max_len)))
    while scheduler.waiting or not len(log) or log.last.prompt_tokens:
        engine.step()
    collector.settle()  # as in a process with an engine
    times, messages = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        outputs = engine.step()
        end = time.perf_counter()
        msg.encode(msg.Outputs(outputs.parts, load_of(engine, rows), figures_of(engine, log.ended)))
        times.append(end - begin)
        messages.append(time.perf_counter() - end)
    records = list(log)[-steps:]
    return {
        "rows": rows,
        "steps": steps,
        "step_us": statistics.median(times) * 1e6,
        "step_p99_us": sorted(times)[int(0.99 * steps)] * 1e6,
        "schedule_us": statistics.median(r.schedule_s for r in records) * 1e6,
        "retire_us": statistics.median(r.retire_s for r in records) * 1e6,
        "message_us": statistics.median(messages) * 1e6,
    }
