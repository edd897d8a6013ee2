"""Registry of model families: builds the model of a spec."""

from __future__ import annotations

from collections.abc import Callable

from quire.layers.env import Env
from quire.models.decoder import DecoderModel, Model
from quire.models.deepseek import DeepseekModel
from quire.models.gpt2 import GPT2Model
from quire.models.gpt_oss import GptOssModel
from quire.models.lfm2 import Lfm2Model
from quire.models.moe import MoEModel
from quire.models.spec import ModelSpec
from quire.types import ModelError

# Families with a class of their own; all others are the decoder with the options of their spec.
CLASSES: dict[str, Callable[[Env, ModelSpec], Model]] = {
    "deepseek": DeepseekModel,
    "gpt2": GPT2Model,
    "gpt_oss": GptOssModel,
    "lfm2": Lfm2Model,
    "moe": MoEModel,
}


def build_model(spec: ModelSpec, env: Env) -> Model:
    """Build the model of `spec` with weights from `env.weights`.

    Raises:
        ModelError: if the quantisation is not supported, if the model cannot be sharded over the
            ranks, or if a tensor is missing or has a wrong shape.
    """
    spec.check_quantization()
    check_shards(spec, env.parallel.size)
    return CLASSES.get(spec.family, DecoderModel)(env, spec)


def check_shards(spec: ModelSpec, size: int) -> None:
    """Raise ModelError, naming what does not divide, if the model cannot be sharded over `size` ranks."""
    sizes = {"heads": spec.num_heads, "intermediate size": spec.intermediate_size}
    if spec.moe:
        sizes["expert intermediate size"] = spec.moe.intermediate_size
        if all(spec.moe.sparse):
            del sizes["intermediate size"]
    faults = [f"{name} {value}" for name, value in sizes.items() if value % size]
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        faults.append(f"K/V heads {spec.num_kv_heads}")
    if faults:
        raise ModelError(
            f"{spec.architecture} cannot be sharded over {size} ranks: {', '.join(faults)} must be multiples of {size} "
            f"(K/V heads may also be a divisor of it); choose another tensor_parallel_size"
        )
