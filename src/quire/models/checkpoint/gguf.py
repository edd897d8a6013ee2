"""`GGUFCheckpoint`: weights of a GGUF file under their Hugging Face names, dequantised while reading.

llama.cpp's converter changes some tensors: it reorders Llama's q and k rows, adds 1 to Gemma's norm weights,
transposes GPT-2's matrices, and stacks experts. This module undoes all of that, so a model does not depend on the
format of its checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch

from quire.models.checkpoint.checkpoint import Checkpoint, check_shape, check_unread
from quire.models.checkpoint.gguf_names import IN_SPEC, OFFSET_NORMS, REORDERED, layer_names
from quire.models.config.gguf import Metadata, open_gguf
from quire.models.spec import ModelSpec
from quire.types import ModelError

_WHOLE = slice(None)
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_NAME = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


class GGUFCheckpoint(Checkpoint):
    """Weights of one .gguf file."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        reader = open_gguf(path)
        self.path = path
        self.spec = spec
        self.arch = Metadata(reader, path).arch
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.unread = set(self.tensors) - IN_SPEC
        self.layer_names = layer_names(self.arch)

    def has(self, name: str) -> bool:
        return self._find(name)[0] in self.tensors

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        stored, expert = self._find(name)
        if stored not in self.tensors:
            raise ModelError(
                f"{self.path} has no tensor {stored or 'for'} ({name}, expected shape {list(shape)})"
            )
        source = self.tensors[stored]
        transposed = self.arch == "gpt2" and name.endswith(_TRANSPOSED)
        stored_shape = tuple(int(n) for n in reversed(source.shape))
        check_shape(
            name,
            shape,
            (stored_shape[1:] if expert is not None else stored_shape)[:: -1 if transposed else 1],
        )
        self.unread.discard(stored)
        data = source.data if expert is None else source.data[expert]
        reordered = self.arch in REORDERED and re.search(r"\.[qk]_proj\.", name)
        early = not (reordered or transposed)  # rows can be selected before they are dequantised
        values = self._unpack(stored, data[rows] if early else data, source.tensor_type)
        if reordered:
            heads = self.spec.num_heads if ".q_proj." in name else self.spec.num_kv_heads
            values = _restore_order(values, heads)
        if transposed:
            values = values.T
        if self.arch in OFFSET_NORMS and name.endswith("norm.weight"):
            values = values - 1
        values = values if early else values[rows]
        return torch.from_numpy(
            np.require(values[:, cols] if values.ndim > 1 else values, requirements=["C", "W"])
        )

    def close(self) -> None:
        self.tensors = {}

    def finish(self) -> None:
        self.close()
        check_unread(
            {"lm_head.weight" if name == "output.weight" else name for name in self.unread},
            self.spec.tie_embeddings,
        )

    def _find(self, name: str) -> tuple[str, int | None]:
        """Return the GGUF name of `name` (empty: none) and, for a stack of experts, the expert's index."""
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}", None
        match = _NAME.fullmatch(name)
        if match is None:
            return "", None
        layer, inner, kind = match.groups()
        expert = _EXPERT.fullmatch(inner)
        if expert is None:
            return (
                f"blk.{layer}.{self.layer_names[inner]}.{kind}" if inner in self.layer_names else ""
            ), None
        number, which = expert.groups()
        single = f"blk.{layer}.ffn_{which}.{number}.{kind}"  # old files do not stack experts
        if single in self.tensors:
            return single, None
        return f"blk.{layer}.ffn_{which}_exps.{kind}", int(number)

    def _unpack(self, name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            return data
        try:
            return gguf.quants.dequantize(data, kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{self.path}: tensor {name} has the format {kind.name}, which cannot be read ({error})"
            ) from error


def _restore_order(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from neighbouring pairs to halves: row 2i + j of a head becomes row i + j * dim / 2."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
