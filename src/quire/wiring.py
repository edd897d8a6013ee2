"""The wiring of scheduler, step loop and executor, which `host.py` and `dry_run.py` share. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from quire.config import EngineConfig
from quire.core import policy
from quire.core.block_pool import FIFO, LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.cache_journal import CacheJournal, NameJournal, NoJournal
from quire.core.connector import KVConnector
from quire.core.draft_depth import AdaptiveDepth, DraftDepth, FixedDepth, NoDrafts
from quire.core.engine import Engine
from quire.core.exporter import BlockExporter
from quire.core.fetches import FetchBook
from quire.core.grammar_interface import Grammar
from quire.core.host_tier import DiskTier, HostTier
from quire.core.kv_tiers import KVTiers
from quire.core.policy import Policy
from quire.core.prefix_cache import HashPrefixCache, NoPrefixCache, PrefixCache
from quire.core.prompt_budget import FixedBudget, LatencyBudget, PromptBudget
from quire.core.remote_prefill import PrefillEngines, RemotePrefill
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.shared_prefix import CommonBlocks, NoSharedPrefix, SharedPrefix
from quire.core.snapshot_pages import NO_PAGES, SnapshotPages
from quire.core.snapshot_policy import SnapshotPolicy
from quire.core.snapshot_pool import SnapshotPool
from quire.core.snapshots import NoSnapshots, Snapshots
from quire.core.steplog import StepLog
from quire.types import BlockKey, BlockMover, Executor, KVGroup, RequestTargets, Totals, max_logit_rows

# Makes the connector of an engine from its blocks, its prefix cache and its counters.
Connect = Callable[[Blocks, HashPrefixCache, Totals], KVConnector]


def queue_depth(config: EngineConfig) -> int:
    """Return the number of launched steps at which the step loop retires the oldest one.

    That is one for each stage of the pipeline, and with overlap one more that the host prepares meanwhile.
    """
    return config.pipeline_parallel_size + config.overlap


def wire_engine(
    config: EngineConfig,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    executor: Executor,
    grammar: Grammar,
    groups: Sequence[KVGroup] = (KVGroup(),),
    has_states: bool = False,
    num_snapshots: int = 0,
    shares_prefix: bool = False,
    step_sizes: Sequence[int] = (),
    drafts: int = 0,
    connect: Connect | None = None,
    secret: bytes | None = None,
    log: StepLog | None = None,
) -> Engine:
    """Build the host side of an engine around an executor.

    Args:
        config: resolved settings.
        num_blocks: number of blocks of the KV cache.
        block_size: tokens per block.
        max_model_len: longest context in tokens.
        executor: runs the steps.
        grammar: structured output.
        groups: the groups of layers, each of which has block tables of its own.
        has_states: layers keep a state per request, so a prefix can be reused up to a snapshot of it only.
        num_snapshots: number of rows for snapshots.
        drafts: most draft tokens of a request in a step; 0 if the executor drafts none.
        connect: makes the connector, for an engine that caches prefixes; None: blocks stay on the device.
        log: gets a record of every step; None makes one.
        secret: key of the names of blocks; engines with the same one give equal blocks equal names. None picks one.
        step_sizes: tokens of steps that need no padding, ascending, if others are padded.
        shares_prefix: look for blocks that rows share, for an attention back end that reads them once.
    """
    evictor = FIFO if config.eviction == "fifo" else LRU
    pool = BlockPool(num_blocks, evictor())
    cache: PrefixCache = NoPrefixCache(len(groups))
    # Routers of replicas read the names of cached blocks, and so does shedding, which needs predictions.
    reports_names = config.data_parallel_size > 1 or config.learns_step_times
    journal: CacheJournal = NameJournal() if reports_names else NoJournal()
    snapshots: Snapshots = NoSnapshots()
    if config.prefix_caching:
        if has_states:
            places = _snapshot_policy(config, block_size)
            snapshots = SnapshotPool(num_snapshots, block_size, evictor(), places)
        cache = HashPrefixCache(pool, block_size, groups, secret, journal, snapshots)
    limits = _limits(config, max_model_len, block_size, drafts)
    log = StepLog() if log is None else log
    blocks = Blocks(pool, cache, block_size, groups, limits.max_num_batched_tokens, snapshots)
    whole = [index for index, group in enumerate(groups) if group.window is None]
    shared: SharedPrefix = NoSharedPrefix()
    if shares_prefix and whole:
        shared = CommonBlocks(block_size, whole[0])
    connector = None
    if connect is not None and isinstance(cache, HashPrefixCache):
        connector = connect(blocks, cache, log.totals)
    depths, prompts = _draft_depth(config, drafts), prompt_budget(config, limits, step_sizes, log.totals)
    scheduler = Scheduler(blocks, _policy(config), limits, log, shared, depths, prompts, connector)
    return Engine(scheduler, executor, grammar, queue_depth(config), log, config.check_invariants, journal)


def _policy(config: EngineConfig) -> Policy:
    return Policy(
        order=policy.priority if config.scheduling_policy == "priority" else policy.fcfs,
        admits=policy.static if config.batching == "static" else policy.continuous,
        chunk=policy.chunked if config.chunked_prefill else policy.whole,
    )


def _limits(config: EngineConfig, max_model_len: int, block_size: int, drafts: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        max_model_len=max_model_len,
        block_size=block_size,
        keeps_kv=config.kv_layout != "none",
        lookahead=config.overlap,
        stages=config.pipeline_parallel_size,
        mixed_prefill_tokens=config.mixed_prefill_tokens or config.max_num_batched_tokens or 1,
        max_logit_rows=max_logit_rows(config.max_num_seqs or 1, drafts),
        targets=RequestTargets.of_ms(config.target_itl, config.target_ttft),
    )


def prompt_budget(
    config: EngineConfig,
    limits: SchedulerLimits,
    step_sizes: Sequence[int] = (),
    totals: Totals | None = None,
) -> PromptBudget:
    """Return what chooses the prompt tokens of steps that also decode, from the latency settings of an engine."""
    if not config.learns_step_times:
        return FixedBudget(limits.mixed_prefill_tokens)
    most = limits.mixed_prefill_tokens if config.target_itl is None else limits.max_num_batched_tokens
    return LatencyBudget(most, limits.targets, config.prefill_slowdown or math.inf, step_sizes, totals)


def connect_exporter(blocks: Blocks, cache: HashPrefixCache, totals: Totals) -> KVConnector:
    """Make the connector of a prefill engine."""
    return BlockExporter(blocks)


def connect_prefills(mover: BlockMover, engines: PrefillEngines, block_bytes: int) -> Connect:
    """Return what makes the connector of a decode engine to its prefill engines."""

    def connect(blocks: Blocks, cache: HashPrefixCache, totals: Totals) -> KVConnector:
        return RemotePrefill(FetchBook(blocks, cache), mover, engines, totals, block_bytes)

    return connect


def connect_tiers(
    mover: BlockMover,
    *,
    rows: int,
    files: int,
    found: Sequence[BlockKey],
    block_bytes: int,
    pages: SnapshotPages = NO_PAGES,
) -> Connect:
    """Return what makes the connector to host memory and disk.

    Args:
        mover: the worker half.
        rows: rows of host memory.
        files: most files of the disk; 0 without one.
        found: keys of the files that exist, oldest first.
        block_bytes: bytes of a block on all ranks.
        pages: how snapshots of states are kept.
    """

    def connect(blocks: Blocks, cache: HashPrefixCache, totals: Totals) -> KVConnector:
        disk = DiskTier(files, found)
        book = FetchBook(blocks, cache, pages)
        return KVTiers(book, mover, HostTier(rows), disk, totals, block_bytes)

    return connect


def _snapshot_policy(config: EngineConfig, block_size: int) -> SnapshotPolicy:
    """Return where to take snapshots. With drafts a row may end behind the place, so answers have none."""

    def whole_blocks(tokens: int) -> int:
        return -(-tokens // block_size) * block_size

    answers = config.state_snapshot_answers if config.spec_method == "off" else 0
    return SnapshotPolicy(block_size, whole_blocks(config.state_snapshot_interval), whole_blocks(answers))


def _draft_depth(config: EngineConfig, drafts: int) -> DraftDepth:
    if not drafts:
        return NoDrafts()
    return AdaptiveDepth(drafts) if config.spec_adaptive else FixedDepth(drafts)
