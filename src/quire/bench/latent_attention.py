"""The measurements of `quire bench attention` for latent attention: absorbed and expanded, beside a plain torch loop.

Rows have random blocks. Absorbed and expanded run in turns, and include the products that they need beside the
attention: `absorb` and `values`, or the expansion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from quire.assembly.latents import with_expansion
from quire.assembly.parts import pick_attention_parts
from quire.attention.base import AttentionBackend, ForwardBatch
from quire.bench.attention import AttentionCase, AttentionFigure, best_time
from quire.bench.cost import Machine
from quire.config import EngineConfig
from quire.kernels import pick_kernels
from quire.layers.mla import LatentAttention, LatentExpansion
from quire.layers.norm import make_rms
from quire.layers.rope import Rope
from quire.models.spec import ModelSpec

_BLOCK_SIZE = 16
_TURNS = 2


class _BenchedNorm:
    """The norm of latents, without a checkpoint."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._alone = make_rms(weight, len(weight), eps)

    def __call__(self, x: torch.Tensor, residual: None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._alone(x), x


class LatentBench:
    """The latent attention of a model, on one device."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, machine: Machine) -> None:
        assert spec.latent is not None
        self.spec, self.latent = spec, spec.latent
        self.device, self.dtype, self.machine = device, dtype, machine
        self._kernels = pick_kernels(device, dtype)

    def backends(self) -> dict[str, AttentionBackend]:
        """Return the back ends to measure, by name. Expanded prompts expand whatever they save."""
        config = EngineConfig(device=self.device.type, prefill_attention="absorbed")
        absorbed = pick_attention_parts(config, self.spec, self.device, self.dtype, self._kernels)
        found = {"absorbed": absorbed}
        if not self.latent.index:
            expanded = with_expansion(
                absorbed, "expanded", self.spec, self.device, self.dtype, ranks=1, least_saved=0.0
            )
            found["expanded"] = expanded
        return found

    def measure(self, cases: Sequence[AttentionCase]) -> Iterator[AttentionFigure]:
        """Measure each case on the plain loop, and on the back ends in turns."""
        for case in cases:
            work = _LatentInputs(self, case)
            yield self._figure(case, "plain loop", best_time(work.loop, self.device))
            runs = {name: work.call(backend) for name, backend in self.backends().items()}
            if not case.is_prompt:
                runs.pop("expanded", None)  # rows that decode are absorbed
            times = [{name: best_time(run, self.device) for name, run in runs.items()} for _ in range(_TURNS)]
            for name in runs:
                yield self._figure(case, name, min(turn[name] for turn in times))

    def _figure(self, case: AttentionCase, name: str, time_s: float) -> AttentionFigure:
        tokens, latent, heads = case.rows * case.length, self.latent, self.spec.num_heads
        width = latent.content_dim + latent.value_dim
        if case.is_prompt:
            pairs = tokens * case.length / 2 * (width + latent.rotary_dim)
            products = tokens * latent.rank * width
        else:
            pairs = tokens * (latent.rank + latent.stored_dim)
            products = case.rows * latent.rank * width
        num_bytes = tokens * latent.stored_dim * self.dtype.itemsize
        least_s = self.machine.least_s(num_bytes, 2 * heads * (pairs + products))
        kind = "prefill" if case.is_prompt else "decode"
        return AttentionFigure(kind, case.rows, case.length, name, time_s, least_s / time_s, None, None)


class _LatentInputs:
    """The inputs of a case: random queries and entries, and blocks in random order."""

    def __init__(self, bench: LatentBench, case: AttentionCase) -> None:
        self.bench, self.case = bench, case
        spec, latent, device = bench.spec, bench.latent, bench.device
        per_row = -(-case.length // _BLOCK_SIZE)
        self.num_blocks = case.rows * per_row
        order = torch.randperm(self.num_blocks, device=device).to(torch.int32)
        self.table = order.view(case.rows, per_row)
        self.new = case.length if case.is_prompt else 1
        self.positions = torch.arange(case.length - self.new, case.length, device=device).repeat(case.rows)
        row = torch.arange(case.rows, device=device).repeat_interleave(self.new)
        blocks = self.table[row, self.positions // _BLOCK_SIZE].long()
        self.kv_slots = blocks * _BLOCK_SIZE + self.positions % _BLOCK_SIZE
        self.q = self._random(case.rows * self.new, spec.num_heads, latent.content_dim + latent.rotary_dim)
        self.entries = self._random(case.rows * self.new, latent.stored_dim)
        self.old = self._random(self.num_blocks * _BLOCK_SIZE, latent.stored_dim)
        weight = self._random(spec.num_heads * (latent.content_dim + latent.value_dim), latent.rank)
        sizes = latent.content_dim, latent.rotary_dim, latent.value_dim
        self.expansion = LatentExpansion.of_weight(weight / latent.rank**0.5, *sizes)
        rope = Rope(spec.layer_ropes[0], latent.rotary_dim, case.length, device, bench.dtype)
        self.rotation = rope.lookup(self.positions)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.bench.device).to(self.bench.dtype)

    def call(self, backend: AttentionBackend) -> Callable[[], object]:
        """Return a call of one layer on a back end."""
        bench, spec = self.bench, self.bench.spec
        env: Any = SimpleNamespace(attention=backend)
        layout = spec.kv_layout(0, str(bench.dtype).removeprefix("torch."))
        weight = torch.ones(bench.latent.rank, device=bench.device, dtype=bench.dtype)
        norm: Any = _BenchedNorm(weight, bench.latent.eps)
        span = spec.layer_ropes[0].span(bench.latent.rotary_dim)
        layer = LatentAttention(env, 0, spec.num_heads, layout, self.expansion, spec.query_scale, norm, span)
        shape = backend.kv_shape(self.num_blocks, _BLOCK_SIZE, 1, bench.latent.stored_dim)
        batch = self._batch(self.old.view(shape))
        batch.attn = backend.plan(batch)
        return lambda: layer(self.q, self.entries, self.rotation, batch)

    def loop(self) -> None:
        """Attend to expanded keys and values in a loop over rows, with attention written out."""
        latent, scale, length = self.bench.latent, self.bench.spec.query_scale, self.case.length
        places = torch.arange(_BLOCK_SIZE, device=self.bench.device)
        visible = torch.ones(self.new, length, dtype=torch.bool, device=places.device).tril(length - self.new)
        for row in range(self.case.rows):
            slots = (self.table[row].long()[:, None] * _BLOCK_SIZE + places).flatten()[:length]
            entries, queries = self.old[slots], self.q[row * self.new : (row + 1) * self.new].transpose(0, 1)
            heads = self.expansion.expand(entries[:, : latent.rank]).transpose(0, 1)
            rotary = entries[:, latent.rank :].expand(len(heads), -1, -1)
            keys = torch.cat((heads[..., : latent.content_dim], rotary), 2)
            scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))
            torch.matmul(scores.softmax(-1), heads[..., latent.content_dim :])

    def _batch(self, blocks: torch.Tensor) -> ForwardBatch:
        rows, device = self.case.rows, self.bench.device
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * self.new
        return ForwardBatch(
            input_ids=torch.zeros_like(self.positions),
            positions=self.positions,
            kv_slots=self.kv_slots,
            query_start=starts,
            seq_lens=torch.full((rows,), self.case.length, dtype=torch.int32, device=device),
            block_table=self.table,
            slots=torch.arange(rows, device=device),
            logit_index=torch.empty(0, dtype=torch.int64, device=device),
            kv=[(blocks,)],
            num_tokens=np.full(rows, self.new, np.int32),
            seq_bounds=np.full(rows, self.case.length, np.int32),
            block_size=_BLOCK_SIZE,
            decodes_only=not self.case.is_prompt,
        )
