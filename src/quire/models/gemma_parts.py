"""Parts that Gemma 3n and Gemma 4 share: attention with common keys and values, and per-layer embeddings."""

from __future__ import annotations

import math

import torch

from quire.attention.base import ForwardBatch
from quire.layers.activation import ACTIVATIONS
from quire.layers.attention import Attention, rotary_attention
from quire.layers.embedding import Embedding
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.norm import HeadNorm, RMSNorm
from quire.layers.residual import NormedLayer, ResidualAdd, ResidualNorm, Stream
from quire.layers.rope import RotaryHeads, Rotation
from quire.layers.value_norm import ValueNorm
from quire.models.spec import ModelSpec


class GemmaAttention:
    """Rotary attention with norms of all heads. Layers with another source read the entries of that layer.

    `norm` is the norm in front. For `adds` see `ResidualAdd`.
    """

    def __init__(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = False
    ) -> None:
        assert spec.gemma is not None
        self.is_last = index == spec.num_layers - 1
        source, dim, units = spec.kv_source(index), spec.layer_head_dim(index), spec.layer_kv_heads(index)
        heads, kv_heads = env.parallel.share(spec.num_heads), env.parallel.share(units)
        kv = spec.kv_layout(source, env.dtype_name, env.parallel.size)
        span = spec.layer_ropes[index].span(dim)
        self.attention = Attention(env, source, heads, kv, spec.query_scale, span=span)
        from_keys = index in spec.gemma.keys_as_values
        names = ["q_proj", "k_proj", "v_proj"][: 1 if source != index else 2 if from_keys else 3]
        counts = [spec.num_heads, units, units][: len(names)]
        outs, paths = [count * dim for count in counts], [prefix + name for name in names]
        qkv = Linear(env, paths, spec.hidden_size, outs, spec.qkv_bias, cut="rows", units=counts)
        self.qkv = NormedLayer(norm, qkv)
        q_norm, k_norm = prefix + "q_norm", prefix + "k_norm"
        if source == index:
            norms = HeadNorm(RMSNorm, env, (q_norm, k_norm), (heads, kv_heads), dim, spec.norm_eps)
            before = ValueNorm(heads, kv_heads, dim, spec.norm_eps, from_keys)
            self.attend = rotary_attention(self.attention, norms, env.kernels, before)
        else:
            norms = HeadNorm(RMSNorm, env, (q_norm,), (heads,), dim, spec.norm_eps)
            self.queries = RotaryHeads(heads, 0, dim, norms, env.kernels, span)
            self.attend = self._attend_source
        o = Linear(env, prefix + "o_proj", spec.num_heads * dim, spec.hidden_size, spec.o_bias, cut="cols")
        self.o = ResidualAdd(o, adds)

    def _attend_source(self, q: torch.Tensor, rotation: Rotation, batch: ForwardBatch) -> torch.Tensor:
        heads, _, _ = self.queries(q, rotation)
        return self.attention(heads, None, None, batch)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        qkv, residual = self.qkv(x, residual)
        x = self.attend(qkv, rotation, batch)
        if self.is_last:
            assert residual is not None  # the norm in front returned one
            x, residual = batch.narrow(x, residual)
        return self.o(x, residual)


class LayerEmbeddings:
    """The embeddings that each layer gets of a token: from its id, and from its embedding."""

    def __init__(self, env: Env, spec: ModelSpec, prefix: str) -> None:
        assert spec.gemma is not None
        self.rows, width = spec.gemma.layer_vocab, spec.gemma.layer_width
        self.shape, self.scale = (spec.num_layers, width), spec.hidden_size**-0.5
        total = spec.num_layers * width
        self.table = Embedding(
            env, prefix + "embed_tokens_per_layer", self.rows, total, math.sqrt(width), rounds_scale=True
        )
        self.project = Linear(env, prefix + "per_layer_model_projection", spec.hidden_size, total)
        self.norm = RMSNorm(env, prefix + "per_layer_projection_norm", width, spec.norm_eps)

    def __call__(self, ids: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return, for each layer, [tokens, width].

        Args:
            ids: int64 [tokens].
            embedded: their embeddings [tokens, hidden].
        """
        projected = (self.project(embedded) * self.scale).view(-1, self.shape[1])
        normed = self.norm.alone(projected).view(-1, *self.shape)
        table = self.table(torch.where(ids < self.rows, ids, 0)).view(-1, *self.shape)
        return ((normed + table) * 2**-0.5).unbind(1)


class LayerEmbeddingGate:
    """The end of a layer: its embedding of a token, gated by the residual stream and projected into it."""

    def __init__(self, env: Env, spec: ModelSpec, prefix: str) -> None:
        assert spec.gemma is not None
        width = spec.gemma.layer_width
        self.gate = Linear(env, prefix + "per_layer_input_gate", spec.hidden_size, width)
        self.project = Linear(env, prefix + "per_layer_projection", width, spec.hidden_size)
        self.norm = RMSNorm(env, prefix + "post_per_layer_input_norm", spec.hidden_size, spec.norm_eps)
        self.activation = ACTIVATIONS[spec.activation]

    def __call__(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return what is added to the stream, [tokens, hidden], for x [tokens, hidden]."""
        return self.norm.alone(self.project(self.activation(self.gate(x)) * embedded))


def narrowed(x: torch.Tensor, batch: ForwardBatch, is_last: bool) -> torch.Tensor:
    """Return the rows of x that are needed behind the attention of a layer."""
    return x.index_select(0, batch.wanted) if is_last and batch.wanted is not None else x
