"""Attention whose result is multiplied by a gate of each query head (arXiv:2505.06708), as in Qwen3-Next."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.activation import pick_gate, pick_rounded_gate
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.residual import Stream
from quire.layers.rope import Rotation
from quire.models.layouts import SelfAttention
from quire.models.spec import ModelSpec
from quire.quant.base import Part, RoundedRows
from quire.quant.forms import FP8_BLOCK


class GatedSelfAttention(SelfAttention):
    """Attention times the sigmoid of a gate; `q_proj` stores the query and the gate of each head together."""

    def make_qkv(self, env: Env, spec: ModelSpec, prefix: str) -> Linear:
        """Load the projections in the order q, k, v, gate."""
        dim, heads, hidden = spec.head_dim, spec.num_heads, spec.hidden_size
        held, every = range(*env.parallel.cut(heads).indices(heads)), slice(0, hidden)
        queries, gates = (
            [
                Part(prefix + "q_proj.weight", (2 * heads * dim, hidden), slice(first, first + dim), every)
                for first in ((2 * head + second) * dim for head in held)
            ]
            for second in (0, 1)
        )
        kv_rows = env.parallel.cut(spec.num_kv_heads * dim, spec.num_kv_heads)
        keys_values = [
            Part(f"{prefix}{name}.weight", (spec.num_kv_heads * dim, hidden), kv_rows, every)
            for name in ("k_proj", "v_proj")
        ]
        self.gate_width, self.open_gate = len(held) * dim, pick_gate(env.device)
        self.rounded_gate = pick_rounded_gate(env.device) if self.gate_width % FP8_BLOCK == 0 else None
        return Linear.from_parts(env, [*queries, *keys_values, *gates])

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        packed, residual = self.qkv(x, residual)
        qkv, gate = packed.split([packed.shape[1] - self.gate_width, self.gate_width], 1)
        x = self.attend(qkv, rotation, batch)
        order = None if self.is_last else self.o.scale_order(x.shape[0])
        if order and self.rounded_gate:
            codes, scales = self.rounded_gate(x, gate, order == "columns")
            return self.o.of_rounded(RoundedRows(codes, scales, x.dtype), residual)
        x = self.open_gate(x, gate)
        if self.is_last:
            assert residual is not None  # the norm in front returned one
            x, residual = batch.narrow(x, residual)
        return self.o(x, residual)
