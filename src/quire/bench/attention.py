"""The measurements of `quire bench attention`: one layer's attention on each back end, beside a plain torch loop.

Rows have random blocks, whose keys and values are codes if the spec's are; the plain loop reads plain numbers. A GPU
replays the calls of several layers from a graph, so that neither the launches nor the L2 cache decide; a CPU calls them
one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from quire.assembly.parts import pick_attention_parts
from quire.attention.base import AttentionBackend, ForwardBatch
from quire.attention.entries import round_heads
from quire.bench.cost import Machine
from quire.config import EngineConfig
from quire.kernels import pick_kernels
from quire.kernels.target import target_of
from quire.models.spec import ModelSpec
from quire.types import ConfigError, KVLayout

_ROUNDS = 7
_SET_BYTES = 256 << 20  # of keys and values over all layers of a case: more than any cache
_MOST_LAYERS = 16


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Rows of equal length: all tokens new (a prompt), or only the last one (decoding)."""

    rows: int
    length: int
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class AttentionFigure:
    """The time of one layer on one back end."""

    kind: str  # prefill or decode
    rows: int
    length: int
    backend: str
    time_s: float
    share_of_limit: float
    programs: int | None  # of the Triton kernel
    sms_busy: float | None  # share of the multiprocessors that have a program

    def as_dict(self) -> dict[str, Any]:
        """Return the figure for a JSON file."""
        return asdict(self)


@dataclass(slots=True)
class _BenchedLayer:
    """An `AttentionLayer` of the model's shape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    index: int
    kv: KVLayout
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    span: int = 0
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None


class AttentionBench:
    """The shape of a model's attention, on one device. That of latent attention is a `LatentBench`.

    Raises:
        ConfigError: for a model without keys and values of heads.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, machine: Machine) -> None:
        if spec.latent or not spec.num_heads:
            raise ConfigError(
                f"bench attention needs keys and values of heads, which {spec.architecture} has not"
            )
        self.spec, self.device, self.dtype, self.machine = spec, device, dtype, machine
        self.heads, self.kv_heads, self.dim = spec.num_heads, spec.layer_kv_heads(0), spec.layer_head_dim(0)
        name = str(dtype).removeprefix("torch.")
        self.layout = KVLayout.keys_and_values(self.kv_heads, self.dim, name, codes=spec.kv_codes)
        self._kernels = pick_kernels(device, dtype)

    def backends(self) -> dict[str, AttentionBackend]:
        """Return the back ends that run here, by name."""
        choices: dict[str, dict[str, Any]] = {"reference": {"attention": "reference"}}
        if self.device.type == "cuda":
            choices["library"] = {"prefill_attention": "library", "decode_attention": "library"}
            choices |= {"triton, unsplit": {"decode_splits": 1}, "triton": {}}
        elif self._kernels is not None:
            choices["C"] = {}
        found = {}
        for name, settings in choices.items():
            config = EngineConfig(device=self.device.type, **settings)
            try:
                found[name] = pick_attention_parts(config, self.spec, self.device, self.dtype, self._kernels)
            except ConfigError:  # such as FlashAttention for a soft cap
                continue
        return found

    def measure(self, cases: Sequence[AttentionCase]) -> Iterator[AttentionFigure]:
        """Measure each case on the plain loop and on every back end."""
        for case in cases:
            work = _AttentionInputs(self, case)
            yield self._figure(case, "plain loop", work.time_loop())
            for name, backend in self.backends().items():
                if case.is_prompt and name in ("triton, unsplit", "C"):
                    continue  # they differ for decoding rows only
                time_s = work.time(backend)
                yield self._figure(case, name, time_s, self._programs(case, name))

    def _figure(
        self, case: AttentionCase, name: str, time_s: float, programs: int | None = None
    ) -> AttentionFigure:
        tokens = case.rows * case.length
        num_bytes = tokens * self.layout.token_bytes
        pairs = tokens * case.length / 2 if case.is_prompt else tokens
        least_s = self.machine.least_s(num_bytes, 4 * self.heads * self.dim * pairs)
        busy = None if programs is None else min(1.0, programs / target_of(self.device).sms)
        kind = "prefill" if case.is_prompt else "decode"
        return AttentionFigure(kind, case.rows, case.length, name, time_s, least_s / time_s, programs, busy)

    def _programs(self, case: AttentionCase, name: str) -> int | None:
        """Return the programs of the decode kernel on a GPU."""
        if case.is_prompt or not name.startswith("triton"):
            return None
        from quire.kernels.attention.short import num_splits

        target, size = target_of(self.device), self.dtype.itemsize
        splits = num_splits(case.rows, self.kv_heads, case.length, self.dim, size, target)
        return case.rows * self.kv_heads * (1 if name == "triton, unsplit" else splits)


class _AttentionInputs:
    """The inputs of a case: random queries, keys and values, and blocks in random order."""

    def __init__(self, bench: AttentionBench, case: AttentionCase, block_size: int = 16) -> None:
        self.bench, self.case, self.block_size = bench, case, block_size
        device, dtype = bench.device, bench.dtype
        per_row = -(-case.length // block_size)
        self.num_blocks = case.rows * per_row
        order = torch.randperm(self.num_blocks, device=device).to(torch.int32)
        self.table = order.view(case.rows, per_row)
        new = case.length if case.is_prompt else 1
        self.counts = np.full(case.rows, new, np.int32)
        self.positions = torch.arange(case.length - new, case.length, device=device).repeat(case.rows)
        row = torch.arange(case.rows, device=device).repeat_interleave(new)
        blocks = self.table[row, self.positions // block_size].long()
        self.kv_slots = blocks * block_size + self.positions % block_size
        packed = bench.heads + 2 * bench.kv_heads
        self.qkv = torch.randn(case.rows * new, packed, bench.dim, device=device).to(dtype)
        layer_bytes = self.num_blocks * block_size * bench.layout.token_bytes
        self.layers = max(1, min(_MOST_LAYERS, _SET_BYTES // layer_bytes))

    def time(self, backend: AttentionBackend) -> float:
        """Return the seconds of one layer."""
        bench = self.bench
        shape = backend.kv_shape(self.num_blocks, self.block_size, bench.kv_heads, bench.dim)
        kv = [self._entries(shape) for _ in range(self.layers)]
        batch = self._batch(kv)
        batch.attn = backend.plan(batch)
        codes = bench.spec.kv_codes
        scales = (torch.ones(bench.kv_heads, device=bench.device),) * 2 if codes and codes.static else None
        layers = [
            _BenchedLayer(
                bench.heads, bench.kv_heads, bench.dim, bench.dim**-0.5, index, bench.layout, kv_scales=scales
            )
            for index in range(self.layers)
        ]
        q, k, v = self.qkv.split([bench.heads, bench.kv_heads, bench.kv_heads], 1)
        packed = backend.forward_packed if backend.name == "cpu" else None
        angles = torch.randn(self.case.length, bench.dim, device=bench.device).to(bench.dtype)

        def run() -> None:
            for layer in layers:
                if packed is not None:  # the C kernel contains the rotation
                    packed(layer, self.qkv.flatten(1), None, angles, batch)
                else:
                    backend.forward(layer, q, k, v, batch)

        return best_time(run, bench.device) / self.layers

    def _entries(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Return the KV tensors of a layer: keys and values, then the scales of codes."""
        device, codes = self.bench.device, self.bench.spec.kv_codes
        plain = [torch.randn(shape, device=device).to(self.bench.dtype) for _ in "kv"]
        if codes is None:
            return tuple(plain)
        keys, values = (round_heads(x, getattr(torch, codes.dtype)) for x in plain)
        return (keys[0], values[0]) if codes.static else (keys[0], values[0], keys[1], values[1])

    def time_loop(self) -> float:
        """Return the seconds of one layer in a loop over rows, with attention written out."""
        bench, case = self.bench, self.case
        shape = (self.num_blocks * self.block_size, bench.kv_heads, bench.dim)
        keys, values = (torch.randn(shape, device=bench.device).to(bench.dtype) for _ in "kv")
        q = self.qkv[:, : bench.heads]
        new, group = int(self.counts[0]), bench.heads // bench.kv_heads
        places = torch.arange(self.block_size, device=bench.device)
        visible = torch.ones(new, case.length, dtype=torch.bool, device=bench.device).tril(case.length - new)

        def run() -> None:
            for row in range(case.rows):
                slots = (self.table[row].long()[:, None] * self.block_size + places).flatten()[: case.length]
                k, v = (x[slots].repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
                scores = q[row * new : (row + 1) * new].transpose(0, 1) @ k.transpose(1, 2) * bench.dim**-0.5
                torch.matmul(scores.masked_fill(~visible, float("-inf")).softmax(-1), v)

        return best_time(run, bench.device)

    def _batch(self, kv: list[tuple[torch.Tensor, ...]]) -> ForwardBatch:
        rows, device = self.case.rows, self.bench.device
        starts = [0, *accumulate(self.counts.tolist())]
        return ForwardBatch(
            input_ids=torch.zeros_like(self.positions),
            positions=self.positions,
            kv_slots=self.kv_slots,
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.full((rows,), self.case.length, dtype=torch.int32, device=device),
            block_table=self.table,
            slots=torch.arange(rows, device=device),
            logit_index=torch.empty(0, dtype=torch.int64, device=device),
            kv=kv,
            num_tokens=self.counts,
            seq_bounds=np.full(rows, self.case.length, np.int32),
            block_size=self.block_size,
            decodes_only=not self.case.is_prompt,
        )


def best_time(run: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a call: on a GPU of the replay of a graph, on a CPU of the call itself."""
    run()
    if device.type != "cuda":
        return min(_seconds(run) for _ in range(_ROUNDS))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
