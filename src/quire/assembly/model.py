"""The model of a rank, built from its checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from quire.assembly.parts import layer_parts
from quire.assembly.stages import held_elsewhere
from quire.attention.base import AttentionBackend
from quire.config import EngineConfig
from quire.kernels import Kernels
from quire.layers.env import Env
from quire.models.checkpoint.checked import CheckedCheckpoint
from quire.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from quire.models.decoder import DecoderModel, Model
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.experts import ALL_EXPERTS, ExpertShard
from quire.parallel.ranks import Parallel
from quire.parallel.stage import WHOLE, Stage
from quire.quant.spec import served_format

log = logging.getLogger("quire")


def served_spec(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the format in which its weights are served.

    Raises:
        ConfigError: if `config` asks for a conversion of weights that are quantised already.
    """
    served = served_format(spec.quantization, config.quantization, config.load_format == "dummy")
    return replace(spec, quantization=served)


def load_model(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    *,
    backend: AttentionBackend,
    kernels: Kernels | None,
    parallel: Parallel,
    stage: Stage = WHOLE,
    experts: ExpertShard = ALL_EXPERTS,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Model, Checkpoint]:
    """Build the rank's part of the model on `device` and start to load its weights.

    Returns:
        The model and its checkpoint. The weights are undefined until `Checkpoint.finish` has returned.

    Raises:
        ModelError: if the checkpoint cannot be read or does not fit the model.
    """
    checkpoint: Checkpoint = CheckedCheckpoint(
        open_checkpoint(
            path,
            spec,
            config.load_format,
            device=device,
            dtype=dtype,
            seed=config.seed,
            elsewhere=held_elsewhere(spec, stage, experts),
        )
    )
    try:
        with torch.inference_mode():
            parts = layer_parts(config)
            env = Env(
                checkpoint,
                parallel,
                backend,
                device,
                dtype,
                kernels,
                spec.quantization,
                stage,
                experts,
                parts=parts,
            )
            return with_persistent_steps(config, build_model(spec, env), env), checkpoint
    except BaseException:
        checkpoint.close()
        raise


def with_persistent_steps(config: EngineConfig, model: Model, env: Env) -> Model:
    """Return the model with decode steps of few rows as one kernel, if `config` wants it and the model suits it."""
    device = env.device
    if not config.persistent_kernel or device.type != "cuda":
        return model
    # Imported here: an installation for CPUs has no Triton, which the products of a GPU need.
    from quire.assembly.persistent import PersistentDecoder, unsuited

    reason = "draft heads read its layers" if config.spec_method in ("eagle", "eagle3", "mtp") else ""
    reason = reason or ("blocks must be paged" if config.kv_layout != "paged" else unsuited(model, device))
    if reason or not isinstance(model, DecoderModel):
        log.debug("no persistent kernel: %s", reason)
        return model
    return PersistentDecoder(model, config.block_size, device, env.weights.when_loaded)
