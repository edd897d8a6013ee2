"""`GGUFCheckpoint`: weights of a GGUF file under their Hugging Face names.

Blocks of the kinds in quant/formats/gguf.py are handed out as they are; all others are dequantised while reading.

llama.cpp's converter changes some tensors: it reorders Llama's q and k rows, adds 1 to Gemma's norm weights,
transposes GPT-2's matrices, and stacks experts. This module undoes all of that, so a model does not depend on the
format of its checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import torch

from quire.layers.env import StoredShape
from quire.models.checkpoint.checkpoint import Checkpoint, check_shape, check_unread
from quire.models.checkpoint.gguf_names import IN_SPEC, OFFSET_NORMS, REORDERED, layer_names
from quire.models.config.gguf import Metadata, open_gguf
from quire.models.spec import ModelSpec
from quire.quant.formats.gguf import KINDS
from quire.types import ModelError

log = logging.getLogger("quire")

_PLAIN = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)
_WHOLE = slice(None)
_CORRECTION = "mlp.gate.e_score_correction_bias"
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",  # of LFM2
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_NAME = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


class GGUFCheckpoint(Checkpoint):
    """Weights of one .gguf file. Tensors whose names match `elsewhere` need not be loaded."""

    def __init__(self, path: Path, spec: ModelSpec, elsewhere: re.Pattern[str] | None = None) -> None:
        reader = open_gguf(path)
        self.path = path
        self.spec = spec
        self.arch = Metadata(reader, path).arch
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.unpacked: Counter[str] = Counter()  # tensors read, by a type that is not computed with as it is
        self.unread = {
            name for name in set(self.tensors) - IN_SPEC if not (elsewhere and elsewhere.search(name))
        }
        # Layers that predict several tokens ahead are behind the last one.
        extra = [f"blk.{spec.num_layers + number}." for number in range(spec.extra_layers)]
        self.unread = {name for name in self.unread if not name.startswith(tuple(extra))}
        self.layer_names = layer_names(self.arch)

    def has(self, name: str) -> bool:
        return self._find(name)[0] in self.tensors

    def stored(self, name: str) -> StoredShape | None:
        stored, expert = self._find(name)
        if stored not in self.tensors or self.tensors[stored].tensor_type.name not in KINDS:
            return None
        source = self.tensors[stored]
        shape = source.data.shape if expert is None else source.data.shape[1:]
        return StoredShape(torch.uint8, tuple(shape), source.tensor_type.name)

    def packed(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        """Return blocks of a tensor as bytes [rows, bytes of a row], or a plain tensor as `tensor` does."""
        if self.stored(name) is None:
            return self.tensor(name, shape, rows, cols)
        stored, expert = self._find(name)
        source = self.tensors[stored]
        data = source.data if expert is None else source.data[expert]
        check_shape(name, shape, tuple(data.shape))
        self.unread.discard(stored)
        blocks = self._reordered(name, data)[rows][:, cols]
        return torch.from_numpy(np.require(blocks, requirements=["C", "W"]))

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        if name.endswith("kv_b_proj.weight") and self._find(name)[0] not in self.tensors:
            return self._joined(name, shape)[rows, cols].contiguous()
        stored, expert = self._find(name)
        if stored not in self.tensors:
            raise ModelError(
                f"{self.path} has no tensor {stored or 'for'} ({name}, expected shape {list(shape)})"
            )
        source = self.tensors[stored]
        transposed = self.arch == "gpt2" and name.endswith(_TRANSPOSED)
        stored_shape = tuple(int(n) for n in reversed(source.shape))
        is_convolution = name.endswith("conv.conv.weight")
        if is_convolution:  # stored without the dimension of 1 in the middle
            shape, cols = (shape[0], *shape[2:]), _WHOLE
        check_shape(
            name,
            shape,
            (stored_shape[1:] if expert is not None else stored_shape)[:: -1 if transposed else 1],
        )
        self.unread.discard(stored)
        data = source.data if expert is None else source.data[expert]
        if source.tensor_type not in _PLAIN and source.tensor_type.name not in KINDS:
            self.unpacked[source.tensor_type.name] += 1
        early = not (
            self._is_reordered(name) or transposed
        )  # rows can be selected before they are dequantised
        values = self._unpack(stored, data[rows] if early else data, source.tensor_type)
        values = self._reordered(name, values)
        if transposed:
            values = values.T
        if self.arch in OFFSET_NORMS and name.endswith("norm.weight"):
            values = values - 1
        values = values if early else values[rows]
        found = torch.from_numpy(
            np.require(values[:, cols] if values.ndim > 1 else values, requirements=["C", "W"])
        )
        return found.unsqueeze(1) if is_convolution else found

    def _joined(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return `kv_b_proj`, which newer files store as two stacks of one matrix per head."""
        heads, rank = self.spec.num_heads, shape[1]
        latent = self.spec.latent
        assert latent is not None
        keys = self.tensor(name.replace("kv_b_", "k_b_"), (heads, rank, latent.content_dim))
        values = self.tensor(name.replace("kv_b_", "v_b_"), (heads, latent.value_dim, rank))
        joined = torch.cat((keys.float().transpose(1, 2), values.float()), 1).flatten(0, 1)
        check_shape(name, shape, tuple(joined.shape))
        return joined

    def close(self) -> None:
        self.tensors = {}

    def finish(self) -> None:
        self.close()
        if self.unpacked:
            counts = ", ".join(f"{count} of type {name}" for name, count in sorted(self.unpacked.items()))
            log.info("tensors that are unpacked into the model's dtype: %s", counts)
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
        if inner == _CORRECTION:
            return f"blk.{layer}.exp_probs_b.bias", None
        kind = kind or "weight"  # attention sinks have no kind in Hugging Face's checkpoints
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

    def _is_reordered(self, name: str) -> bool:
        return self.arch in REORDERED and re.search(r"\.[qk]_proj\.", name) is not None

    def _reordered(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return rows in the order of Hugging Face's checkpoints."""
        if not self._is_reordered(name):
            return values
        heads = self.spec.num_heads if ".q_proj." in name else self.spec.num_kv_heads
        return _restore_order(values, heads)

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
