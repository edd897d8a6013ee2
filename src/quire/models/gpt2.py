"""GPT-2: learned positions, LayerNorm, biases everywhere, weights stored [inputs, outputs].

Tensor names begin with `transformer.` in some checkpoints, and without it in others.
"""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.activation import ACTIVATIONS
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, LMHead
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mlp import PlainMLP
from quire.layers.norm import LayerNorm
from quire.models.decoder import find_prefix
from quire.models.spec import ModelSpec


class GPT2Layer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        hidden, heads = spec.hidden_size, env.parallel.share(spec.num_heads)
        self.is_last = index == spec.num_layers - 1
        self.input_norm = LayerNorm(env, prefix + "ln_1", hidden, spec.norm_eps)
        self.qkv = Linear(
            env, prefix + "attn.c_attn", hidden, [hidden] * 3, True, cut="rows", transposed=True
        )
        kv = spec.kv_layout(index, env.dtype_name, env.parallel.size)
        self.attention = Attention(env, index, heads, kv, spec.query_scale)
        self.o = Linear(env, prefix + "attn.c_proj", hidden, hidden, True, cut="cols", transposed=True)
        self.post_norm = LayerNorm(env, prefix + "ln_2", hidden, spec.norm_eps)
        names = prefix + "mlp.c_fc", prefix + "mlp.c_proj"
        activation = ACTIVATIONS[spec.activation]
        self.mlp = PlainMLP(env, names, hidden, spec.intermediate_size, activation, True, transposed=True)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_norm(x, residual)
        qkv = self.qkv(x).view(x.shape[0], 3, self.attention.num_heads, self.attention.head_dim)
        q, k, v = qkv.unbind(1)  # each [tokens, heads, dim]
        x = self.attention(q, k, v, batch)
        if self.is_last:
            x, residual = batch.narrow(x, residual)
        x, residual = self.post_norm(self.o(x), residual)
        return self.mlp(x), residual


class GPT2Model:
    """GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""

    def __init__(self, env: Env, spec: ModelSpec) -> None:
        prefix = find_prefix(env.weights, "wte.weight", ("transformer.", ""))
        self.spec, self.stage = spec, env.stage
        is_first, is_last = self.stage.is_first, self.stage.is_last
        if is_first or (is_last and spec.tie_embeddings):
            self.tokens = Embedding(env, prefix + "wte", spec.vocab_size, spec.hidden_size)
        if is_first:
            self.positions = Embedding(env, prefix + "wpe", spec.num_positions, spec.hidden_size)
        own = self.stage.layers(spec.num_layers)
        self.layers = [GPT2Layer(env, spec, i, f"{prefix}h.{i}.") for i in own]
        if is_last:
            self.norm = LayerNorm(env, prefix + "ln_f", spec.hidden_size, spec.norm_eps)
            tied = self.tokens if spec.tie_embeddings else None
            self.head = LMHead(env, "lm_head", spec.hidden_size, spec.vocab_size, tied)
        self.attention_layers = [layer.attention for layer in self.layers]

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        if self.stage.is_first:
            x = self.tokens(batch.input_ids) + self.positions(batch.positions)
        else:
            x = self.stage.entered(len(batch.input_ids))
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm(x, residual)[0] if self.stage.is_last else self.stage.hand_over(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
