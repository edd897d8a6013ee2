"""The fused kernels against their twins, the plain torch code of the layers.

Off a GPU they run in Triton's interpreter on small odd sizes; on one, on real sizes and under graph capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.layers.mlp import gated as plain_gated_of
from quire.layers.norm import HeadNorm, after_add, make_layer_norm, make_rms
from quire.layers.rope import Rope, RotaryHeads
from quire.layers.rope_params import RopeParams
from quire.sampling.sampler import Sampler
from quire.types import EngineRequest, SamplingParams

pytest.importorskip("triton")

from quire.kernels import activation, norm, rope, sampling

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")


def cases(small: list, real: list) -> list:
    """(device, dtype, *shape): small shapes in the interpreter, real ones on a GPU."""
    off = [pytest.param(CPU, dtype, *shape, marks=interpreted) for dtype in DTYPES for shape in small]
    on = [
        pytest.param(torch.device("cuda"), dtype, *shape, marks=on_gpu) for dtype in DTYPES for shape in real
    ]
    return off + on


def values(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng([seed, *shape]).normal(0, 1, shape).astype(np.float32)
    return torch.from_numpy(drawn).to(device, dtype)


def assert_close(got: Tensor, wanted: Tensor, equal: bool = False) -> None:
    """Equal, or different by a rounding here and there (and in the tails of gelu, where torch cancels)."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    ulp = torch.finfo(wanted.dtype).eps
    if got.device == CPU and wanted.dtype == torch.bfloat16:  # the interpreter cuts it off, unrounded
        torch.testing.assert_close(got.float(), wanted.float(), rtol=4 * ulp, atol=4 * ulp)
    elif equal:
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got.float(), wanted.float(), rtol=2 * ulp, atol=16 * ulp)
        assert (
            wanted.dtype == torch.float32 or (got - wanted).abs().gt(1e-5).sum() <= 1 + wanted.numel() // 50
        )


# ------------------------------------------------------------------------------------------- norms

ROWS = cases([(3, 33), (1, 1), (2, 130)], [(1, 1024), (37, 4096), (2, 5376), (5, 16384), (300, 896)])


@pytest.mark.parametrize(("device", "dtype", "rows", "width"), ROWS)
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm(device: torch.device, dtype: torch.dtype, rows: int, width: int, offset: bool) -> None:
    x, residual = (values(rows, width, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = values(width, device=device, dtype=dtype, seed=3)
    weight = weight.float() + 1 if offset else weight  # Gemma's stays in fp32
    twin = make_rms(weight, width, 1e-6)
    assert_close(norm.rms_norm(x, weight, 1e-6), twin(x))
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    wanted, wanted_total = after_add(twin)(x, residual)
    assert_close(total, wanted_total, equal=True)
    assert_close(normed, wanted)


@pytest.mark.parametrize(("device", "dtype", "rows", "width"), ROWS)
def test_layer_norm(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (values(rows, width, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, bias = (values(width, device=device, dtype=dtype, seed=seed) for seed in (3, 4))
    twin = make_layer_norm(weight, bias, 1e-5)
    assert_close(norm.layer_norm(x, weight, bias, 1e-5), twin(x))
    normed, total = norm.add_layer_norm(x, residual, weight, bias, 1e-5)
    wanted, wanted_total = after_add(twin)(x, residual)
    assert_close(total, wanted_total, equal=True)
    assert_close(normed, wanted)


# ------------------------------------------------------------------------------------ rotary heads


def head_norm(weight: Tensor, eps: float) -> HeadNorm:
    made = object.__new__(HeadNorm)  # without a checkpoint
    made.weight, made.eps, made.rms = weight, eps, make_rms(weight, weight.shape[-1], eps)
    return made


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "heads", "kv_heads", "dim"),
    cases(
        [(5, 3, 1, 12), (1, 2, 2, 16), (3, 9, 3, 6)],
        [(1, 16, 8, 128), (100, 32, 8, 128), (33, 14, 2, 64), (7, 8, 4, 256), (9, 32, 32, 80), (9, 7, 1, 96)],
    ),
)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_heads(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    normed: bool,
) -> None:
    turned, eps = heads + kv_heads, 1e-6
    weight = values(turned, dim, device=device, dtype=dtype, seed=1) if normed else None
    layer_norm = None if weight is None else head_norm(weight, eps)
    qkv = values(tokens, (turned + kv_heads) * dim, device=device, dtype=dtype)
    positions = torch.arange(tokens, device=device).flip(0) * 7
    rope_table = Rope(RopeParams(theta=10000.0), dim, 1000, device, dtype)
    twin = RotaryHeads(heads, kv_heads, dim, layer_norm, CPU)
    wanted = [part.clone() for part in twin(qkv, rope_table._expanded(positions))]
    rope.norm_rotate_(qkv, positions, rope_table.table, weight, eps, turned)
    got = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    for part, wanted_part in zip(got, wanted):
        assert_close(part, wanted_part)
    assert torch.equal(got[2], wanted[2])


# -------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize(
    ("device", "dtype", "rows", "width"),
    cases([(3, 33), (1, 1), (2, 1025)], [(1, 3072), (256, 14336), (2048, 1535), (1, 4864)]),
)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated(device: torch.device, dtype: torch.dtype, rows: int, width: int, kind: str) -> None:
    gate_up = 3 * values(rows, 2 * width, device=device, dtype=dtype)
    assert_close(activation.gated(gate_up, kind), plain_gated_of(kind, CPU)(gate_up))


# ----------------------------------------------------------------------------------------- sampling


class Columns:
    def __init__(self, slots: int, device: torch.device) -> None:
        counts = np.random.default_rng(5).integers(1, 30, slots).astype(np.int32)
        self.tokens = torch.zeros(slots, 32, dtype=torch.int32, device=device)
        self.num_tokens = torch.from_numpy(counts).to(device)
        self.prompt_len = torch.ones_like(self.num_tokens)


def sampler_of(temperatures: list[float], vocab: int, device: torch.device) -> Sampler:
    """A sampler with a slot for each temperature."""
    slots = len(temperatures)
    sampler = Sampler(Columns(slots, device), vocab, slots, device)
    for slot, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature)
        sampler.admit(slot, EngineRequest("r", [1], params, seed=(-1) ** slot * 12345678901234 * (slot + 1)))
    sampler.flush()
    return sampler


VOCABS = cases([(97,), (5000,)], [(151936,), (50257,), (128256,)])


@pytest.mark.parametrize(("device", "dtype", "vocab"), VOCABS)
@pytest.mark.parametrize("mix", [[0.0], [0.7, 1.3], [0.0, 1.0, 0.0, 0.3, 2.0]])
def test_choice(device: torch.device, dtype: torch.dtype, vocab: int, mix: list[float]) -> None:
    temperatures = mix * (7 if device == CPU else 40)
    sampler = sampler_of(temperatures, vocab, device)
    logits = 3 * values(len(temperatures), vocab, device=device, dtype=dtype)
    order = np.random.default_rng(1).permutation(len(temperatures)).astype(np.int32)
    slots = torch.from_numpy(order).to(device, torch.int64)
    got = sampler._with_kernel()(logits, order, slots)
    wanted = sampler._plain(logits, order, slots)
    # float32 noise differs in its last bits, so two scores that are that close may swap
    differ = (got != wanted).nonzero().flatten()
    assert len(differ) <= len(temperatures) // 100
    assert not any(temperatures[order[row]] == 0 for row in differ.tolist())


@pytest.mark.parametrize(("device", "dtype", "vocab"), VOCABS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choice_among_special_values(
    device: torch.device, dtype: torch.dtype, vocab: int, temperature: float
) -> None:
    """Of equals the lowest id; infinities, nan and rows without any token end as in plain torch."""
    rows: list[Callable[[Tensor], object]] = [
        lambda x: x.fill_(-math.inf),
        lambda x: x.fill_(-math.inf)[vocab - 1 :].fill_(1.0),
        lambda x: x.fill_(math.nan),
        lambda x: x[vocab // 2 :: 3].fill_(math.inf),
        lambda x: x[vocab // 3].fill_(math.nan),
        lambda x: x.fill_(2.0),
    ]
    logits = values(len(rows), vocab, device=device, dtype=dtype)
    for row, spoil in zip(logits, rows):
        spoil(row)
    sampler = sampler_of([temperature] * len(rows), vocab, device)
    slots_host = np.arange(len(rows), dtype=np.int32)
    slots = torch.from_numpy(slots_host).to(device, torch.int64)
    got = sampler._with_kernel()(logits, slots_host, slots).tolist()
    assert got == sampler._plain(logits, slots_host, slots).tolist()


@pytest.mark.parametrize(("device", "dtype", "vocab"), VOCABS)
def test_a_token_does_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and in a batch so large that a program takes several blocks in turn."""
    rows, alone = (8 if device == CPU else 256), 8
    sampler = sampler_of([0.0, 0.8, 1.5, 1.0] * (rows // 4), vocab, device)
    logits = values(rows, vocab, device=device, dtype=dtype)
    order = np.arange(rows, dtype=np.int32)
    slots = torch.from_numpy(order).to(device, torch.int64)
    choose = sampler._with_kernel()
    wanted = [choose(logits[i : i + 1], order[i : i + 1], slots[i : i + 1]) for i in range(alone)]
    monkeypatch.setattr(sampling, "_PROGRAMS", 3)
    for rounds in (2, 16):
        monkeypatch.setattr(sampling, "_MOST_ROUNDS", rounds)
        assert torch.equal(choose(logits, order, slots)[:alone], torch.cat(wanted))


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads what the interpreter computes")
def test_noise_near_its_ends() -> None:
    """log(1 - u) keeps its relative precision for the smallest and the largest u."""
    import triton
    import triton.language as tl

    @triton.jit
    def of_array(u, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(out + at, sampling._log1p_of_minus(tl.load(u + at)))

    u = torch.tensor([2.0**-32, 1e-8, 1e-7, 1e-3, 0.1249, 0.1251, 0.5, 1 - 2.0**-24])
    out = torch.empty_like(u)
    of_array[(1,)](u, out, SIZE=8)
    torch.testing.assert_close(out.double(), torch.log1p(-u.double()), rtol=5e-7, atol=0)


# ---------------------------------------------------------------------------------------- captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_everything_can_be_captured() -> None:
    """A graph that holds every kernel gives, on new inputs, what the kernels give outside of it."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    x, residual = (values(8, 1024, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = values(1024, device=device, dtype=dtype, seed=3)
    table = Rope(RopeParams(theta=10000.0), 128, 64, device, dtype).table
    positions = torch.arange(8, device=device)
    sampler = sampler_of([0.0, 1.0] * 4, 1024, device)
    slots_host, slots = np.arange(8, dtype=np.int32), torch.arange(8, device=device)
    choose = sampler._with_kernel()

    def everything() -> tuple[Tensor, ...]:
        normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
        alone = norm.rms_norm(normed, weight, 1e-6)
        layered, again = norm.add_layer_norm(alone, total, weight, weight, 1e-5)
        lonely = norm.layer_norm(layered, weight, weight, 1e-5)
        qkv = torch.cat((lonely, again), 1)
        rope.norm_rotate_(qkv, positions, table, None, 0.0, 12)
        out = activation.gated(qkv, "silu")
        return qkv, out, choose(out, slots_host, slots)

    everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    for seed in (10, 20):
        x.copy_(values(8, 1024, device=device, dtype=dtype, seed=seed))
        graph.replay()
        for got, wanted in zip(captured, everything()):
            assert torch.equal(got, wanted)
