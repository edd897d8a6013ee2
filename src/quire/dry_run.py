"""An engine without a model: the real scheduler and step loop over an executor that answers with the prompt.

It imports no torch and starts in a fraction of a second. The folder of the model is read for its vocabulary size,
context length and end of sequence; weights are not needed. Settings of the scheduler work as with a model
(`wiring.py`). Settings of the model and the device, such as dtype and attention, have no effect.
"""

from __future__ import annotations

import time

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.frontend.location import locate_model
from quire.models.config.load import load_spec
from quire.types import ConfigError, EngineInfo
from quire.wiring import wire_engine
from quire.worker.echo_executor import EchoExecutor
from quire.worker.memory.kv_groups import choose_groups

_TOKENS = 262_144  # size of the imaginary KV cache in tokens, unless kv_cache_memory sets it
_TOKEN_BYTES = 1024  # assumed size of one token in all layers


def build_dry_run(
    config: EngineConfig, step_s: float, secret: bytes | None = None
) -> tuple[Engine, EngineInfo]:
    """Build an engine that loads no model.

    Args:
        config: settings; `model` names the folder to read.
        step_s: duration of a step in seconds.
        secret: key of the names of KV blocks; None picks one.

    Raises:
        ConfigError: if settings contradict each other or the model.
        ModelError: if the model's folder or config is missing or not supported.
    """
    began = time.perf_counter()
    spec = load_spec(locate_model(config.model, config.revision).path)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {spec.max_model_len} positions of {config.model}"
        )
    config = config.resolved(0, spec.max_model_len)
    max_model_len = config.max_model_len or spec.max_model_len
    layout = config.kv_layout
    kv = choose_groups(
        spec.kv_layouts(spec.dtype), max_model_len, paged=layout == "paged", keeps_kv=layout != "none"
    )
    # A block of a model with one group holds all layers, otherwise those of one group only.
    token_bytes = _TOKEN_BYTES if len(kv.groups) == 1 else _TOKEN_BYTES * len(kv.parts) // spec.num_layers
    memory = config.kv_cache_memory or _TOKENS * _TOKEN_BYTES
    tokens = memory // token_bytes
    eos = spec.eos_token_ids
    engine = wire_engine(
        config,
        num_blocks=max(1, tokens // config.block_size),
        block_size=config.block_size,
        max_model_len=max_model_len,
        executor=EchoExecutor(spec.vocab_size, eos[0] if eos else 0, frozenset(eos), step_s),
        grammar=NoGrammar("a model, and this is a dry run"),
        groups=kv.groups,
        has_states=any(spec.mixes),
        num_snapshots=config.state_snapshots or config.max_num_seqs or 1,
        secret=secret,
    )
    return engine, EngineInfo(
        model=config.model,
        family=spec.family,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_ids=list(eos),
        device="none",
        dtype="none",
        attention="none",
        max_num_seqs=engine.scheduler.limits.max_num_seqs,
        max_num_batched_tokens=engine.scheduler.limits.max_num_batched_tokens,
        num_blocks=engine.scheduler.pool.num_blocks,
        block_size=config.block_size,
        block_bytes=config.block_size * token_bytes,
        kv_groups=[(len(group.layers), group.window) for group in kv.groups],
        weight_bytes=0,
        num_parameters=spec.num_parameters,
        prefix_caching=bool(config.prefix_caching),
        eviction=config.eviction,
        phases_s={"dry_run": time.perf_counter() - began},
    )
