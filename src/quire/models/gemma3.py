"""Gemma 3, text part (arXiv:2503.19786).

Norms before and after each half of a layer, local and global layers with their own rotary bases, scaled embeddings,
and norm weights that are stored minus one.
"""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.embedding import Embedding, LMHead
from quire.layers.env import Env
from quire.layers.mlp import GatedMLP
from quire.layers.norm import OffsetRMSNorm
from quire.layers.residual import NormedLayer, Stream
from quire.layers.rope import Rope, Rotation
from quire.models.decoder import SelfAttention, find_prefix
from quire.models.spec import ModelSpec

# Of text-only checkpoints, of multimodal ones in two spellings, and of both without a head.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")


class Gemma3Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        def norm(name: str) -> OffsetRMSNorm:
            return OffsetRMSNorm(env, prefix + name, spec.hidden_size, spec.norm_eps)

        self.is_local = spec.windows[index] is not None
        self.attn = SelfAttention(
            env, spec, index, prefix + "self_attn.", norm("input_layernorm"), adds=False
        )
        self.after_attn = norm("post_attention_layernorm")
        mlp = GatedMLP(env, prefix + "mlp.", spec.hidden_size, spec.intermediate_size, spec.activation)
        self.mlp = NormedLayer(norm("pre_feedforward_layernorm"), mlp)
        self.after_mlp = norm("post_feedforward_layernorm")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        x, residual = self.attn(x, residual, rotation, batch)
        x, residual = self.mlp(self.after_attn.alone(x), residual)
        return self.after_mlp.alone(x), residual


class Gemma3Model:
    """Gemma 3: local layers have a window and the small rotary base, global ones no window and the large base."""

    def __init__(self, env: Env, spec: ModelSpec) -> None:
        assert spec.rope is not None and spec.local_rope is not None
        prefix = find_prefix(env.weights, "embed_tokens.weight", _PREFIXES)
        self.spec = spec
        self.embed = Embedding(
            env, prefix + "embed_tokens", spec.vocab_size, spec.hidden_size, spec.embedding_scale
        )
        self.rope, self.local_rope = (
            Rope(params, spec.head_dim, spec.max_model_len, env.device, env.dtype)
            for params in (spec.rope, spec.local_rope)
        )
        self.layers = [Gemma3Layer(env, spec, i, f"{prefix}layers.{i}.") for i in range(spec.num_layers)]
        self.norm = OffsetRMSNorm(env, prefix + "norm", spec.hidden_size, spec.norm_eps)
        head = find_prefix(env.weights, "lm_head.weight", ("", "language_model."))
        tied = self.embed if spec.tie_embeddings else None
        self.head = LMHead(
            env, head + "lm_head", spec.hidden_size, spec.vocab_size, tied, spec.final_soft_cap
        )
        self.attention_layers = [layer.attn.attention for layer in self.layers]

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        full, local = self.rope.lookup(batch.positions), self.local_rope.lookup(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, local if layer.is_local else full, batch)
        return self.norm(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
