"""The layers of a decoder: attention and MLP, and where their norms and additions are (`ModelSpec.layout`)."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.attention.base import ForwardBatch, KVLayer
from quire.layers.activation import make_activation
from quire.layers.attention import AfterRotation, Attention, BeforeRotation, rotary_attention
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import NORMS, HeadNorm, Norm, PassThrough
from quire.layers.query_key import GrowingQueries, HeadLayerNorm, ProjectionNorm, RotatedHeadNorm, UnitNorm
from quire.layers.residual import NormedLayer, ResidualAdd, ResidualNorm, Stream
from quire.layers.rope import Rotation
from quire.models.kv_scales import load_kv_scales
from quire.models.spec import ModelSpec


class SelfAttention:
    """Rotary attention with grouped K/V heads, and the operations on q and k that the spec lists.

    `norm` is the norm in front. For `adds` see `ResidualAdd`.
    """

    def __init__(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> None:
        dim = spec.head_dim
        self.is_last = index == spec.num_layers - 1
        heads, kv_heads = env.parallel.share(spec.num_heads), env.parallel.share(spec.num_kv_heads)
        units = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.qkv = NormedLayer(norm, self.make_qkv(env, spec, prefix))
        o_name = prefix + spec.names.get("o_proj", "o_proj")
        self.o = ResidualAdd(
            Linear(env, o_name, spec.num_heads * dim, spec.hidden_size, spec.o_bias, cut="cols"), adds
        )
        self.attention = Attention(
            env,
            index,
            heads,
            spec.kv_layout(index, env.dtype_name, env.parallel.size),
            spec.query_scale,
            spec.attn_soft_cap,
            _sinks(env, prefix + "sinks", spec.num_heads) if spec.sinks else None,
            spec.layer_ropes[index].span(dim),
            load_kv_scales(env, spec, prefix),
        )
        rotates = not spec.rotates or spec.rotates[index]
        # The norm of q and k: fused with the rotation, in front of it, or behind it.
        fused: HeadNorm | None = None
        before: BeforeRotation | None = None
        after: AfterRotation | None = None
        if spec.qk_norm:
            first, second = (prefix + spec.names.get(name, name) for name in ("q_norm", "k_norm"))
            if spec.qk_norm_kind == "projection":
                before = ProjectionNorm(env, (first, second), (units[0], units[1]), dim, spec.norm_eps)
            elif spec.qk_norm_kind == "layer":
                before = HeadLayerNorm(env, (first, second), (units[0], units[1]), dim, spec.norm_eps)
            elif spec.qk_norm_kind == "unit":
                after = UnitNorm(spec.norm_eps) if rotates else None
            else:
                norm_class = NORMS[spec.norm]
                of_heads = HeadNorm(norm_class, env, (first, second), (heads, kv_heads), dim, spec.norm_eps)
                if spec.qk_norm_kind == "rotated":
                    after = RotatedHeadNorm(of_heads)
                else:
                    fused = of_heads
        growth = spec.query_growth
        if growth is not None and not (growth.only_unrotated and rotates):
            after = GrowingQueries(growth.beta, growth.length, growth.offset)
        self.head_norm = fused
        self.attend = rotary_attention(self.attention, fused, env.kernels, before, after)

    def make_qkv(self, env: Env, spec: ModelSpec, prefix: str) -> Linear:
        """Load the projections to q, k and v as one product."""
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        names = [prefix + "qkv_proj"] if spec.fused_qkv else names
        units = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        outs = [count * spec.head_dim for count in units]
        return Linear(env, names, spec.hidden_size, outs, spec.qkv_bias, cut="rows", units=units)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        qkv, residual = self.qkv(x, residual)
        x = self.attend(qkv, rotation, batch)
        if self.is_last:
            assert residual is not None  # the norm in front returned one
            x, residual = batch.narrow(x, residual)
        return self.o(x, residual)


def _sinks(env: Env, name: str, heads: int) -> torch.Tensor:
    return env.weights.tensor(name, (heads,), env.parallel.cut(heads)).to(env.device, torch.float32)


class AttentionHalf(Protocol):
    """The first half of a layer, with the norm in front."""

    is_last: bool  # of the model: it narrows the batch to the tokens that are wanted

    @property
    def attention(self) -> KVLayer | None:
        """Return the layer whose entries the KV cache keeps, or None if it keeps none."""
        ...

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream: ...


class FeedForward(Protocol):
    """The second half of a layer, without its norm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). The other layouts are derived from it."""

    attn: AttentionHalf

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        norm = self.make_norm(env, spec, prefix, "input_layernorm")
        self.attn = self.make_attention(env, spec, index, prefix + "self_attn.", norm)
        post_norm = self.make_norm(env, spec, prefix, "post_attention_layernorm")
        self.mlp = NormedLayer(post_norm, self.make_mlp(env, spec, index, prefix), adds=True)

    def make_norm(self, env: Env, spec: ModelSpec, prefix: str, name: str) -> Norm:
        """Build the norm `name` of a layer, of the class that the spec names."""
        return NORMS[spec.norm](env, prefix + spec.names.get(name, name), spec.hidden_size, spec.norm_eps)

    def make_attention(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> AttentionHalf:
        """Build the attention half of layer `index`; overridden by families with latent attention."""
        return SelfAttention(env, spec, index, prefix, norm, adds)

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the feed-forward half of layer `index`; overridden by families with experts."""
        prefix += spec.names.get("mlp", "mlp") + "."
        sizes = spec.hidden_size, spec.mlp_size(index)
        if spec.mlp == "gated":
            usual = ("gate_up_proj",) if spec.fused_gate_up else ("gate_proj", "up_proj")
            stored = tuple(spec.names.get(name, name) for name in (*usual, "down_proj"))
            return GatedMLP(env, prefix, *sizes, spec.activation, spec.mlp_bias, stored)
        up, down = (prefix + spec.names.get(name, name) for name in ("up_proj", "down_proj"))
        activation = make_activation(env, prefix + "act_fn.", spec.activation)
        return PlainMLP(env, (up, down), *sizes, activation, spec.mlp_bias)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        x, residual = self.attn(x, residual, rotation, batch)
        return self.mlp(x, residual)


class SandwichLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))) (Gemma 2)."""

    front: tuple[str, str] | None = ("input_layernorm", "pre_feedforward_layernorm")

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        first, second = (
            (self.make_norm(env, spec, prefix, name) for name in self.front)
            if self.front
            else (PassThrough(), PassThrough())
        )
        self.attn = self.make_attention(env, spec, index, prefix + "self_attn.", first, adds=False)
        self.after_attn = self.make_norm(env, spec, prefix, "post_attention_layernorm")
        self.mlp = NormedLayer(second, self.make_mlp(env, spec, index, prefix))
        self.after_mlp = self.make_norm(env, spec, prefix, "post_feedforward_layernorm")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        x, residual = self.attn(x, residual, rotation, batch)
        x, residual = self.mlp(self.after_attn.alone(x), residual)
        return self.after_mlp.alone(x), residual


class PostNormLayer(SandwichLayer):
    """x + norm(attention(x)), then x + norm(mlp(x)) (OLMo 2)."""

    front = None


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm for both (Command R, Phi-2)."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        self.norm = self.make_norm(env, spec, prefix, "input_layernorm")
        self.attn = self.make_attention(env, spec, index, prefix + "self_attn.", PassThrough(), adds=False)
        self.parallel_mlp = self.make_mlp(env, spec, index, prefix)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        x, residual = self.norm(x, residual)
        # The attention narrows what it is given as a residual: the input of the MLP.
        attended, normed = self.attn(x, None, rotation, batch)
        assert normed is not None
        if self.attn.is_last:
            residual, _ = batch.narrow(residual, residual)
        return attended + self.parallel_mlp(normed), residual


LAYOUTS: dict[str, type[DecoderLayer]] = {
    "pre": DecoderLayer,
    "sandwich": SandwichLayer,
    "post": PostNormLayer,
    "parallel": ParallelLayer,
}
