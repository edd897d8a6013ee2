"""The reference back end against attention written out row by row in float64, on random ragged batches."""

from __future__ import annotations

import random

import pytest
import torch

from quire.assembly.attention import pick_attention
from quire.attention.reference import ReferenceAttention
from quire.kernels import pick_kernels
from quire.models.spec import ModelSpec
from quire.types import ConfigError
from ragged import Layer, check, make_case
from tiny import CONFIG

SPEC = ModelSpec.from_config(CONFIG)


class OrderedRandom(random.Random):
    """A random source that keeps blocks in order, so that each row's blocks are consecutive."""

    def shuffle(self, x: list[int]) -> None:
        x.reverse()  # blocks are taken from the end


def compare(seed: int, device: str, kind: type[random.Random] = random.Random) -> None:
    rng = kind(seed)
    torch.manual_seed(seed)
    kv_heads = rng.choice([1, 2, 3])
    layer = Layer(
        num_heads=kv_heads * rng.choice([1, 2, 4]),
        num_kv_heads=kv_heads,
        head_dim=rng.choice([8, 16, 64]),
        scale=rng.choice([0.2, 0.125]),
        window=rng.choice([None, None, 1, 5, 24]),
        soft_cap=rng.choice([None, None, 3.0]),
        chunked=seed % 3 == 0,
    )
    if rng.random() < 0.3:
        layer.sinks = 2 * torch.randn(layer.num_heads, device=device)
    block_size = rng.choice([1, 4, 16, 128])
    rows = [
        (rng.choice([0, 1, 7, 33, 100]) if rng.random() < 0.7 else 0, rng.choice([1, 1, 1, 2, 9, 30]))
        for _ in range(rng.randrange(1, 7))
    ]
    slack = rng.choice([0, 0, 3]) if device != "cpu" or rng.random() < 0.5 else 0
    backend = ReferenceAttention()
    check(make_case(rng, backend, layer, rows, block_size, device, slack=slack), backend)


@pytest.mark.parametrize("seed", range(60))
def test_reference_agrees_with_attention_written_out(seed: int) -> None:
    compare(seed, "cpu")


@pytest.mark.parametrize("seed", range(60))
def test_blocks_that_follow_each_other_are_read_in_place(seed: int) -> None:
    compare(seed, "cpu", OrderedRandom)


@pytest.mark.parametrize("in_order", [False, True])
def test_only_slots_that_follow_each_other_are_a_slice(in_order: bool) -> None:
    rng = OrderedRandom() if in_order else random.Random(1)
    layer = Layer(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
    backend = ReferenceAttention()
    one = make_case(rng, backend, layer, [(40, 1)], block_size=4).batch.attn
    assert isinstance(one.groups[0].kv, slice) == in_order
    assert one.writes == slice(40, 41) if in_order else isinstance(one.writes, slice)  # a single slot
    many = make_case(rng, backend, layer, [(40, 9), (0, 12)], block_size=4).batch.attn
    assert isinstance(many.long_rows[0].kv, slice) == in_order
    assert many.long_rows[1].kv is None
    apart = make_case(rng, backend, layer, [(40, 1), (30, 1)], block_size=4).batch.attn
    assert isinstance(apart.writes, torch.Tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_reference_on_the_gpu(seed: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    compare(seed, "cuda")


def test_a_cpu_gets_its_kernels_or_the_reference_and_triton_only_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert pick_attention("auto", SPEC, cpu, torch.bfloat16, None).name == "reference"
    with pytest.raises(ConfigError, match="attention triton"):
        pick_attention("triton", SPEC, cpu, torch.bfloat16, None)
    with pytest.raises(ConfigError, match="attention cpu needs"):
        pick_attention("cpu", SPEC, cpu, torch.bfloat16, None)
    if kernels := pick_kernels(cpu, torch.bfloat16):
        assert pick_attention("auto", SPEC, cpu, torch.bfloat16, kernels).name == "cpu"
        assert pick_attention("reference", SPEC, cpu, torch.bfloat16, kernels).name == "reference"
    assert pick_kernels(cpu, torch.float16) is None
    assert pick_kernels(cpu, torch.bfloat16, cpu_kernels=False) is None
