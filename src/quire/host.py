"""The host part of an engine: scheduler, step loop and structured output, around the ranks that compute (`rank.py`).

`build_engine` drives the start-up of all ranks, and times each phase. The first rank is in this process, the others in
processes of their own (`ranks/`). Callers that have not imported torch use `start.py`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from quire.compilers import NO_COMPILERS, Compilers
from quire.config import EngineConfig
from quire.core import collector
from quire.core.engine import Engine
from quire.core.grammar_interface import Grammar, NoGrammar
from quire.core.snapshot_pages import SnapshotPages
from quire.disaggregation.start import Prefills, start_prefills
from quire.frontend.block_secret import block_secret
from quire.frontend.location import locate_model, locate_tokenizer
from quire.grammar.checker import Checker
from quire.grammar.compiler import Compiler
from quire.grammar.library import LibraryGrammar
from quire.models.config.load import load_spec
from quire.rank import Rank
from quire.ranks.group import Peers, start_peers
from quire.ranks.messages import encode_phase
from quire.ranks.timeline import PhaseSpans, Spans, relative_spans
from quire.types import COMMON_STEP_TOKENS, EngineInfo, QuireError
from quire.wiring import Connect, connect_exporter, connect_prefills, connect_tiers, wire_engine
from quire.worker.executor import LocalExecutor

log = logging.getLogger("quire")


def build_engine(
    config: EngineConfig,
    imports_s: float = 0.0,
    group: Peers | None = None,
    secret: bytes | None = None,
    exports: int | None = None,
    compilers: Compilers = NO_COMPILERS,
) -> tuple[Engine, EngineInfo]:
    """Load the model and build an engine.

    Args:
        config: settings.
        imports_s: seconds that the caller spent importing this module; they are reported as a phase of the start-up.
        group: the processes of the other ranks; None starts them here.
        secret: key of the names of KV blocks, which engines of one deployment share; None picks one.
        exports: descriptor of the memory in which a prefill engine shows its blocks; None for other engines.
        compilers: the processes that compile kernels of the first rank.

    Returns:
        The engine, and its sizes and start-up times.

    Raises:
        ConfigError: if the settings do not suit the model or the machine.
        ModelError: if the model cannot be found or read.
        EngineDead: if a rank ended.
    """
    clock = _PhaseClock(imports_s)
    secret = secret or block_secret(config)
    config = replace(config, cache_secret=secret.hex())  # for the ranks, too
    if config.num_prefills and config.kv_cache_memory is None:  # all engines are on one device
        share = config.memory_utilization / (1 + config.num_prefills)
        config = replace(config, memory_utilization=share)
    group = start_peers(config) if group is None else group
    prefills: Prefills | None = None
    try:
        prefills = start_prefills(config, secret)
        path = locate_model(config.model, config.revision).path
        times = PhaseSpans()
        times.note("import", time.time() - imports_s, time.time())
        with times.during("config"):
            rank = Rank(config, path, load_spec(path), exports=exports, compilers=compilers)
        clock.end("config")
        with closing(rank), rank.guard():
            return _build(rank, _StartUp(rank, group, times), group, path, clock, secret, prefills)
    except BaseException:
        group.kill()
        if prefills is not None:
            prefills.close()
        raise


class _StartUp:
    """The start-up of all ranks, phase by phase."""

    def __init__(self, rank: Rank, group: Peers, times: PhaseSpans) -> None:
        self._rank, self._group, self._times = rank, group, times

    def run(self, phase: str, argument: int = 0) -> int:
        """Run a phase on all ranks at the same time. Return the smallest result."""
        self._group.send(encode_phase(phase, argument))
        try:
            with self._group.watched(), self._times.during(phase):
                result = self._rank.run_phase(phase, argument)
        except QuireError:
            raise
        except Exception as error:  # often the consequence of an error of another rank
            raise self._group.give_up(error) from error
        return min([result, *self._group.collect()])

    def spans(self) -> list[Spans]:
        """Return when each rank ran its phases, in the order of ranks, relative to the first begin."""
        return relative_spans([self._times.spans, *self._group.spans()])


def _build(
    rank: Rank,
    start: _StartUp,
    group: Peers,
    path: Path,
    clock: _PhaseClock,
    secret: bytes | None,
    prefills: Prefills | None,
) -> tuple[Engine, EngineInfo]:
    config = rank.config
    group.start(config, path)
    group.collect()
    start.run("connect", group.open_meeting())
    max_model_len = start.run("fit_context")
    clock.end("device")
    start.run("load", max_model_len)
    clock.end("weights")
    start.run("compile")
    clock.end("warm_up")
    snapshots = start.run("count_snapshots", start.run("measure"))
    start.run("allocate", start.run("count_blocks", snapshots))
    size = rank.size
    if size.max_model_len < (config.max_model_len or 1):
        log.warning(
            "max_model_len lowered from %d to %d, the longest context that fits into memory",
            config.max_model_len,
            size.max_model_len,
        )
    clock.end("kv_cache")
    if prefills is not None:
        prefills.processes.await_ready()
    rows = start.run("host_rows", -start.run("least_pages"))
    start.run("open_tiers", rows)
    start.run("rehearse")
    engine = wire_engine(
        config,
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        max_model_len=size.max_model_len,
        executor=group.executor(LocalExecutor(rank.runner, rank.guard)),
        grammar=pick_grammar(config, path, rank.spec.vocab_size),
        groups=size.groups,
        has_states=rank.has_states,
        num_snapshots=size.num_snapshots,
        # The kernels of latent attention do not read shared blocks once.
        shares_prefix=config.shared_prefix and rank.backend.reads_shared and rank.spec.latent is None,
        step_sizes=_step_sizes(rank),
        drafts=config.spec_tokens or 0,
        connect=_connect(rank, group, rows, prefills),
        secret=secret,
    )
    collector.settle()
    clock.end("warm_up")
    start.run("finish")
    clock.end("weights")
    info = replace(_describe(rank, clock.phases_s), rank_phases_s=start.spans())
    for number, line in enumerate(info.start_up_of_ranks()):
        log.info("start-up of rank %d (begin+duration): %s", number, line)
    return engine, info


def _step_sizes(rank: Rank) -> Sequence[int]:
    """Return the tokens of steps with prompts that need no padding, if others are padded."""
    captures = rank.device.type == "cuda" and rank.config.cuda_graphs and rank.backend.capturable
    return COMMON_STEP_TOKENS if captures else ()


def _connect(rank: Rank, group: Peers, rows: int, prefills: Prefills | None) -> Connect | None:
    """Return what makes the connector to other engines, or to host memory and disk, or None without any."""
    if rank.exports is not None:
        return connect_exporter
    if prefills is not None:
        mover = rank.open_peers()
        prefills.report_to(mover)
        return connect_prefills(mover, prefills.processes, rank.size.block_bytes)
    if rank.mover is None:
        return None
    files, found = rank.stored_blocks()
    block_bytes = rank.size.block_bytes * rank.config.num_ranks
    return connect_tiers(
        group.mover(rank.mover),
        rows=rows,
        files=files,
        found=found,
        block_bytes=block_bytes,
        pages=SnapshotPages(len(rank.size.groups), rank.first_page, rank.pages),
    )


def pick_grammar(config: EngineConfig, model: Path, vocab_size: int) -> Grammar:
    """Return the compiler of structured output, which loads the tokenizer when it is first used.

    Without a tokenizer, or on Windows, the returned grammar refuses every specification.

    Args:
        model: folder or file of the model, whose tokenizer is used unless `config` names another.
    """
    if config.skip_tokenizer_init:
        return NoGrammar()
    if sys.platform == "win32":
        return NoGrammar(
            "Linux or macOS: a specification is compiled in a forked process, which Windows lacks"
        )
    tokenizer = model if config.tokenizer is None else locate_tokenizer(config.tokenizer, config.revision)
    return LibraryGrammar(Compiler(Checker(tokenizer, vocab_size)), vocab_size)


def _describe(rank: Rank, phases_s: dict[str, float]) -> EngineInfo:
    config, spec, size = rank.config, rank.spec, rank.size
    return EngineInfo(
        model=config.model,
        family=spec.family,
        vocab_size=spec.vocab_size,
        max_model_len=size.max_model_len,
        eos_ids=list(spec.eos_token_ids),
        generates=spec.has_head,
        device=str(rank.device),
        dtype=str(rank.dtype).removeprefix("torch."),
        kv_dtype=rank.spec.kv_codes.dtype if rank.spec.kv_codes else str(rank.dtype).removeprefix("torch."),
        attention=rank.backend.name,
        max_num_seqs=config.max_num_seqs or 0,
        max_num_batched_tokens=config.max_num_batched_tokens or 0,
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        block_bytes=size.block_bytes,
        kv_groups=[(len(group.layers), group.window) for group in size.groups],
        weight_bytes=rank.weight_bytes,
        spec_method=config.spec_method,
        draft_weight_bytes=rank.draft_weight_bytes,
        num_parameters=spec.num_parameters,
        state_bytes=size.state_bytes,
        states_per_request=1 + (config.spec_tokens or 0),
        num_snapshots=size.num_snapshots,
        shared=rank.shared_blocks(),
        reserved_bytes=rank.worker.reserved_bytes,
        prefix_caching=bool(config.prefix_caching),
        eviction=config.eviction,
        phases_s=phases_s,
    )


class _PhaseClock:
    """Wall time of each start-up phase. A phase may have several parts, whose times are added."""

    def __init__(self, imports_s: float) -> None:
        self.phases_s = {"import": imports_s}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.phases_s[name] = self.phases_s.get(name, 0.0) + now - self._last
        self._last = now
