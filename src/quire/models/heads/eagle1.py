r"""EAGLE (arXiv:2401.15077): a draft head that continues the last hidden states of a model.

    last hidden state -----------\
                                  concatenated -> fc -> a layer without its first norm - state -> the model's lm_head
    next token -> embedding -----/

The hidden states are those behind the final norm, which the model's `lm_head` reads, and the head predicts the next of
them. Embedding and output projection are the model's. Public checkpoints have the layout of the authors' repository:
`fc`, with or without a bias, and `layers.0`. Some also hold copies of embedding and projection, which are not read.
EAGLE-2 uses the same heads with other trees of drafts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.attention.base import ForwardBatch, KVLayer
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.norm import PassThrough
from quire.layers.residual import NormedLayer
from quire.layers.rope import Rope
from quire.models.decoder import DecoderModel, find_prefix
from quire.models.layouts import DecoderLayer
from quire.models.spec import ModelSpec

PREFIXES = ("", "model.")
UNREAD = re.compile(r"^(model\.)?(embed_tokens|lm_head)\.")  # copies of the model's


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """The configuration of an EAGLE head: the sizes of its layer."""

    layer: ModelSpec

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the matrices."""
        hidden = self.layer.hidden_size
        return sum(self.layer.layer_parameters) + 2 * hidden * hidden


class UnnormedLayer(DecoderLayer):
    """A `DecoderLayer` without the norm in front of the attention."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        self.attn = self.make_attention(env, spec, index, prefix + "self_attn.", PassThrough())
        post_norm = self.make_norm(env, spec, prefix, "post_attention_layernorm")
        self.mlp = NormedLayer(post_norm, self.make_mlp(env, spec, index, prefix), adds=True)


class EagleHead:
    """A `DraftHead` with the weights of an EAGLE checkpoint.

    Args:
        env: the weights, and what layers are built with.
        spec: its configuration.
        model: the model that verifies.
    """

    def __init__(self, env: Env, spec: EagleSpec, model: DecoderModel) -> None:
        root = find_prefix(env.weights, "fc.weight", PREFIXES)
        prefix, hidden = root + "layers.0.", spec.layer.hidden_size
        layer = replace(spec.layer, qkv_bias=env.weights.has(prefix + "self_attn.q_proj.bias"))
        self._model = model
        self.fc = Linear(env, root + "fc", 2 * hidden, hidden, env.weights.has(root + "fc.bias"))
        self.layer = UnnormedLayer(env, layer, 0, prefix)
        self.rope = Rope(layer.layer_ropes[0], layer.rope_dim(0), layer.max_model_len, env.device, env.dtype)
        attention = self.layer.attn.attention
        assert attention is not None
        self.attention_layers: Sequence[KVLayer] = [attention]

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = self.fc(torch.cat([self._model.embed(batch.input_ids), hidden], 1))
        x, residual = self.layer(x, None, self.rope.lookup(batch.positions), batch)
        return x if residual is None else x + residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)
