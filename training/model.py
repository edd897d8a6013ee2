"""A compact Qwen3-shaped transformer for training and for a reference decode.

Parameter names are those of Hugging Face's `Qwen3ForCausalLM`, so `state_dict` needs no conversion. Training uses
packed rows: `documents` holds the document number of each token, and attention stays inside a document. Decoding uses
right-padded rows with one length each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

# (q, k, v, state) -> as q, all [batch, heads, length, head_dim]. A module-level function and its
# state are apart, so that a compiled layer sees the same function at every step.
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 2048
    head_dim: int = 64
    context: int = 2048
    theta: float = 10_000.0
    epsilon: float = 1e-6


BASE = Shape(hidden=384, layers=7, heads=8, kv_heads=2, intermediate=768)
DRAFT = Shape(hidden=128, layers=4, heads=2, kv_heads=1, intermediate=384)
TINY = Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128)  # to try the scripts


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.epsilon).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary position embedding in the half-split order of Qwen and Llama."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.epsilon)
        self.k_norm = RMSNorm(s.head_dim, s.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, state: Any) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, -1, self.shape.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, self.shape.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, state)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden, s.epsilon)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, state: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, state)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.epsilon)


class Model(nn.Module):
    """The transformer. The output matrix is the tied embedding, so there is no `lm_head` parameter."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        frequency = shape.theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.outer(torch.arange(shape.context).float(), frequency).repeat(
            1, 2
        )  # [context, head_dim]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # What writes to the residual stream starts at zero: each layer begins as the identity.
                zero = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.0 if zero else (0.02 if "embed" in name else p.shape[1] ** -0.5))

    def features(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend, states: list[Any]) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer, state in zip(self.model.layers, states):
            x = layer(x, cos, sin, attend, state)
        return self.model.norm(x)

    def forward(self, tokens: Tensor, attend: Attend, state: Any = None) -> Tensor:
        """Return the final features [batch, length, hidden] of rows that start at position 0."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        return self.features(tokens, cos, sin, attend, [state] * self.shape.layers)

    def logits(self, features: Tensor) -> Tensor:
        return F.linear(features, self.model.embed_tokens.weight)


def causal(q: Tensor, k: Tensor, v: Tensor, state: None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def document_attention(documents: Tensor) -> tuple[Attend, Any]:
    """Compute causal attention inside each document; `documents` [batch, length] holds document numbers."""
    if documents.device.type == "cpu":
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return masked, same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    batch, length = documents.shape
    return flex, _block_mask()(visible, batch, None, length, length, device=documents.device)


@cache
def _block_mask() -> Callable[..., object]:
    return torch.compile(create_block_mask)


def fill_cache(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
    cache[0, :, :, : k.shape[2]], cache[1, :, :, : k.shape[2]] = k, v
    return causal(q, k, v, None)


def extend_cache(q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    cache, at, mask = state  # one new token for each row, at its own position
    rows = torch.arange(len(at), device=at.device)
    cache[0, rows, :, at], cache[1, rows, :, at] = k[:, :, 0], v[:, :, 0]
    return masked(q, cache[0], cache[1], mask)


@torch.no_grad()
def greedy(
    model: Model, prompts: list[list[int]], max_tokens: int, stop: set[int], batch: int = 128
) -> list[list[int]]:
    """Decode each prompt greedily and return the continuations without the stop token."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for i, tokens in zip(rows, _greedy_batch(model, [prompts[i] for i in rows], max_tokens, stop)):
            results[i] = tokens
    return results


def _greedy_batch(model: Model, prompts: list[list[int]], max_tokens: int, stop: set[int]) -> list[list[int]]:
    s, device = model.shape, model.cos.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = min(s.context, max(map(len, prompts)) + max_tokens)
    tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = torch.tensor(prompt)
    dtype = model.model.embed_tokens.weight.dtype
    caches = [
        torch.zeros(2, len(prompts), s.kv_heads, longest, s.head_dim, device=device, dtype=dtype)
        for _ in range(s.layers)
    ]

    width = tokens.shape[1]
    cos, sin = model.cos, model.sin  # float32: rounded angles would cost precision far from the start
    features = model.features(tokens.to(device), cos[:width], sin[:width], fill_cache, caches)
    # What right padding wrote lies at or beyond each row's length, hidden until overwritten.
    last = model.logits(features[torch.arange(len(prompts), device=device), lengths - 1]).argmax(-1)
    stops = torch.tensor(sorted(stop), device=device)
    done, columns, at = torch.zeros_like(last, dtype=torch.bool), [], lengths.clone()
    for n in range(max_tokens):
        done = done | torch.isin(last, stops)
        columns.append(torch.where(done, -1, last))
        if (n % 8 == 7 and bool(done.all())) or n + 1 == max_tokens:
            break
        at = at.clamp(max=longest - 1)
        mask = (torch.arange(longest, device=device) <= at[:, None])[:, None, None, :]
        features = model.features(
            last[:, None],
            cos[at][:, None, None],
            sin[at][:, None, None],
            extend_cache,
            [(cache, at, mask) for cache in caches],
        )
        last, at = model.logits(features[:, -1]).argmax(-1), at + 1
    table = torch.stack(columns, 1).tolist()
    return [[t for t in row if t >= 0] for row in table]
