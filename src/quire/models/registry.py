"""From a spec to a model: one line per family."""

from __future__ import annotations

from collections.abc import Callable

from quire.layers.env import Env
from quire.models.decoder import Model
from quire.models.gemma3 import Gemma3Model
from quire.models.gpt2 import GPT2Model
from quire.models.llama import LlamaModel
from quire.models.moe import MoEModel
from quire.models.qwen import QwenModel
from quire.models.spec import ModelSpec
from quire.types import ModelError

FAMILIES: dict[str, Callable[[Env, ModelSpec], Model]] = {
    "gemma3": Gemma3Model,
    "gpt2": GPT2Model,
    "llama": LlamaModel,
    "moe": MoEModel,
    "qwen": QwenModel,
}


def build_model(spec: ModelSpec, env: Env) -> Model:
    """The model of `spec`, its weights pulled from `env.weights`."""
    if spec.family not in FAMILIES:
        raise ModelError(f"{spec.architecture} is not supported yet")
    spec.check_quantization()
    size = env.parallel.size
    if spec.num_heads % size or spec.num_kv_heads % size or spec.intermediate_size % size:
        raise ModelError(
            f"{spec.architecture} with {spec.num_heads} heads, {spec.num_kv_heads} K/V heads and intermediate size "
            f"{spec.intermediate_size} cannot be cut into {size} equal parts"
        )
    return FAMILIES[spec.family](env, spec)
