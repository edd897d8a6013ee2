"""A dense decoder with random weights, a decode step of it in plain PyTorch, and the arguments of the persistent kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.kernels.matmul.packed import reorder_nibbles
from quire.kernels.persistent.scales import scale_words
from quire.kernels.persistent.schedule import INT4_GROUP, DecoderSizes
from quire.quant.formats.convert import quantise_into
from quire.quant.forms import Fp8Weight, IntGroupWeight
from quire.quant.layouts import Fp8Layout, IntGroupLayout

BLOCK = 16  # tokens of a KV block


@dataclass
class StoredWeight:
    """A quantised weight, and its numbers and scales as the kernel reads them."""

    form: Fp8Weight | IntGroupWeight
    numbers: torch.Tensor
    scales: torch.Tensor


@dataclass
class DecodeInputs:
    """The rows of a step: one token each."""

    ids: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows], the tokens before the new one
    kv_slots: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows], rows of the block table


class RandomDecoder:
    """Weights and a KV cache with entries for `slots` requests of up to `context` tokens."""

    def __init__(self, sizes: DecoderSizes, slots: int, context: int, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.generator = torch.Generator(device).manual_seed(1)
        s, dim = sizes, sizes.head_dim
        blocks = slots * (context // BLOCK)
        qkv_rows = (s.heads + 2 * s.kv_heads) * dim
        kv = blocks, s.kv_heads, BLOCK, dim
        self.layers = [
            {
                "qkv": self._weight(qkv_rows, s.hidden),
                "out": self._weight(s.hidden, s.heads * dim),
                "gate_up": self._weight(2 * s.intermediate, s.hidden, gated=True),
                "down": self._weight(s.hidden, s.intermediate),
                "input_norm": self._normal(s.hidden) * 0.1 + 1,
                "mlp_norm": self._normal(s.hidden) * 0.1 + 1,
                "head_norms": self._normal(s.heads + s.kv_heads, dim) * 0.1 + 1,
                "bias": self._normal(qkv_rows) * 0.5,
                "keys": self._normal(*kv),
                "values": self._normal(*kv),
            }
            for _ in range(s.layers)
        ]
        for layer in self.layers:  # one norm for all query heads, one for all key heads
            norms = layer["head_norms"]
            norms[: s.heads], norms[s.heads :] = norms[0].clone(), norms[-1].clone()
        self.embedding, self.head = self._normal(s.vocab, s.hidden), self._matrix(s.vocab, s.hidden)
        self.final_norm = self._normal(s.hidden) * 0.1 + 1
        frequencies = 1e4 ** (-torch.arange(0, dim, 2, device=device) / dim)
        angles = torch.outer(torch.arange(context, device=device).float(), frequencies)
        self.angles = torch.cat((angles.cos(), angles.sin()), 1).bfloat16()
        order = torch.randperm(blocks, generator=self.generator, device=device)
        self.table = order.view(slots, -1).int().contiguous()
        self.pointers = torch.tensor([self._addresses(layer) for layer in self.layers]).to(device)

    @staticmethod
    def _addresses(layer: dict[str, torch.Tensor | StoredWeight]) -> list[int]:
        """Return the fields of `Layer` in parts.h."""
        stored = [w.numbers if isinstance(w, StoredWeight) else w for w in layer.values()]
        scales = [w.scales.data_ptr() if isinstance(w, StoredWeight) else 0 for w in layer.values()]
        return [w.data_ptr() for w in stored] + scales[:4]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).bfloat16()

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        return self._normal(rows, columns) * columns**-0.5

    def _weight(self, rows: int, columns: int, gated: bool = False) -> torch.Tensor | StoredWeight:
        """Return a weight in the format of the sizes."""
        matrix = self._matrix(rows, columns)
        if self.sizes.weights == "bf16":
            return matrix
        return self._int4(matrix, gated) if self.sizes.weights == "int4" else self._fp8(matrix)

    def _fp8(self, matrix: torch.Tensor) -> StoredWeight:
        """Return a weight whose scales differ between rows or blocks. The numbers of the first 128 rows are subnormal."""
        weight = Fp8Layout(self.sizes.weights == "fp8-block", "none").allocate((), *matrix.shape, self.device)
        quantise_into(weight, matrix)
        factors = torch.rand(weight.scale.shape, generator=self.generator, device=self.device) + 0.5
        weight.scale.mul_(factors)
        first = weight.rows(0, 128)
        first.weight.copy_(first.weight.float() / 2**15)
        first.scale.mul_(2**15)
        return StoredWeight(weight, weight.weight, weight.scale)

    def _int4(self, matrix: torch.Tensor, gated: bool) -> StoredWeight:
        """Return a weight whose zeros differ between groups, because its numbers are not centred."""
        rows, columns = matrix.shape
        shift = torch.randn(rows, columns // INT4_GROUP, 1, generator=self.generator, device=self.device)
        shifted = matrix.unflatten(1, (-1, INT4_GROUP)) + shift * columns**-0.5 / 4
        weight = IntGroupLayout(4, INT4_GROUP, torch.float16, has_zero=True).allocate(
            (), rows, columns, self.device
        )
        quantise_into(weight, shifted.flatten(1))
        assert weight.zero is not None
        scales = scale_words(weight.scale.t(), weight.zero.t(), gated)
        return StoredWeight(weight, reorder_nibbles(weight.packed, INT4_GROUP), scales)

    def inputs(self, lengths: list[int]) -> DecodeInputs:
        """Return a step of rows with `lengths` older tokens, in slots drawn at random."""
        rows, device = len(lengths), self.device
        ids = torch.randint(0, self.sizes.vocab, (rows,), generator=self.generator, device=device)
        positions = torch.tensor(lengths, device=device)
        slots = torch.randperm(len(self.table), generator=self.generator, device=device)[:rows]
        blocks = self.table[slots, positions // BLOCK].long()
        return DecodeInputs(ids, positions, blocks * BLOCK + positions % BLOCK, slots)

    def arguments(
        self, step: DecodeInputs, hidden: torch.Tensor, logits: torch.Tensor
    ) -> list[torch.Tensor | int]:
        """Return the arguments of `DecodeStep`."""
        return [
            self.pointers, self.embedding, self.final_norm, self.head, step.ids, step.positions, step.kv_slots,
            step.slots, self.table, self.angles, hidden, logits, self.table.stride(0),
            self.layers[0]["keys"].stride(0),
        ]  # fmt: skip

    def results(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for hidden states and logits."""
        s = self.sizes
        return tuple(
            torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device=self.device)
            for n in (s.hidden, s.vocab)
        )  # type: ignore[return-value]

    def new_entries(self, step: DecodeInputs) -> torch.Tensor:
        """Return the keys and values that the cache holds for the new tokens, [layers, 2, rows, heads, dim]."""
        block, within = step.kv_slots // BLOCK, step.kv_slots % BLOCK
        return torch.stack(
            [
                torch.stack([layer[name][block, :, within] for name in ("keys", "values")])
                for layer in self.layers
            ]
        )

    def run(self, step: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden states, logits, and the new entries of the cache, which it does not write."""
        s, rows = self.sizes, len(step.ids)
        x, entries = self.embedding[step.ids], []
        for layer in self.layers:
            qkv = _linear(
                self._norm(x, layer["input_norm"]), layer["qkv"], layer["bias"] if s.qkv_bias else None
            )
            q, k, v = qkv.view(rows, -1, s.head_dim).split([s.heads, s.kv_heads, s.kv_heads], 1)
            if s.qk_norm:
                norms = layer["head_norms"]
                q, k = self._norm(q, norms[: s.heads]), self._norm(k, norms[s.heads :])
            q, k = self._rotate(q, step.positions), self._rotate(k, step.positions)
            entries.append(torch.stack((k, v)))
            attended = torch.stack(
                [self._attend(layer, step, row, q[row], k[row], v[row]) for row in range(rows)]
            )
            x = x + _linear(attended.bfloat16(), layer["out"])
            gate, up = _linear(self._norm(x, layer["mlp_norm"]), layer["gate_up"]).chunk(2, -1)
            x = x + _linear(F.silu(gate) * up, layer["down"])
        hidden = self._norm(x, self.final_norm)
        return hidden, F.linear(hidden, self.head), torch.stack(entries)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.sizes.eps) * weight.float()).bfloat16()

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles[positions].float().unsqueeze(1).chunk(2, -1)
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).bfloat16()

    def _attend(
        self,
        layer: dict[str, torch.Tensor],
        step: DecodeInputs,
        row: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        older = torch.arange(int(step.positions[row]), device=self.device)
        blocks = self.table[step.slots[row], older // BLOCK].long()
        keys, values = (
            torch.cat((layer[name][blocks, :, older % BLOCK], new.unsqueeze(0)))
            .float()
            .repeat_interleave(self.sizes.heads // self.sizes.kv_heads, 1)
            for name, new in (("keys", k), ("values", v))
        )
        scores = torch.einsum("hd,thd->ht", q.float(), keys) * self.sizes.scale
        return torch.einsum("ht,thd->hd", scores.softmax(-1), values).flatten()


def _linear(
    x: torch.Tensor, weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if isinstance(weight, StoredWeight):
        y = F.linear(x.float(), weight.form.dequantised(), None if bias is None else bias.float())
        return y.to(x.dtype)
    return F.linear(x, weight, bias)
