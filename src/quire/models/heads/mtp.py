r"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437; GLM-4.5): the layer behind the last one, as a draft head.

    last hidden state -> hnorm \\
                                concatenated -> eh_proj -> a layer of the model - state -> shared_head.norm -> lm_head
    next token -> embedding -> enorm /

The embedding and the output projection are the model's. Checkpoints store copies of both with the layer, which are not
read. Of several such layers the first one is used for every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.attention.base import ForwardBatch, KVLayer
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.norm import NORMS
from quire.layers.rope import Rope
from quire.models.decoder import PREFIXES, DecoderModel, find_prefix
from quire.models.layouts import LAYOUTS
from quire.models.spec import ModelSpec
from quire.types import ConfigError


def mtp_spec(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model that consists of the layer for multi-token prediction.

    Raises:
        ConfigError: if the model has no such layer.
    """
    if not spec.extra_layers:
        raise ConfigError(
            f"spec_method mtp needs a layer for multi-token prediction, as DeepSeek-V3 and GLM-4.5 have, but "
            f"config.json of this {spec.architecture} names none (num_nextn_predict_layers); use spec_method ngram"
        )
    moe = spec.moe and replace(spec.moe, sparse=(True,))
    return replace(
        spec, num_layers=1, windows=(None,), rotates=spec.rotates[-1:], mixes=(), moe=moe, extra_layers=0
    )


def mtp_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of the matrices of such a layer. `spec`: from `mtp_spec`."""
    return sum(spec.layer_parameters) + 2 * spec.hidden_size * spec.hidden_size


class MTPHead:
    """A `DraftHead` with the weights of a layer for multi-token prediction.

    Args:
        env: the weights of the model's checkpoint, and what layers are built with.
        spec: from `mtp_spec`.
        model: the model.
        index: number of the layer in the checkpoint.

    Raises:
        ConfigError: if the checkpoint lacks the layer.
    """

    def __init__(self, env: Env, spec: ModelSpec, model: DecoderModel, index: int) -> None:
        root = find_prefix(env.weights, f"layers.{index}.enorm.weight", PREFIXES)
        prefix, hidden, norm = f"{root}layers.{index}.", spec.hidden_size, NORMS[spec.norm]
        if not env.weights.has(prefix + "enorm.weight"):
            raise ConfigError(
                f"spec_method mtp needs the layer {index} for multi-token prediction, but the checkpoint has no "
                f"{prefix}enorm.weight; use a complete checkpoint or spec_method ngram"
            )
        self._model = model
        self.embed_norm = norm(env, prefix + "enorm", hidden, spec.norm_eps)
        self.hidden_norm = norm(env, prefix + "hnorm", hidden, spec.norm_eps)
        self.project = Linear(env, prefix + "eh_proj", 2 * hidden, hidden)
        self.layer = (model.layer_class or LAYOUTS[spec.layout])(env, spec, 0, prefix)
        self.rope = Rope(spec.layer_ropes[0], spec.rope_dim(0), spec.max_model_len, env.device, env.dtype)
        self.norm = norm(env, prefix + "shared_head.norm", hidden, spec.norm_eps)
        attention = self.layer.attn.attention
        assert attention is not None  # `mtp_spec` has no layer with a state
        self.attention_layers: Sequence[KVLayer] = [attention]

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embed_norm.alone(self._model.embed(batch.input_ids))
        x = self.project(torch.cat([embedded, self.hidden_norm.alone(hidden)], 1))
        x, residual = self.layer(x, None, self.rope.lookup(batch.positions), batch)
        return x if residual is None else x + residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(self.norm.alone(hidden))
