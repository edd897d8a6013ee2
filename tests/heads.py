"""Tiny random draft heads in their public layout, a sequential twin in plain PyTorch, and runs that record drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire import EngineConfig
from quire.core.draft_depth import DraftDepth
from quire.core.steplog import StepRecord
from quire.host import build_engine
from quire.speculation.features import FeatureDrafter
from quire.types import EngineRequest, Request, SamplingParams

Tensors = dict[str, Tensor]
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 260,
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


def write_eagle3(folder: Path, taps: int = 2, target: int = 32, **changes: Any) -> Tensors:
    """Write an EAGLE-3 head and return its tensors.

    Args:
        folder: new folder.
        taps: layers of the model that it reads.
        target: hidden size of the model; that of tests/tiny.py by default. Heads for others have an embedding.
        changes: of the configuration.
    """
    config = {**EAGLE3, **changes}
    vocab = config["vocab_size"]
    folder.mkdir(parents=True)
    layer = "midlayer."
    tensors = random_tensors(
        {
            "fc.weight": (32, taps * target), "norm.weight": (32,), "lm_head.weight": (100, 32),
            layer + "input_layernorm.weight": (32,), layer + "hidden_norm.weight": (32,),
            layer + "post_attention_layernorm.weight": (32,), layer + "self_attn.q_proj.weight": (32, 64),
            layer + "self_attn.k_proj.weight": (16, 64), layer + "self_attn.v_proj.weight": (16, 64),
            layer + "self_attn.o_proj.weight": (32, 32), layer + "mlp.gate_proj.weight": (40, 32),
            layer + "mlp.up_proj.weight": (40, 32), layer + "mlp.down_proj.weight": (32, 40),
        },
        seed=5,
    )  # fmt: skip
    if target != 32:
        tensors |= random_tensors({"embed_tokens.weight": (vocab, 32)}, seed=6)
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:100].sort().values
    tensors["d2t"] = chosen - torch.arange(100)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def write_eagle(
    folder: Path, hidden: int = 32, bias: bool = True, copies: bool = True, **changes: Any
) -> Tensors:
    """Write a head of the first EAGLE and return its tensors.

    Args:
        folder: new folder.
        hidden: hidden size of the model; that of tests/tiny.py by default.
        bias: whether `fc`, q, k and v have biases, as heads for Llama 2 and for Qwen 2 have.
        copies: whether the file holds copies of the model's embedding, as public ones do; they are not read.
        changes: of the configuration.
    """
    config = {**EAGLE3, "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, **changes}
    del config["draft_vocab_size"]
    folder.mkdir(parents=True)
    layer, sizes = "layers.0.", {"q": 32, "k": 16, "v": 16}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden), layer + "post_attention_layernorm.weight": (hidden,),
        **{f"{layer}self_attn.{name}_proj.weight": (size, hidden) for name, size in sizes.items()},
        layer + "self_attn.o_proj.weight": (hidden, 32), layer + "mlp.gate_proj.weight": (40, hidden),
        layer + "mlp.up_proj.weight": (40, hidden), layer + "mlp.down_proj.weight": (hidden, 40),
    }  # fmt: skip
    if bias:
        shapes |= {"fc.bias": (hidden,)}
        shapes |= {f"{layer}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if copies:
        shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
    tensors = random_tensors(shapes, seed=8)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1600,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "eos_token_id": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "dtype": "float32",
}  # fmt: skip


def write_mtp(folder: Path) -> Path:
    """Write a tiny GLM-4.5 of two layers and one for multi-token prediction. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (1600, 32), "model.norm": (32,), "lm_head": (1600, 32),
    }  # fmt: skip
    attention = {f"self_attn.{name}_proj": (32, 32) for name in "qkvo"}
    norms = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
    end = {"enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,), "eh_proj": (32, 64)}
    for i in range(3):
        parts: dict[str, tuple[int, ...]] = {**attention, **norms, **(end if i == 2 else {})}
        experts = {"mlp.": 48} if i == 0 else {f"mlp.experts.{e}.": 16 for e in range(4)}
        experts |= {} if i == 0 else {"mlp.shared_experts.": 16}
        for prefix, width in experts.items():
            parts |= {prefix + "gate_proj": (width, 32), prefix + "up_proj": (width, 32)}
            parts[prefix + "down_proj"] = (32, width)
        if i:
            parts["mlp.gate"] = (4, 32)
        names |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    tensors = random_tensors({f"{name}.weight": shape for name, shape in names.items()}, seed=7)
    for i in (1, 2):
        tensors[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GLM))
    return folder


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
        q, k, v = ((x @ tensors[f"{p}self_attn.{n}_proj.weight"].T).unflatten(1, (-1, 16)) for n in "qkv")
        x = attend(rotate(q, positions, 16), rotate(k, positions, 16), v)
        out = hidden + x @ tensors[p + "self_attn.o_proj.weight"].T
        out = out + mlp(rms(out, tensors[p + "post_attention_layernorm.weight"], 1e-5), tensors, p + "mlp.")
        logits = rms(out[-1], tensors["norm.weight"], 1e-5) @ tensors["lm_head.weight"].T
        best = int(logits.argmax())
        drafts.append(best + int(tensors["d2t"][best]))
        ids.append(drafts[-1])
        hidden = torch.cat([hidden, out[-1:]])
    return drafts


def eagle_drafts(
    tensors: Tensors, embed: Tensor, unembed: Tensor, ids: list[int], states: Tensor, count: int
) -> list[int]:
    """Return the greedy drafts of a head of the first EAGLE behind the tokens `ids`, without a cache.

    Args:
        tensors: the head.
        embed: the embedding of the model.
        unembed: its output projection.
        ids: n known tokens.
        states: the last hidden states of the model for the first n - 1 tokens.
        count: number of drafts.
    """
    p, ids, drafts = "layers.0.", list(ids), list[int]()
    for _ in range(count):
        positions = torch.arange(len(states))
        pairs = torch.cat([embed[torch.tensor(ids[1:])], states], 1)
        hidden = pairs @ tensors["fc.weight"].T + tensors.get("fc.bias", torch.zeros(()))
        q, k, v = (
            (hidden @ tensors[f"{p}self_attn.{n}_proj.weight"].T
             + tensors.get(f"{p}self_attn.{n}_proj.bias", torch.zeros(()))).unflatten(1, (-1, 16))
            for n in "qkv"
        )  # fmt: skip
        x = attend(rotate(q, positions, 16), rotate(k, positions, 16), v)
        out = hidden + x @ tensors[p + "self_attn.o_proj.weight"].T
        out = out + mlp(rms(out, tensors[p + "post_attention_layernorm.weight"], 1e-5), tensors, p + "mlp.")
        drafts.append(int((out[-1] @ unembed.T).argmax()))
        ids.append(drafts[-1])
        states = torch.cat([states, out[-1:]])
    return drafts


def requests(count: int, tokens: int) -> list[EngineRequest]:
    """Return requests of different lengths, greedy and sampled in turn."""
    found = []
    for i in range(count):
        prompt = [1 + (7 * i + j * j) % 90 for j in range(19 - 5 * i)]
        sampling = {"temperature": 0.8, "top_k": 20} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        found.append(EngineRequest(f"r{i}", prompt, params, seed=i))
    return found


class DraftsWithPauses:
    """A `DraftDepth` that drafts in three steps, then not in `pause` steps, and so on."""

    def __init__(self, depth: int, pause: int) -> None:
        self._depth, self._pause, self._step = depth, pause, 0

    def start(self, request: Request) -> None:
        request.drafts = self._depth

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        self._step += 1
        for request in rows:
            request.drafts = self._depth if self._step % (3 + self._pause) < 3 else 0


def run(
    model: Path, count: int = 4, tokens: int = 24, depth: DraftDepth | None = None, **settings: Any
) -> tuple[dict[str, list[int]], Any]:
    """Return the tokens of `count` requests of `tokens` tokens, and the engine's counters. `depth` chooses its drafts."""
    fixed: dict[str, Any] = {
        "max_model_len": 64,
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    config = EngineConfig(model=str(model), check_invariants=True, **{**fixed, **settings})
    engine, _ = build_engine(config)
    engine.scheduler.depth = depth or engine.scheduler.depth
    got: dict[str, list[int]] = {}
    try:
        for request in requests(count, tokens):
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                got.setdefault(output.id, []).extend(output.token_ids)
        return got, engine.log.totals
    finally:
        engine.close()


def record_drafts(monkeypatch: pytest.MonkeyPatch, drafter_class: Any) -> list[tuple[list[int], list[int]]]:
    """Return a list that grows by the known tokens and the drafts of the first row of each step."""
    found: list[tuple[list[int], list[int]]] = []
    propose = drafter_class.propose

    def note(drafter: Any, rows: Any) -> None:
        propose(drafter, rows)
        slot, count = int(rows.slots[0]), int(rows.counts[0])
        known = int(drafter._columns.num_tokens[slot])
        tokens = drafter._columns.tokens[slot].tolist()
        found.append((tokens[:known], tokens[known : known + count]))

    monkeypatch.setattr(drafter_class, "propose", note)
    return found


class Recorder:
    """The model's hidden states by position, and the drafts of a single request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.features: dict[int, torch.Tensor] = {}
        learn = FeatureDrafter.learn

        def keep(drafter: FeatureDrafter, batch: Any, hidden: torch.Tensor) -> None:
            head = drafter._head
            states = head.features() if hasattr(head, "features") else hidden
            for position, state in zip(batch.positions.tolist(), states):
                self.features[position] = state.clone()
            learn(drafter, batch, hidden)

        self.drafts = record_drafts(monkeypatch, FeatureDrafter)
        monkeypatch.setattr(FeatureDrafter, "learn", keep)

    def states(self, count: int) -> torch.Tensor:
        return torch.stack([self.features[position] for position in range(count)])
