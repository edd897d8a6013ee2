"""Registry of model families: builds the model of a spec."""

from __future__ import annotations

from collections.abc import Callable

from quire.layers.env import Env
from quire.models.decoder import DecoderModel, Model
from quire.models.gpt2 import GPT2Model
from quire.models.moe import MoEModel
from quire.models.spec import ModelSpec
from quire.types import ModelError

# Families with a class of their own; all others are the decoder with the options of their spec.
CLASSES: dict[str, Callable[[Env, ModelSpec], Model]] = {
    "gpt2": GPT2Model,
    "moe": MoEModel,
}


def build_model(spec: ModelSpec, env: Env) -> Model:
    """Build the model of `spec` with weights from `env.weights`.

    Raises:
        ModelError: if the quantisation is not supported, if the model cannot be sharded over the
            ranks, or if a tensor is missing or has a wrong shape.
    """
    spec.check_quantization()
    size = env.parallel.size
    if spec.num_heads % size or spec.num_kv_heads % size or spec.intermediate_size % size:
        raise ModelError(
            f"{spec.architecture} cannot be sharded over {size} ranks: its {spec.num_heads} heads, "
            f"{spec.num_kv_heads} K/V heads and intermediate size {spec.intermediate_size} must be multiples of {size}"
        )
    return CLASSES.get(spec.family, DecoderModel)(env, spec)
