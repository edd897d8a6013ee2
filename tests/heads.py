"""Tiny random draft heads in their public layout, a sequential twin in plain PyTorch, and runs that record drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire import EngineConfig
from quire.host import build_engine
from quire.speculation.features import FeatureDrafter
from quire.types import EngineRequest, SamplingParams

Tensors = dict[str, Tensor]
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 260,
    "draft_vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Return matrices of noise, and vectors around 1."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=rng) * (0.25 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_eagle3(folder: Path, taps: int = 2, **changes: Any) -> Tensors:
    """Write an EAGLE-3 head for the model of tests/tiny.py with `taps` layers, and return its tensors."""
    folder.mkdir(parents=True)
    layer = "midlayer."
    tensors = random_tensors(
        {
            "fc.weight": (32, taps * 32), "norm.weight": (32,), "lm_head.weight": (100, 32),
            layer + "input_layernorm.weight": (32,), layer + "hidden_norm.weight": (32,),
            layer + "post_attention_layernorm.weight": (32,), layer + "self_attn.q_proj.weight": (32, 64),
            layer + "self_attn.k_proj.weight": (16, 64), layer + "self_attn.v_proj.weight": (16, 64),
            layer + "self_attn.o_proj.weight": (32, 32), layer + "mlp.gate_proj.weight": (40, 32),
            layer + "mlp.up_proj.weight": (40, 32), layer + "mlp.down_proj.weight": (32, 40),
        },
        seed=5,
    )  # fmt: skip
    chosen = torch.randperm(260, generator=torch.Generator().manual_seed(1))[:100].sort().values
    tensors["d2t"] = chosen - torch.arange(100)
    tensors["t2d"] = torch.zeros(260, dtype=torch.bool).index_fill_(0, chosen, True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**EAGLE3, **changes}))
    return tensors


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, dim: int) -> Tensor:
    """Rotate halves of heads, x [tokens, heads, dim]."""
    angles = positions[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, [tokens, heads * dim]; a KV head serves several heads."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def mlp(x: Tensor, tensors: Tensors, prefix: str) -> Tensor:
    gate = torch.nn.functional.silu(x @ tensors[prefix + "gate_proj.weight"].T)
    return (gate * (x @ tensors[prefix + "up_proj.weight"].T)) @ tensors[prefix + "down_proj.weight"].T


def eagle3_drafts(tensors: Tensors, embed: Tensor, ids: list[int], features: Tensor, count: int) -> list[int]:
    """Return the greedy drafts behind the tokens `ids`, without a cache.

    Args:
        tensors: the head.
        embed: the embedding of the model.
        ids: n known tokens.
        features: hidden states of three layers of the model for the first n - 1 tokens.
        count: number of drafts.
    """
    p, ids = "midlayer.", list(ids)
    hidden = features @ tensors["fc.weight"].T
    drafts: list[int] = []
    for _ in range(count):
        positions = torch.arange(len(hidden))
        tokens = embed[torch.tensor(ids[1:])]
        x = torch.cat(
            [rms(tokens, tensors[p + "input_layernorm.weight"], 1e-5), rms(hidden, tensors[p + "hidden_norm.weight"], 1e-5)], 1
        )  # fmt: skip
        q, k, v = ((x @ tensors[f"{p}self_attn.{n}_proj.weight"].T).unflatten(1, (-1, 8)) for n in "qkv")
        x = attend(rotate(q, positions, 8), rotate(k, positions, 8), v)
        out = hidden + x @ tensors[p + "self_attn.o_proj.weight"].T
        out = out + mlp(rms(out, tensors[p + "post_attention_layernorm.weight"], 1e-5), tensors, p + "mlp.")
        logits = rms(out[-1], tensors["norm.weight"], 1e-5) @ tensors["lm_head.weight"].T
        best = int(logits.argmax())
        drafts.append(best + int(tensors["d2t"][best]))
        ids.append(drafts[-1])
        hidden = torch.cat([hidden, out[-1:]])
    return drafts


def requests(count: int) -> list[EngineRequest]:
    """Return requests of different lengths, greedy and sampled in turn."""
    found = []
    for i in range(count):
        prompt = [1 + (7 * i + j * j) % 90 for j in range(19 - 5 * i)]
        sampling = {"temperature": 0.8, "top_k": 20} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        found.append(EngineRequest(f"r{i}", prompt, params, seed=i))
    return found


def run(model: Path, count: int = 4, **settings: Any) -> tuple[dict[str, list[int]], Any]:
    """Return the tokens of `count` requests, and the engine's counters."""
    fixed: dict[str, Any] = {
        "max_model_len": 64,
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    config = EngineConfig(model=str(model), check_invariants=True, **{**fixed, **settings})
    engine, _ = build_engine(config)
    got: dict[str, list[int]] = {}
    try:
        for request in requests(count):
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                got.setdefault(output.id, []).extend(output.token_ids)
        return got, engine.log.totals
    finally:
        engine.close()


class Recorder:
    """The model's hidden states by position, and the drafts of a single request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.features: dict[int, torch.Tensor] = {}
        self.drafts: list[tuple[list[int], list[int]]] = []  # known tokens, drafts behind them
        learn, propose = FeatureDrafter.learn, FeatureDrafter.propose

        def keep(drafter: FeatureDrafter, batch: Any, hidden: torch.Tensor) -> None:
            states = drafter._head._features() if hasattr(drafter._head, "_features") else hidden
            for position, state in zip(batch.positions.tolist(), states):
                self.features[position] = state.clone()
            learn(drafter, batch, hidden)

        def note(drafter: FeatureDrafter, rows: Any) -> None:
            propose(drafter, rows)
            slot, count = int(rows.slots[0]), int(rows.counts[0])
            known = int(drafter._columns.num_tokens[slot])
            tokens = drafter._columns.tokens[slot].tolist()
            self.drafts.append((tokens[:known], tokens[known : known + count]))

        monkeypatch.setattr(FeatureDrafter, "learn", keep)
        monkeypatch.setattr(FeatureDrafter, "propose", note)

    def states(self, count: int) -> torch.Tensor:
        return torch.stack([self.features[position] for position in range(count)])
