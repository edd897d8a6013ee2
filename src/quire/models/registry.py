"""Registry of model families: builds the model of a spec."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from quire.layers.env import Env
from quire.models.decoder import DecoderModel, Model
from quire.models.deepseek import DeepseekModel
from quire.models.falcon_h1 import FalconH1Model
from quire.models.gemma3n import Gemma3nModel
from quire.models.gemma4 import Gemma4Model
from quire.models.gpt2 import GPT2Model
from quire.models.gpt_oss import GptOssModel
from quire.models.granite_hybrid import GraniteHybridModel
from quire.models.hybrid import HybridModel
from quire.models.llama4 import Llama4Model
from quire.models.minimax import MiniMaxModel
from quire.models.moe import MoEModel
from quire.models.nemotron_h import NemotronHModel
from quire.models.spec import ModelSpec
from quire.types import ModelError

# Families with a class of their own; all others are the decoder with the options of their spec.
CLASSES: dict[str, Callable[[Env, ModelSpec], Model]] = {
    "deepseek": DeepseekModel,
    "gemma3n": Gemma3nModel,
    "gemma4": Gemma4Model,
    "gpt2": GPT2Model,
    "gpt_oss": GptOssModel,
    "falcon_h1": FalconH1Model,
    "granitemoehybrid": GraniteHybridModel,
    "hybrid": HybridModel,
    "minimax": MiniMaxModel,
    "llama4": Llama4Model,
    "moe": MoEModel,
    "nemotron_h": NemotronHModel,
}


def build_model(spec: ModelSpec, env: Env) -> Model:
    """Build the model of `spec` with weights from `env.weights`.

    Raises:
        ModelError: if the quantisation is not supported, if the model cannot be sharded over the
            ranks, or if a tensor is missing or has a wrong shape.
    """
    spec.check_quantization()
    check_shards(spec, env.parallel.size, env.experts.exchange is not None)
    check_stages(spec, env.stage.count)
    return CLASSES.get(spec.family, DecoderModel)(env, spec)


def check_stages(spec: ModelSpec, stages: int) -> None:
    """Raise ModelError if the layers of the model need more of each other than a pipeline passes on."""
    model_class = CLASSES.get(spec.family, DecoderModel)
    plain = (DecoderModel.__call__, GPT2Model.__call__)
    if stages > 1 and cast(type, model_class).__call__ not in plain:
        raise ModelError(
            f"{spec.architecture} cannot be cut into {stages} stages: its layers read more than the output of the layer "
            "in front; use tensor_parallel_size instead of pipeline_parallel_size"
        )


def check_shards(spec: ModelSpec, size: int, whole_experts: bool = False) -> None:
    """Raise ModelError, naming what does not divide, if the model cannot be sharded over `size` ranks."""
    sizes = {
        "heads": spec.num_heads,
        "intermediate size": math.gcd(*map(spec.mlp_size, range(spec.num_layers))),
    }
    if spec.moe:
        if not whole_experts:
            sizes["expert intermediate size"] = spec.moe.intermediate_size
        if all(spec.moe.sparse):
            del sizes["intermediate size"]
    if spec.mixer:
        sizes |= spec.mixer.sharded()
    faults = [f"{name} {value}" for name, value in sizes.items() if value % size]
    for heads in sorted(set(map(spec.layer_kv_heads, range(spec.num_layers)))):
        if heads % size and size % heads:
            faults.append(f"K/V heads {heads}")
    if faults:
        raise ModelError(
            f"{spec.architecture} cannot be sharded over {size} ranks: {', '.join(faults)} must be multiples of {size} "
            f"(K/V heads may also be a divisor of it); choose another tensor_parallel_size"
        )
