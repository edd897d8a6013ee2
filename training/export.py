"""Writing and reading of a model folder in the Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.chat import END_OF_TEXT, TURN_END
from training.model import Model, Shape


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def save_model(model: Model, folder: Path, tokenizer_folder: Path, shards: int) -> None:
    """Write the weights in bfloat16 to `shards` files; a single file has the plain name and no index."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    end_of_text, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    s = model.shape
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": turn_end,
            "pad_token_id": end_of_text,
            "head_dim": s.head_dim,
            "hidden_act": "silu",
            "hidden_size": s.hidden,
            "initializer_range": 0.02,
            "intermediate_size": s.intermediate,
            "max_position_embeddings": s.context,
            "max_window_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_hidden_layers": s.layers,
            "num_key_value_heads": s.kv_heads,
            "rms_norm_eps": s.epsilon,
            "rope_scaling": None,
            "rope_theta": s.theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": s.vocabulary,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": [turn_end, end_of_text], "pad_token_id": end_of_text},
    )
    if tokenizer_folder != folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer_folder / name, folder / name)
    weights = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()
    }
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    total = sum(w.nbytes for w in weights.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    written = 0
    for name, w in weights.items():
        parts[min(shards - 1, written * shards // total)][name] = w
        written += w.nbytes
    index = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(part, file))
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )


def load_model(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    c = json.loads((folder / "config.json").read_text())
    shape = Shape(
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        intermediate=c["intermediate_size"],
        vocabulary=c["vocab_size"],
        head_dim=c["head_dim"],
        context=c["max_position_embeddings"],
        theta=c["rope_theta"],
        epsilon=c["rms_norm_eps"],
    )
    model = Model(shape)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    model.load_state_dict(weights)
    cos, sin = model.cos, model.sin  # stay in float32
    model = model.to(device, dtype).eval()
    model.cos, model.sin = cos.to(device), sin.to(device)
    return model
