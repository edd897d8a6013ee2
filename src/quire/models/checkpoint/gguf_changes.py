"""What llama.cpp's converter does to the values of tensors, and how to undo it: `change_of`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.layers.mixer_params import DeltaParams
from quire.models.spec import ModelSpec

# Rows of q and k: neighbouring pairs instead of halves.
REORDERED = ("llama", "arcee", "granite", "granitehybrid", "granitemoe", "mistral3", "smollm3")
# 1 is added to the weights of norms.
OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
_TILED = ("qwen35", "qwen35moe")  # value heads: by their number within a key head, instead of by key head
_PLAIN_NORM = "linear_attn.norm.weight"
_QUERIES_OR_KEYS = re.compile(r"\.([qk])_proj\.")


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows or columns: place `i` of the checkpoint is place `index[i]` of the `total` in the file."""

    index: np.ndarray
    total: int

    def blocks(self, size: int) -> np.ndarray | None:
        """Return the order in units of `size` places; None if it does not keep them together."""
        if len(self.index) % size:
            return None
        units = self.index.reshape(-1, size)
        whole = (units == units[:, :1] + np.arange(size)).all() and not (units[:, 0] % size).any()
        return units[:, 0] // size if whole else None


@dataclass(frozen=True, slots=True)
class Change:
    """How to undo what the converter did to a tensor.

    Attributes:
        rows, cols: the order of its rows and columns in the file; None: that of the checkpoint.
        values: function of its values; None: they are the same.
    """

    rows: Order | None = None
    cols: Order | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None


_NONE = Change()


def change_of(arch: str, name: str, spec: ModelSpec) -> Change:
    """Return how to undo the change of the tensor with the Hugging Face name `name`.

    Args:
        arch: architecture of the file.
        name: name of the tensor.
        spec: the model's spec.
    """
    if name.endswith(".A_log"):
        return Change(_value_heads(arch, name, spec).rows, values=_log_of_rate)
    if arch in OFFSET_NORMS and name.endswith("norm.weight") and not name.endswith(_PLAIN_NORM):
        return Change(values=_without_offset)
    if arch in REORDERED and (match := _QUERIES_OR_KEYS.search(name)):
        heads = spec.num_heads if match[1] == "q" else spec.num_kv_heads
        return Change(_halves(heads, spec.head_dim))
    return _value_heads(arch, name, spec)


def _log_of_rate(values: np.ndarray) -> np.ndarray:
    """Undo A = -exp(A_log). Values that are not negative give NaN, which is reported when the model is loaded."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(-values)


def _without_offset(values: np.ndarray) -> np.ndarray:
    return values - 1


def _halves(heads: int, dim: int) -> Order:
    """Return the order of rows in which row i + j * dim / 2 of a head is row 2i + j of the file."""
    rows = np.arange(heads * dim)
    return Order(rows.reshape(heads, dim // 2, 2).swapaxes(1, 2).reshape(-1), len(rows))


def _value_heads(arch: str, name: str, spec: ModelSpec) -> Change:
    """Return the change of tensors of linear attention, whose value heads the converters of Qwen reorder."""
    params = spec.mixer
    if "linear_attn." not in name or not isinstance(params, DeltaParams):
        return _NONE
    keys, heads, dim = params.key_heads, params.value_heads, params.value_dim
    inner = name.partition("linear_attn.")[2].removesuffix(".weight")
    if arch == "qwen3next" and inner in (
        "in_proj_b",
        "in_proj_a",
    ):  # one tensor, both parts of a key head together
        parts = np.arange(2 * heads).reshape(keys, 2, heads // keys)
        return Change(Order(parts[:, int(inner == "in_proj_a")].reshape(-1), 2 * heads))
    if arch not in _TILED:
        return _NONE
    tiled = np.arange(heads).reshape(heads // keys, keys).T.reshape(-1)
    wide = (tiled[:, None] * dim + np.arange(dim)).reshape(-1)
    if inner in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return Change(Order(tiled, heads))
    if inner == "in_proj_z":
        return Change(Order(wide, len(wide)))
    if inner == "out_proj":
        return Change(cols=Order(wide, len(wide)))
    if inner in ("in_proj_qkv", "conv1d"):
        before = 2 * keys * params.key_dim
        index = np.concatenate((np.arange(before), before + wide))
        return Change(Order(index, len(index)))
    return _NONE
