"""The cost model: bytes and operations of a step, computed from the model's shape and the rows of the step log.

A layer runs its matrix products and its attention one after the other. So the least time of a step is the sum of two
rooflines (Williams et al., 2009), each the larger of bytes / bandwidth and operations / rate. Bytes are those of the
weights, read once per step, and of keys and values, moved once for each row that sees them. Activations and norms are
not counted. A multiply-add is two operations. Rows of latent attention are counted in the form that the engine computes,
absorbed or expanded (attention/expansion_rule.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.attention.expansion_rule import NO_EXPANSION, ExpansionRule
from quire.models.spec import ModelSpec
from quire.types import CODE_DTYPES, EngineInfo, KVCodes, KVLayout

StepRows = Sequence[tuple[str, int, int]]  # of a StepRecord: (request id, first KV entry, tokens run)


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured limits of a device: memory bandwidth and rate of matrix products, per second."""

    device: str
    bytes_per_s: float
    flops_per_s: float

    def least_s(self, num_bytes: float, flops: float) -> float:
        """Return the least time in seconds to move `num_bytes` and compute `flops` at once."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes and operations of one or more steps."""

    matrix_bytes: float
    matrix_flops: float
    attention_bytes: float
    attention_flops: float

    @property
    def bytes(self) -> float:
        return self.matrix_bytes + self.attention_bytes

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.attention_flops

    def floor_s(self, machine: Machine) -> float:
        """Return the least time of one step in seconds."""
        matrices = machine.least_s(self.matrix_bytes, self.matrix_flops)
        return matrices + machine.least_s(self.attention_bytes, self.attention_flops)

    @staticmethod
    def total(costs: Iterable[Cost]) -> Cost:
        """Sum the costs of several steps."""
        found = [(c.matrix_bytes, c.matrix_flops, c.attention_bytes, c.attention_flops) for c in costs]
        return Cost(*map(sum, zip(*found))) if found else Cost(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A matrix product of a step: the bytes of weights that it reads, and its operations."""

    name: str
    bytes: float
    flops: float


class CostModel:
    """The cost model of one model. It assumes that tokens are routed evenly to experts.

    Args:
        spec: the model.
        info: the engine that runs it.
        rule: which rows of latent attention the engine expands.
    """

    def __init__(self, spec: ModelSpec, info: EngineInfo, rule: ExpansionRule = NO_EXPANSION) -> None:
        self._spec, self._rule = spec, rule
        self._weight_bytes = info.weight_bytes / info.num_parameters  # per parameter
        # Number of layers by what they keep of a token. The scales of codes are counted, which static ones save.
        codes = KVCodes(info.kv_dtype) if info.kv_dtype in CODE_DTYPES.values() else None
        self._layouts = Counter(replace(spec, kv_codes=codes).kv_layouts(info.dtype))
        del self._layouts[KVLayout(())]
        self._state_bytes = sum(layout.num_bytes for layout in spec.state_layouts(info.dtype))  # of a request

    def step(self, rows: StepRows) -> Cost:
        """Compute the cost of a step with these rows."""
        products = self.products(rows)
        return Cost(sum(p.bytes for p in products), sum(p.flops for p in products), *self._attention(rows))

    def products(self, rows: StepRows) -> list[MatrixProduct]:
        """Return the matrix products of a step in the order of execution.

        Every row is assumed to sample. After the attention of the last layer, only the sampling tokens are computed.
        """
        spec, tokens, last = self._spec, sum(n for _, _, n in rows), self._spec.num_layers - 1
        before, after = _attention_products(spec)

        def product(
            name: str, parameters: float, n: int, read: float = 1.0, used: float = 1.0
        ) -> MatrixProduct:
            """Describe a product of which `read` matrices are read, and each of n tokens uses `used` of them."""
            return MatrixProduct(name, read * parameters * self._weight_bytes, 2 * used * parameters * n)

        def layer(index: int, n: int) -> list[MatrixProduct]:
            """Return the products of a layer that computes `n` tokens after its attention or its mixer."""
            found = []
            if not spec.attends or spec.attends[index]:
                found += [product(name, parameters, tokens) for name, parameters in before.items()]
                found += [product(*conversion) for conversion in self._conversions(rows, index == last)]
                found += [product(name, parameters, n) for name, parameters in after.items()]
            if spec.mixer and spec.mixes[index]:
                found.append(product("mixer", spec.mixer.num_parameters(spec.hidden_size), tokens))
            if spec.feeds and not spec.feeds[index]:
                return found
            if spec.layer_is_sparse[index] and (moe := spec.moe):
                width, shared = spec.hidden_size * moe.intermediate_size, spec.hidden_size * moe.shared_size
                experts, top_k = moe.routing.num_experts, moe.routing.top_k
                met = experts * (1 - (1 - top_k / experts) ** n)
                found += [
                    product("router", spec.hidden_size * experts, n),
                    product("experts gate_up", 2 * width, n, met, top_k),
                    product("experts down", width, n, met, top_k),
                ]
                return [*found, product("shared experts", 3 * shared, n)] if shared else found
            gates = 1 if spec.mlp == "plain" else 2
            width = spec.hidden_size * spec.intermediate_size
            name = "gate_up" if gates == 2 else "up"
            return [*found, product(name, gates * width, n), product("down", width, n)]

        layers = [p for index in range(last) for p in layer(index, tokens)] + layer(last, len(rows))
        head = spec.vocab_size * spec.hidden_size
        return [*layers, product("lm_head", head, len(rows))]

    def _conversions(self, rows: StepRows, is_last: bool) -> list[tuple[str, int, int, float]]:
        """Return the products between latents and heads in a layer: name, parameters, tokens, matrices read.

        A step with rows of both forms is counted as reading the weights once.
        """
        spec, latent = self._spec, self._spec.latent
        if latent is None:
            return []
        start, count = _spans(rows)
        expands = self._rule.rows(count, start + count)
        keys, values = (spec.num_heads * dim * latent.rank for dim in (latent.content_dim, latent.value_dim))
        found, absorbed = [], count[~expands]
        if absorbed.size:
            tokens = int(absorbed.sum())
            found = [
                ("absorb", keys, tokens, 1.0),
                ("values", values, absorbed.size if is_last else tokens, 1.0),
            ]
        if expands.any():
            found.append(("expand", keys + values, int((start + count)[expands].sum()), float(not found)))
        return found

    def _attention(self, rows: StepRows) -> tuple[float, float]:
        """Return the bytes of keys, values and states, and the operations of attention, of all layers.

        A step reads and writes the state of each row once. Operations on states are not counted.
        """
        start, count = _spans(rows)
        moved, pairs = 2 * self._state_bytes * len(rows), np.zeros(len(rows), np.int64)
        for layout, layers in self._layouts.items():
            reach = layout.window or int((start + count).max())
            moved += layers * layout.token_bytes * int((np.minimum(start, reach) + count).sum())
            pairs += layers * (_pairs(start + count, reach) - _pairs(start, reach))
        # Each pair of a query and a key costs a dot product and the addition of a weighted value.
        spec, latent = self._spec, self._spec.latent
        widths = np.full(len(rows), latent.stored_dim + latent.rank if latent else 2 * spec.head_dim)
        if latent:
            expands = self._rule.rows(count, start + count)
            widths[expands] = latent.content_dim + latent.rotary_dim + latent.value_dim
        return moved, 2 * spec.num_heads * int(widths @ pairs)


def _attention_products(spec: ModelSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parameters of the products before and after the attention of a layer, by name.

    Those between latents and heads depend on the rows (`CostModel._conversions`).
    """
    hidden, heads, latent = spec.hidden_size, spec.num_heads, spec.latent
    queries, keys = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if latent is None:
        gates = queries if spec.query_gate else 0
        return {"qkv": hidden * (queries + gates + 2 * keys)}, {"o": queries * hidden}
    rank = latent.query_rank
    before = {"q_a, kv_a" if rank else "q, kv_a": hidden * ((rank or queries) + latent.stored_dim)}
    if rank:
        before["q_b"] = rank * queries
    return before, {"o": heads * latent.value_dim * hidden}


def _spans(rows: StepRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the first KV entry and the tokens of each row, int64 [rows]."""
    return np.array([s for _, s, _ in rows], np.int64), np.array([n for _, _, n in rows], np.int64)


def _pairs(length: np.ndarray, window: int) -> np.ndarray:
    """Return the number of (query, visible key) pairs of sequences of `length` tokens."""
    inside = np.minimum(length, window)
    return inside * (inside + 1) // 2 + (length - inside) * window
