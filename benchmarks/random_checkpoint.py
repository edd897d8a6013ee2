"""Write a checkpoint of a Llama or Qwen3 shape with random weights, to time starts from disk.

    python benchmarks/random_checkpoint.py Llama-3.1-8B FOLDER

Names, shapes and shards are those of the real checkpoint. The values are one stretch of normally distributed numbers,
repeated.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

SHARD_BYTES = 5 * 10**9
_STRETCH = 1 << 24  # values


def tensor_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of the checkpoint's tensors by name."""
    if config["model_type"] not in ("llama", "qwen3"):
        raise SystemExit(
            f"shapes of model_type {config['model_type']} are not known; use one of llama, qwen3"
        )
    hidden, width = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "self_attn.q_proj": [queries, hidden], "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden], "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [width, hidden], "mlp.up_proj": [width, hidden], "mlp.down_proj": [hidden, width],
        "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
    }  # fmt: skip
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": [dim], "self_attn.k_norm": [dim]}
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], hidden]
    return shapes


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and bfloat16 safetensors shards with their index to an existing folder."""
    values = torch.randn(_STRETCH, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    stretch = memoryview(values.view(torch.uint8).numpy())
    shards: list[dict[str, list[int]]] = [{}]
    room = SHARD_BYTES
    for name, shape in tensor_shapes(config).items():
        if shards[-1] and room < 2 * math.prod(shape):
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = shape
        room -= 2 * math.prod(shape)
    weight_map = {}
    for i, shapes in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shapes, stretch)
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def _write_shard(path: Path, shapes: dict[str, list[int]], stretch: memoryview) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = 2 * math.prod(shape)
            while left:
                left -= file.write(stretch[: min(left, len(stretch))])


if __name__ == "__main__":
    from h200_table import SHAPES

    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    write_checkpoint(target, SHAPES[sys.argv[1]])
