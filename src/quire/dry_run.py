"""An engine without a model: the real scheduler, blocks and step loop over an executor that echoes prompts.

Beside build.py for callers that want no torch: it starts in a fraction of a second. The model's folder is
read for its vocabulary size, context length and end of sequence; the weights need not be there.
"""

from __future__ import annotations

import time

from quire.config import EngineConfig
from quire.core.block_pool import LRU, BlockPool
from quire.core.engine import Engine
from quire.core.grammar import NoGrammar
from quire.core.policy import Policy, fcfs, priority
from quire.core.prefix_cache import HashPrefixCache, NoPrefixCache, PrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.steplog import StepLog
from quire.frontend.location import locate_model
from quire.models.config.load import load_spec
from quire.types import ConfigError, EngineInfo
from quire.worker.echo_executor import EchoExecutor

_DEPTH = 2
_TOKENS = 262_144  # of imaginary KV cache, unless kv_cache_memory says otherwise
_TOKEN_BYTES = 1024  # what one of them is taken to cost


def build_dry_run(config: EngineConfig, step_s: float) -> tuple[Engine, EngineInfo]:
    """An engine whose steps take `step_s` seconds. Raises ConfigError or ModelError as build_engine does."""
    began = time.perf_counter()
    spec = load_spec(locate_model(config.model, config.revision).path)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {spec.max_model_len} positions of {config.model}"
        )
    config = config.resolved(0, spec.max_model_len)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        max_model_len=config.max_model_len or spec.max_model_len,
        block_size=config.block_size,
    )
    tokens = _TOKENS if config.kv_cache_memory is None else config.kv_cache_memory // _TOKEN_BYTES
    pool = BlockPool(max(1, tokens // limits.block_size), LRU())
    cache: PrefixCache = (
        HashPrefixCache(pool, limits.block_size) if config.prefix_caching else NoPrefixCache()
    )
    policy = Policy(order=priority if config.scheduling_policy == "priority" else fcfs)
    log = StepLog()
    eos = spec.eos_token_ids
    executor = EchoExecutor(spec.vocab_size, eos[0] if eos else 0, frozenset(eos), step_s)
    scheduler = Scheduler(pool, cache, policy, limits, log)
    grammar = NoGrammar("a model, and this is a dry run")
    engine = Engine(scheduler, executor, grammar, _DEPTH, log, config.check_invariants)
    return engine, EngineInfo(
        model=config.model,
        family=spec.family,
        vocab_size=spec.vocab_size,
        max_model_len=limits.max_model_len,
        eos_ids=list(eos),
        device="none",
        dtype="none",
        attention="none",
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_blocks=pool.num_blocks,
        block_size=limits.block_size,
        block_bytes=limits.block_size * _TOKEN_BYTES,
        weight_bytes=0,
        num_parameters=spec.num_parameters,
        prefix_caching=bool(config.prefix_caching),
        phases_s={"dry_run": time.perf_counter() - began},
    )
