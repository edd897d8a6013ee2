"""DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437), V3.2, and others: latent attention and shared experts."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.layers.indexer import Indexer
from quire.layers.linear import Linear
from quire.layers.mla import LatentAttention, LatentExpansion
from quire.layers.norm import RMSNorm
from quire.layers.query_key import GrowingQueries
from quire.layers.residual import NormedLayer, ResidualAdd, ResidualNorm, Stream
from quire.layers.rope import Rotation
from quire.models.decoder import DecoderModel
from quire.models.moe import MoELayer
from quire.models.spec import ModelSpec


class LatentSelfAttention:
    """Multi-head latent attention with its projections.

    `norm` is the norm in front. For `adds` see `ResidualAdd`.
    """

    def __init__(
        self, env: Env, spec: ModelSpec, number: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> None:
        latent = spec.latent
        assert latent is not None
        self.is_last = number == spec.num_layers - 1
        self.head_dim = latent.content_dim + latent.rotary_dim
        heads, query_rank, rank = spec.num_heads, latent.query_rank, latent.rank
        queries = heads * spec.head_dim
        names, sizes, units = (
            ["q_a_proj", "kv_a_proj_with_mqa"],
            [query_rank or queries, latent.stored_dim],
            [1, 1],
        )
        if query_rank is None:
            names[0], units[0] = "q_proj", heads
        index = latent.index
        has_index = index is not None and index.layers[number]
        if index is not None and has_index:
            names += ["indexer.wk", "indexer.weights_proj"]
            sizes, units = [*sizes, index.dim, index.heads], [*units, 1, 1]
        names = [prefix + name for name in names]
        # Latents are the same on all ranks, so each computes them whole.
        self.down = NormedLayer(norm, Linear(env, names, spec.hidden_size, sizes, cut="rows", units=units))
        self.sizes = [size // unit * env.parallel.share(unit) for size, unit in zip(sizes, units)]
        self.up = None  # from the latent of a query to its heads
        self.up_sizes = [env.parallel.share(heads) * spec.head_dim]
        if query_rank is not None:
            ups, outs, up_units = [prefix + "q_b_proj"], [queries], [heads]
            if index is not None and has_index:
                ups, outs, up_units = (
                    [*ups, prefix + "indexer.wq_b"], [*outs, index.heads * index.dim], [*up_units, 1],
                )  # fmt: skip
                self.up_sizes.append(outs[1])
            up = Linear(env, ups, query_rank, outs, cut="rows", units=up_units)
            self.up = NormedLayer(RMSNorm(env, prefix + "q_a_layernorm", query_rank, latent.eps), up)
        expansion = LatentExpansion(
            env, prefix + "kv_b_proj", heads, rank, latent.content_dim, latent.rotary_dim, latent.value_dim
        )
        entry_norm = RMSNorm(env, prefix + "kv_a_layernorm", rank, latent.eps)
        kv = spec.kv_layout(number, env.dtype_name, env.parallel.size)
        self.indexer = None
        if index is not None and has_index:
            options = index.heads, index.top_k, index.interleaved
            self.indexer = Indexer(env, number, kv, prefix + "indexer.", *options)
        self.attention = LatentAttention(
            env,
            number,
            env.parallel.share(heads),
            kv,
            expansion,
            spec.query_scale,
            entry_norm,
            spec.layer_ropes[number].span(latent.rotary_dim),
        )
        o = Linear(env, prefix + "o_proj", heads * latent.value_dim, spec.hidden_size, cut="cols")
        self.o = ResidualAdd(o, adds)
        growth = spec.query_growth
        self.growth = None if growth is None else GrowingQueries(growth.beta, growth.length, growth.offset)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        down, residual = self.down(x, residual)
        q, entries, *indexed = down.split(self.sizes, 1)
        if self.up is not None:
            projected, _ = self.up(q.contiguous(), None)
            q, *index_queries = projected.split(self.up_sizes, 1)
            if self.indexer is not None:
                keys, weights = indexed
                batch.chosen = self.indexer(index_queries[0], keys, weights, rotation, batch)
        q = q.unflatten(1, (-1, self.head_dim))
        if self.growth is not None:
            q = q * self.growth.factor(batch.positions).to(q.dtype)[:, None, None]
        out = self.attention(q, entries, rotation, batch, batch.chosen)
        if self.is_last:
            assert residual is not None  # the norm in front returned one
            out, residual = batch.narrow(out, residual)
        return self.o(out, residual)


class DeepseekLayer(MoELayer):
    """A decoder layer with latent attention."""

    def make_attention(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> LatentSelfAttention:
        """Build the latent attention of layer `index`."""
        return LatentSelfAttention(env, spec, index, prefix, norm, adds)


class DeepseekModel(DecoderModel):
    """A DeepSeek model. Layers behind the last one, which predict several tokens ahead, are not loaded."""

    layer_class = DeepseekLayer
