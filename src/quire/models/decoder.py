"""The decoder that Llama-like models share: rotary attention, gated MLP, pre-norms, one residual stream.

The file of a family contains only its differences. The residual is passed along with x, so that every addition can
be fused with the norm behind it. Weight names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.attention.base import AttentionLayer, ForwardBatch
from quire.layers.attention import Attention, rotary_attention
from quire.layers.embedding import Embedding, LMHead
from quire.layers.env import Env, Weights
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import HeadNorm, RMSNorm
from quire.layers.residual import NormedLayer, ResidualAdd, Stream
from quire.layers.rope import Rope, Rotation
from quire.models.spec import ModelSpec


class Model(Protocol):
    """A model as the worker uses it."""

    spec: ModelSpec

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Attention layers by index."""
        ...

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Run the model on a step, and write its keys and values to `batch.kv_slots`.

        Returns:
            Hidden states [tokens, hidden], or [wanted, hidden] if `batch.wanted` is set.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] of hidden states [n, hidden]."""
        ...


class SelfAttention:
    """Rotary attention with grouped K/V heads and, in some families, a norm of each q and k head.

    `norm` is the norm in front; norms of heads are of the same class. For `adds` see `ResidualAdd`.
    """

    def __init__(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: RMSNorm, adds: bool = True
    ) -> None:
        dim = spec.head_dim
        self.is_last = index == spec.num_layers - 1
        heads, kv_heads = env.parallel.share(spec.num_heads), env.parallel.share(spec.num_kv_heads)
        names = [prefix + "q_proj", prefix + "k_proj", prefix + "v_proj"]
        outs = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]
        units = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        qkv = Linear(env, names, spec.hidden_size, outs, spec.qkv_bias, cut="rows", units=units)
        self.qkv = NormedLayer(norm, qkv)
        o = Linear(env, prefix + "o_proj", outs[0], spec.hidden_size, spec.o_bias, cut="cols")
        self.o = ResidualAdd(o, adds)
        qk_norm = None
        if spec.qk_norm:
            names_qk = (prefix + "q_norm", prefix + "k_norm")
            qk_norm = HeadNorm(type(norm), env, names_qk, (heads, kv_heads), dim, spec.norm_eps)
        kv = spec.kv_layout(index, env.dtype_name, env.parallel.size)
        self.attention = Attention(env, index, heads, kv, spec.query_scale, spec.attn_soft_cap)
        self.attend = rotary_attention(self.attention, qk_norm, env.kernels)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        qkv, residual = self.qkv(x, residual)
        x = self.attend(qkv, rotation, batch)
        if self.is_last:
            assert residual is not None  # the norm in front returned one
            x, residual = batch.narrow(x, residual)
        return self.o(x, residual)


class FeedForward(Protocol):
    """The second half of a layer, without its norm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        input_norm = RMSNorm(env, prefix + "input_layernorm", spec.hidden_size, spec.norm_eps)
        self.attn = SelfAttention(env, spec, index, prefix + "self_attn.", input_norm)
        post_norm = RMSNorm(env, prefix + "post_attention_layernorm", spec.hidden_size, spec.norm_eps)
        self.mlp = NormedLayer(post_norm, self.make_mlp(env, spec, index, prefix), adds=True)

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the feed-forward half of layer `index`; overridden by families with experts."""
        return GatedMLP(
            env, prefix + "mlp.", spec.hidden_size, spec.intermediate_size, spec.activation, spec.mlp_bias
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        x, residual = self.attn(x, residual, rotation, batch)
        return self.mlp(x, residual)


class DecoderModel:
    """A Llama-like model: embedding, layers, final norm, head."""

    layer_class = DecoderLayer

    def __init__(self, env: Env, spec: ModelSpec) -> None:
        assert spec.rope is not None
        prefix = find_prefix(env.weights, "embed_tokens.weight", ("model.", ""))
        self.spec = spec
        self.embed = Embedding(env, prefix + "embed_tokens", spec.vocab_size, spec.hidden_size)
        self.rope = Rope(spec.rope, spec.head_dim, spec.max_model_len, env.device, env.dtype)
        self.layers = [self.layer_class(env, spec, i, f"{prefix}layers.{i}.") for i in range(spec.num_layers)]
        self.norm = RMSNorm(env, prefix + "norm", spec.hidden_size, spec.norm_eps)
        tied = self.embed if spec.tie_embeddings else None
        self.head = LMHead(env, "lm_head", spec.hidden_size, spec.vocab_size, tied, spec.final_soft_cap)
        self.attention_layers = [layer.attn.attention for layer in self.layers]

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        rotation = self.rope.lookup(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, batch)
        return self.norm(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def find_prefix(weights: Weights, name: str, prefixes: tuple[str, ...]) -> str:
    """Return the first of `prefixes` under which the checkpoint has `name`.

    If none does, return the first one, so that the missing tensor is reported under its usual name.
    """
    return next((prefix for prefix in prefixes if weights.has(prefix + name)), prefixes[0])
