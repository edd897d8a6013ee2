"""`ModelSpec`: what a checkpoint's `config.json` says, normalised. Plain data, no torch.

One field per fact, whatever spelling the config used. A model or feature that Quire cannot compute
exactly is a ModelError that names it, never a guess. Parsing is in models/config/hf.py (and, for
GGUF metadata, models/checkpoint/gguf.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.layers.rope_params import RopeParams
from quire.types import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """The expert layers of a mixture-of-experts model."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk: bool  # whether the weights of the chosen experts are scaled to sum to 1
    sparse: tuple[bool, ...]  # by layer: experts, or one ordinary MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, by its numbers."""

    architecture: str  # as in config.json, for messages
    family: str  # key into models/registry.py
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int  # may be lowered (dataclasses.replace) to serve, and make tables for, less
    norm_eps: float
    activation: str  # silu, gelu, gelu_tanh or relu
    tie_embeddings: bool
    has_head: bool = True  # False: hidden states are all that the model is for
    dtype: str  # float32, bfloat16 or float16
    rope: RopeParams | None  # None: learned positions
    num_positions: int = 0  # rows of the table of learned positions; 0 with rope
    local_rope: RopeParams | None = None  # for layers with a window, where it differs
    windows: tuple[int | None, ...]  # by layer; a token sees itself and the window - 1 before it
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    query_scale: float
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float | None = None
    moe: MoESpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None  # how the checkpoint's weights are packed; None: plain numbers

    @staticmethod
    def from_config(config: dict[str, Any]) -> ModelSpec:
        """The spec of a `config.json`; ModelError names what is missing or not supported."""
        from quire.models.config.hf import parse_config  # here: that module builds on this one

        return parse_config(config)

    def check_quantization(self) -> None:
        """Raise ModelError if the weights are packed in a format that Quire does not read."""
        if self.quantization:
            raise ModelError(f"quantised checkpoints are not supported yet: {self.quantization}")

    @property
    def layer_is_sparse(self) -> tuple[bool, ...]:
        return self.moe.sparse if self.moe else (False,) * self.num_layers

    @property
    def num_parameters(self) -> int:
        """Parameters of the matrices (norms and biases, a few thousandths of the whole, are left out)."""
        qkv = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (qkv + self.num_heads)
        gated = 2 if self.family == "gpt2" else 3
        total = self.num_layers * attention
        for sparse in self.layer_is_sparse:
            if sparse and self.moe:
                total += self.moe.num_experts * (
                    gated * self.hidden_size * self.moe.intermediate_size + self.hidden_size
                )
            else:
                total += gated * self.hidden_size * self.intermediate_size
        positions = self.num_positions * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return total + embeddings + positions
