"""Registry of model families: builds the model of a spec."""

from __future__ import annotations

from collections.abc import Callable

from quire.layers.env import Env
from quire.models.decoder import Model
from quire.models.deepseek import DeepseekModel
from quire.models.gemma3 import Gemma3Model
from quire.models.gpt2 import GPT2Model
from quire.models.llama import LlamaModel
from quire.models.moe import MoEModel
from quire.models.qwen import QwenModel
from quire.models.spec import ModelSpec
from quire.types import ModelError

FAMILIES: dict[str, Callable[[Env, ModelSpec], Model]] = {
    "deepseek": DeepseekModel,
    "gemma3": Gemma3Model,
    "gpt2": GPT2Model,
    "llama": LlamaModel,
    "moe": MoEModel,
    "qwen": QwenModel,
}


def build_model(spec: ModelSpec, env: Env) -> Model:
    """Build the model of `spec` with weights from `env.weights`.

    Raises:
        ModelError: if the family or its quantisation is not supported, if the model cannot be sharded over the
            ranks, or if a tensor is missing or has a wrong shape.
    """
    if spec.family not in FAMILIES:
        raise ModelError(f"{spec.architecture} is not supported yet")
    spec.check_quantization()
    size = env.parallel.size
    if spec.num_heads % size or spec.num_kv_heads % size or spec.intermediate_size % size:
        raise ModelError(
            f"{spec.architecture} cannot be sharded over {size} ranks: its {spec.num_heads} heads, "
            f"{spec.num_kv_heads} K/V heads and intermediate size {spec.intermediate_size} must be multiples of {size}"
        )
    return FAMILIES[spec.family](env, spec)
