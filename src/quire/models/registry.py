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
    return FAMILIES[spec.family](env, spec)
