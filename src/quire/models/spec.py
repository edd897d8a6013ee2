"""`ModelSpec`: the normalised configuration of a checkpoint. Plain data, without torch.

Each fact has one field, however the checkpoint spells it. A model or feature that Quire cannot compute exactly raises
a ModelError that names it. The parsers are in models/config/: hf.py reads a config.json, gguf.py the metadata of a
GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.layers.mixer_params import MixerParams
from quire.layers.rope_params import NO_ROTATION, RopeParams
from quire.layers.routing_params import Routing
from quire.models.gemma_spec import GemmaSpec
from quire.quant.spec import QuantSpec
from quire.types import KVCodes, KVLayout, KVTensor, ModelError, StateLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """The expert layers of a mixture-of-experts model."""

    routing: Routing
    intermediate_size: int  # width of one routed expert
    sparse: tuple[bool, ...]  # by layer: whether it has experts instead of one MLP
    shared_size: int = 0  # width of the shared experts together; 0: there are none
    latent_size: int = 0  # width of the routed experts' inputs, between two projections; 0: there are none
    shared_gate: bool = False  # whether the output of the shared experts is multiplied by a gate per token


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """The indexers of sparse attention (DeepSeek-V3.2, arXiv:2512.02556); layers/indexer.py computes them.

    A query attends to the `top_k` tokens with the largest index scores.
    """

    heads: int
    dim: int  # of an index query and key; the first `rotary_dim` numbers of the latent attention are rotated
    top_k: int
    interleaved: bool  # whether neighbours form a rotated pair
    layers: tuple[bool, ...]  # by layer: whether it has an indexer; the others use the choice of the last one

    def num_parameters(self, hidden: int, query_rank: int) -> int:
        """Return the number of parameters of the matrices of one indexer."""
        return query_rank * self.heads * self.dim + hidden * (self.dim + self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """The sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); layers/mla.py computes it.

    A token's keys and values, of all heads, are linear functions of one latent vector and one rotated key.
    """

    query_rank: int | None  # width of the latent of queries; None: they are projected from the input
    rank: int  # width of the latent
    content_dim: int  # of a head's query and key, without the rotated part
    rotary_dim: int  # of the rotated part; all heads share that of the key
    value_dim: int  # of a head's value
    eps: float = 1e-6  # of the norms of latents
    index: IndexSpec | None = None  # None: queries attend to all tokens

    @property
    def stored_dim(self) -> int:
        """Return the width of a token's entry in the KV cache: the latent and the rotated key."""
        return self.rank + self.rotary_dim

    def num_parameters(self, hidden: int, heads: int) -> int:
        """Return the number of parameters of one layer's matrices."""
        queries = heads * (self.content_dim + self.rotary_dim)
        rank = self.query_rank
        query = hidden * queries if rank is None else rank * (hidden + queries)
        expand = self.rank * heads * (self.content_dim + self.value_dim)
        return query + hidden * self.stored_dim + expand + heads * self.value_dim * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries that grow with their position: times 1 + beta * ln(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    offset: int = 0
    only_unrotated: bool = False  # in layers without rotation only


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and options of a decoder-only transformer."""

    architecture: str  # the name in config.json, for messages
    family: str  # name of the family; models/registry.py has the classes of some
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: (
        int  # in tokens; lower it with dataclasses.replace to serve less and to build smaller tables
    )
    norm_eps: float
    activation: str  # a key of ACTIVATIONS in layers/activation.py, or xielu
    tie_embeddings: bool
    has_head: bool = True  # False: the model returns hidden states only
    dtype: str  # float32, bfloat16 or float16
    rope: RopeParams | None  # None: learned positions
    num_positions: int = 0  # rows of the table of learned positions; 0 with rope
    local_rope: RopeParams | None = None  # of layers with a window, if it differs
    rotates: tuple[bool, ...] = ()  # by layer: whether q and k are rotated; empty: in all layers
    windows: tuple[int | None, ...]  # by layer; a token attends to itself and the window - 1 tokens before it
    chunked_windows: bool = False  # a token attends to the tokens of its own chunk of `window` tokens instead
    sinks: bool = False  # whether each head has a score without a key, which joins the softmax's sum
    layout: str = "pre"  # where the norms of a layer are: a key of LAYOUTS in models/layouts.py
    norm: str = "rms"  # a key of NORMS in layers/norm.py
    mlp: str = "gated"  # gated, or plain: one projection in front of the activation
    # Checkpoint names that differ from Llama's, by Llama's name: norms, o_proj, q_norm, k_norm, up_proj, down_proj.
    names: Mapping[str, str] = field(default_factory=dict)
    fused_qkv: bool = False  # whether the checkpoint stores q, k and v as one tensor, qkv_proj
    fused_gate_up: bool = False  # whether it stores gate and up as one tensor, gate_up_proj
    qk_norm: bool = False
    # heads: of each head; rotated: of each rotated head; unit: the same without weights, in layers that rotate;
    # projection: of all heads together; layer: a LayerNorm
    qk_norm_kind: str = "heads"
    query_gate: bool = False  # whether q_proj also yields a gate of the attention's result, head by head
    query_growth: QueryGrowth | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    query_scale: float
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float | None = None
    rounds_embedding_scale: bool = False  # to the model's dtype, as in training
    # By layer, where layers differ; empty: as above. A layer with another source than itself reads the keys and values
    # of that layer, and keeps none.
    head_dims: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    mlp_sizes: tuple[int, ...] = ()
    gemma: GemmaSpec | None = None  # of Gemma 3n and 4
    moe: MoESpec | None = None
    latent: LatentSpec | None = None  # None: keys and values of each head
    mixer: MixerParams | None = None  # of layers with a state per request
    mixes: tuple[bool, ...] = ()  # by layer: whether it has such a state; empty: none has
    attends: tuple[bool, ...] = ()  # by layer: whether it keeps keys and values; empty: all do
    feeds: tuple[bool, ...] = ()  # by layer: whether it has an MLP or experts; empty: all have
    # Factors of the residual stream and of the result, by half (models/minimax.py); None: both are 1.
    residual_factors: Mapping[str, tuple[float, ...]] | None = None
    half_scales: tuple[float, float] | None = None  # of attention and mixer, in layers that have both
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # of an MLP's gate and result
    extra_layers: int = 0  # layers of the checkpoint behind the last one, for drafts; they are not loaded
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: QuantSpec | None = None  # None: plain numbers
    kv_codes: KVCodes | None = None  # how KV entries are stored; None: in the dtype of activations

    @staticmethod
    def from_config(config: dict[str, Any]) -> ModelSpec:
        """Parse the contents of a `config.json`.

        Raises:
            ModelError: if a field is missing or has a bad value, or if the model is not supported; names it.
        """
        from quire.models.config.hf import parse_config  # deferred, because that module imports this one

        return parse_config(config)

    def check_quantization(self) -> None:
        """Raise ModelError if the weights are in a quantised format that Quire cannot read."""
        if self.quantization and self.quantization.unsupported:
            raise ModelError(
                f"weights in the format {self.quantization.method} cannot be read: {self.quantization.unsupported}"
            )

    def kv_layout(self, index: int, dtype: str, ranks: int = 1) -> KVLayout:
        """Return what layer `index` keeps of each token. Layers and the sizing of the cache both call this.

        Args:
            index: index of the layer.
            dtype: name of the dtype of plain KV entries.
            ranks: number of ranks that share the KV heads. With more ranks than heads, several keep the same one.
        """
        if (self.attends and not self.attends[index]) or self.kv_source(index) != index:
            return KVLayout(())
        if self.latent:  # all heads share it, so each rank has the whole
            entry, keys = KVTensor(1, self.latent.stored_dim, dtype), self.latent.index
            return KVLayout(
                (entry, KVTensor(1, keys.dim, dtype)) if keys and keys.layers[index] else (entry,)
            )
        heads = max(self.layer_kv_heads(index) // ranks, 1)
        layout = KVLayout.keys_and_values(
            heads, self.layer_head_dim(index), dtype, self.windows[index], self.kv_codes
        )
        is_shared = self.kv_sources.count(index) > 1
        return replace(layout, chunked=self.chunked_windows, is_shared=is_shared)

    def layer_head_dim(self, index: int) -> int:
        """Return the head size of layer `index`."""
        return self.head_dims[index] if self.head_dims else self.head_dim

    def layer_kv_heads(self, index: int) -> int:
        """Return the number of KV heads of layer `index`."""
        return self.kv_heads[index] if self.kv_heads else self.num_kv_heads

    def kv_source(self, index: int) -> int:
        """Return the layer whose keys and values layer `index` reads: an earlier one, or itself."""
        return self.kv_sources[index] if self.kv_sources else index

    def mlp_size(self, index: int) -> int:
        """Return the width of the MLP of layer `index`."""
        return self.mlp_sizes[index] if self.mlp_sizes else self.intermediate_size

    def kv_layouts(self, dtype: str, ranks: int = 1) -> tuple[KVLayout, ...]:
        """Return the layouts of all layers, by index."""
        return tuple(self.kv_layout(index, dtype, ranks) for index in range(self.num_layers))

    def state_layout(self, index: int, dtype: str, ranks: int = 1) -> StateLayout:
        """Return what layer `index` keeps of each request; without tensors if it keeps nothing.

        Args:
            index: index of the layer.
            dtype: name of the dtype of activations.
            ranks: number of ranks that share the heads.
        """
        if self.mixer is None or not self.mixes[index]:
            return StateLayout(())
        return self.mixer.state_layout(dtype, ranks)

    def state_layouts(self, dtype: str, ranks: int = 1) -> tuple[StateLayout, ...]:
        """Return the states of all layers, by index."""
        return tuple(self.state_layout(index, dtype, ranks) for index in range(self.num_layers))

    def rope_dim(self, index: int) -> int:
        """Return the width of the vectors that rotary embeddings are applied to in layer `index`."""
        return self.latent.rotary_dim if self.latent else self.layer_head_dim(index)

    @property
    def layer_ropes(self) -> tuple[RopeParams, ...]:
        """Return the rotary parameters of each layer."""
        assert self.rope is not None
        local = self.local_rope or self.rope
        rotates = self.rotates or (True,) * self.num_layers
        return tuple(
            (self.rope if window is None else local) if turns else NO_ROTATION
            for window, turns in zip(self.windows, rotates)
        )

    @property
    def layer_is_sparse(self) -> tuple[bool, ...]:
        """Return, for each layer, whether it has experts."""
        return self.moe.sparse if self.moe else (False,) * self.num_layers

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Return the parameters of each layer's matrices."""
        gated = 2 if self.mlp == "plain" else 3
        counts = []
        for index, sparse in enumerate(self.layer_is_sparse):
            total = self._attention_parameters(index) if not self.attends or self.attends[index] else 0
            if self.mixer and self.mixes[index]:
                total += self.mixer.num_parameters(self.hidden_size)
            if self.feeds and not self.feeds[index]:
                pass
            elif sparse and self.moe:
                widths = self.moe.routing.num_experts * self.moe.intermediate_size + self.moe.shared_size
                routers = self.moe.routing.num_experts + self.moe.shared_gate
                total += self.hidden_size * (gated * widths + routers)
            else:
                total += gated * self.hidden_size * self.mlp_size(index)
            counts.append(total)
        return tuple(counts)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the matrices, without norms and biases (a few thousandths of all)."""
        total = sum(self.layer_parameters)
        if self.gemma:
            total += self.gemma.num_parameters(self.hidden_size, self.num_layers)
        positions = self.num_positions * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return total + embeddings + positions

    def _attention_parameters(self, index: int) -> int:
        """Return the number of parameters of the matrices of a layer's attention."""
        if self.latent:
            found = self.latent.num_parameters(self.hidden_size, self.num_heads)
            keys, rank = self.latent.index, self.latent.query_rank
            return found + (
                keys.num_parameters(self.hidden_size, rank) if keys and rank and keys.layers[index] else 0
            )
        kept = 2 * self.layer_kv_heads(index) if self.kv_source(index) == index else 0
        if self.gemma and index in self.gemma.keys_as_values:
            kept //= 2
        queries = (3 if self.query_gate else 2) * self.num_heads
        return self.hidden_size * self.layer_head_dim(index) * (queries + kept)
