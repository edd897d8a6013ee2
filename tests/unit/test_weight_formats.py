"""Weight formats: files in each documented layout against their own definition, cut over ranks, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint import PartialRank, env

from quire.layers.linear import Linear
from quire.layers.moe import masked_product, with_quantised
from quire.models.checkpoint.reader import Reader
from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.models.config.quantization import parse_quantization
from quire.quant.base import Part
from quire.quant.formats.convert import quantise_into
from quire.quant.forms import Fp4Weight, Fp8Weight, Int8Weight, IntGroupWeight, QuantisedWeight
from quire.quant.layouts import FormLayout, Fp8Layout, Int8Layout, IntGroupLayout
from quire.quant.loading import ConcatenatedMatmul, fused_runs, load_dequantised, load_stack, open_packed
from quire.quant.rounding import rounding_of
from quire.quant.spec import QuantSpec
from quire.types import ModelError
from stored_formats import SIZE, Layer, Tensors, awq, compressed, fp4, fp8, gptq, pack_quantized

torch.set_num_threads(1)
CPU = torch.device("cpu")
OUT, IN = SIZE
WHOLE = slice(None)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8"}
PACK, DYNAMIC = compressed("pack-quantized"), {"num_bits": 8, "dynamic": True}
CASES: dict[str, tuple[dict[str, Any], Layer]] = {
    **{f"gptq-{group}": (GPTQ, gptq(4, group)) for group in (32, 64, 128)},
    "gptq-sym": (GPTQ, gptq(4, 32, symmetric=True)),
    "gptq-8bit": (GPTQ | {"bits": 8}, gptq(8, 32)),
    "gptq-act-order": (GPTQ, gptq(4, 32, act_order=True)),
    "gptq-8bit-act-order": (GPTQ | {"bits": 8}, gptq(8, 64, act_order=True)),
    **{f"awq-{group}": (AWQ, awq(group)) for group in (32, 64, 128)},
    "pack-sym": (PACK, pack_quantized(4, 32, True)),
    "pack-asym": (PACK, pack_quantized(4, 64, False)),
    "pack-8bit": (PACK, pack_quantized(8, IN, True)),
    "pack-8bit-asym": (PACK, pack_quantized(8, 32, False)),
    "pack-act-order": (PACK, pack_quantized(4, 32, True, act_order=True)),
    "fp8-tensor": (FP8, fp8(torch.tensor(0.3))),
    "fp8-row": (compressed("float-quantized", DYNAMIC), fp8(torch.rand(OUT, 1).bfloat16() + 0.1)),
    "fp8-block": (FP8 | {"weight_block_size": [128, 128]}, fp8(torch.rand(3, 2) + 0.1, "weight_scale_inv", size=(300, 200))),
    "mxfp4": (compressed("mxfp4-pack-quantized"), fp4(False)),
    "nvfp4": (compressed("nvfp4-pack-quantized"), fp4(True)),
    "nvfp4-modelopt": ({"quant_algo": "NVFP4"}, fp4(True, modelopt=True)),
}  # fmt: skip


def save(folder: Path, tensors: Tensors, prefix: str = "x.") -> Path:
    named = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def spec_of(settings: dict[str, Any]) -> QuantSpec:
    spec = parse_quantization(settings)
    assert spec is not None and spec.unsupported is None
    return spec


def load(folder: Path, settings: dict[str, Any], parts: list[Part], threads: bool = False) -> QuantisedWeight:
    """Load parts as one stack of a single expert, with or without the threaded reader, and return the expert."""
    reader = Reader(CPU, 2, 100) if threads else None
    checkpoint = SafetensorsCheckpoint(folder, False, reader)
    stack = load_stack(replace(env(checkpoint), quantization=spec_of(settings)), [parts])
    if threads:
        checkpoint.unread.clear()  # a part may leave something out
        checkpoint.finish()
    assert not isinstance(stack, torch.Tensor)
    return stack.expert(0)


@pytest.mark.parametrize("threads", [False, True], ids=["at-once", "threads"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_format(tmp_path: Path, case: str, threads: bool) -> None:
    settings, (tensors, values) = CASES[case]
    part = Part("x.weight", tuple(values.shape), WHOLE, WHOLE)  # type: ignore[arg-type]
    weight = load(save(tmp_path, tensors), settings, [part], threads)
    assert tuple(weight.shape) == tuple(values.shape)
    torch.testing.assert_close(weight.dequantised(), values, atol=0, rtol=1e-6)
    assert weight.nbytes <= sum(t.nbytes for t in tensors.values()) + 8 * IN + 4 * values.shape[0]


@pytest.mark.parametrize("case", CASES)
def test_ranks_get_their_part(tmp_path: Path, case: str) -> None:
    """Every rank gets its rows, and its columns unless their order is scattered; the fused parts are in order."""
    settings, (tensors, values) = CASES[case]
    save(tmp_path, tensors)
    outputs, inputs = values.shape
    half = 128 if outputs > 128 else outputs // 2
    rows = [slice(half, outputs), slice(0, half)]
    shape = (outputs, inputs)
    if "block" not in case:
        weight = load(tmp_path, settings, [Part("x.weight", shape, cut, WHOLE) for cut in rows])
        torch.testing.assert_close(
            weight.dequantised(), values.roll(-half, 0) if half * 2 == outputs else values
        )
    cols = slice(128, inputs) if inputs > 128 else slice(inputs // 2, inputs)
    part = Part("x.weight", shape, rows[1], cols)
    if "act-order" in case:
        with pytest.raises(ModelError, match=r"cannot be cut over ranks; use one rank"):
            load(tmp_path, settings, [part])
        return
    weight = load(tmp_path, settings, [part], threads=True)
    torch.testing.assert_close(weight.dequantised(), values[rows[1], cols])


def test_a_cut_within_a_block_is_refused_with_its_numbers(tmp_path: Path) -> None:
    settings, (tensors, _) = CASES["fp8-block"]
    save(tmp_path, tensors)
    part = Part("x.weight", (300, 200), slice(0, 100), WHOLE)
    with pytest.raises(ModelError, match=r"cut at rows 0:100 of 300: its blocks have 128 rows; use fewer"):
        load(tmp_path, settings, [part])


def test_fused_names_in_different_formats_are_one_layer(tmp_path: Path) -> None:
    """q and k in GPTQ, v plain: two products, whose outputs follow one another."""
    (q, q_values), (k, k_values) = gptq(4, 32), gptq(4, 32, seed=1)
    v = torch.randn(32, IN)
    named = {f"q.{name}": t for name, t in q.items()} | {f"k.{name}": t for name, t in k.items()}
    save_file({**named, "v.weight": v}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, False)
    layer = Linear(
        replace(env(checkpoint), quantization=spec_of(GPTQ)), ["q", "k", "v"], IN, [OUT, OUT, 32], cut="rows"
    )
    assert isinstance(layer.multiply, ConcatenatedMatmul) and len(layer.multiply.products) == 2
    checkpoint.finish()  # everything was read
    x = torch.randn(3, IN)
    wanted = x @ torch.cat((q_values, k_values, v)).t()
    torch.testing.assert_close(layer(x), wanted, atol=1e-3, rtol=1e-4)
    for sizes in ([OUT, OUT, 32], [OUT, OUT - 16, 48], [2 * OUT + 32]):
        parts = layer.split(x, sizes)
        assert [part.shape[1] for part in parts] == sizes
        torch.testing.assert_close(torch.cat(list(parts), 1), layer(x), atol=0, rtol=0)
    q_part, k_part, v_part = layer.split(x, [OUT, OUT, 32])
    assert q_part.untyped_storage().data_ptr() == k_part.untyped_storage().data_ptr()  # views of one product
    assert v_part.is_contiguous()


@pytest.mark.parametrize("threads", [False, True], ids=["at-once", "threads"])
def test_values_of_any_format_can_be_had(tmp_path: Path, threads: bool) -> None:
    tensors, values = awq(32)
    save_file(
        {"y.weight": values.clone(), **{f"x.{name}": t.contiguous() for name, t in tensors.items()}},
        tmp_path / "model.safetensors",
    )
    checkpoint = SafetensorsCheckpoint(tmp_path, False, Reader(CPU, 2, 100) if threads else None)
    built = replace(env(checkpoint), quantization=spec_of(AWQ))
    found = [load_dequantised(built, Part(f"{name}.weight", (OUT, IN), slice(8, 40), WHOLE)) for name in "xy"]
    checkpoint.finish()
    torch.testing.assert_close(found, [values[8:40]] * 2)


def test_tensor_parallel_ranks_add_up(tmp_path: Path) -> None:
    tensors, values = awq(32)
    save(tmp_path, tensors)
    x, total = torch.randn(2, IN), torch.zeros(2, OUT)
    for rank in range(2):
        checkpoint = SafetensorsCheckpoint(tmp_path, False)
        built = replace(env(checkpoint, PartialRank(rank, 2)), quantization=spec_of(AWQ))
        total += Linear(built, "x", IN, OUT, cut="cols")(x[:, rank * IN // 2 : (rank + 1) * IN // 2])
    torch.testing.assert_close(total, x @ values.t(), atol=1e-3, rtol=1e-4)


def test_experts_are_stacked_with_their_own_orders(tmp_path: Path) -> None:
    layers = [gptq(4, 32, act_order=seed != 1, seed=seed) for seed in range(3)]
    named = {f"{i}.{name}": t for i, (tensors, _) in enumerate(layers) for name, t in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    built = replace(env(SafetensorsCheckpoint(tmp_path, False)), quantization=spec_of(GPTQ))
    stack = load_stack(built, [[Part(f"{i}.weight", (OUT, IN), WHOLE, WHOLE)] for i in range(3)])
    assert isinstance(stack, IntGroupWeight) and stack.shape == (3, OUT, IN)
    wanted = torch.stack([values for _, values in layers])
    torch.testing.assert_close(stack.dequantised(), wanted)
    torch.testing.assert_close(stack.expert(2).dequantised(), wanted[2])


@pytest.mark.parametrize("rows", [2, 9])  # few rows unpack their own experts
@pytest.mark.parametrize(
    "layout",
    [
        Fp8Layout(True, "block"),
        Fp8Layout(False, "token"),
        Int8Layout("token"),
        IntGroupLayout(4, 32, torch.float16, True),
    ],
)
def test_products_with_quantised_experts(layout: FormLayout, rows: int) -> None:
    torch.manual_seed(0)
    stack = layout.allocate((8,), 128, 64, CPU)
    for expert in range(8):
        quantise_into(stack.expert(expert), torch.randn(128, 64))
    x, owner = torch.randn(rows, 64), torch.randint(0, 8, (rows,)).sort().values
    ends = torch.searchsorted(owner, torch.arange(8), right=True).to(torch.int32)
    found = with_quantised(masked_product)(x, stack, ends)
    rounded = rounding_of(stack) or (lambda x: x)
    wanted = torch.stack(
        [stack.expert(int(e)).dequantised() @ row for e, row in zip(owner, rounded(x), strict=True)]
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("threads", [False, True], ids=["at-once", "threads"])
def test_interleaved_experts_in_mxfp4(tmp_path: Path, threads: bool) -> None:
    """gpt-oss stacks its experts; rows of gate and up alternate, and a rank takes its part of both."""
    experts, width = 3, 32
    blocks = torch.randint(0, 256, (experts, 2 * width, IN // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (experts, 2 * width, IN // 32), dtype=torch.uint8)
    save_file({"e_blocks": blocks, "e_scales": scales}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, False, Reader(CPU, 2, 100) if threads else None)
    built = replace(env(checkpoint), quantization=spec_of({"quant_method": "mxfp4"}))
    rows = [slice(32 + odd, 64 + odd - 1, 2) for odd in (0, 1)]
    parts = [
        [Part("e", (2 * width, IN), cut, WHOLE, index=index) for cut in rows] for index in range(experts)
    ]
    stack = load_stack(built, parts)
    checkpoint.finish()
    assert isinstance(stack, Fp4Weight) and stack.shape == (experts, 32, IN)
    whole = Fp4Weight(blocks.flatten(2), scales).dequantised()
    torch.testing.assert_close(stack.dequantised(), torch.cat((whole[:, 32::2], whole[:, 33::2]), 1))


# ----------------------------------------------------------------------------------- activations


@pytest.mark.parametrize(
    ("settings", "scheme", "input_scale"),
    [
        (FP8 | {"activation_scheme": "static"}, "tensor", 0.02),
        (FP8 | {"activation_scheme": "dynamic"}, "token", None),
        (compressed("float-quantized"), "none", None),
        ({"quant_algo": "FP8"}, "tensor", 0.02),
    ],
)
def test_activations_are_rounded_as_the_configuration_says(
    tmp_path: Path, settings: dict[str, Any], scheme: str, input_scale: float | None
) -> None:
    tensors, values = fp8(torch.tensor(0.3))
    save(tmp_path, {**tensors, "input_scale": torch.tensor([0.02])})
    checkpoint = SafetensorsCheckpoint(tmp_path, False)
    built = replace(env(checkpoint), quantization=spec_of(settings))
    packed = open_packed(built, Part("x.weight", (OUT, IN), WHOLE, WHOLE))
    assert packed is not None and isinstance(packed.layout, Fp8Layout)
    assert packed.layout.rounding == scheme and packed.layout.input_scale == pytest.approx(input_scale)
    x = torch.randn(4, IN)
    y = Linear(built, "x", IN, OUT)(x)
    checkpoint.finish()
    if scheme == "none":
        rounded = x
    else:
        scale = torch.tensor(0.02) if scheme == "tensor" else x.abs().amax(1, keepdim=True) / 448
        rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(y, rounded @ values.t(), atol=1e-4, rtol=1e-4)


def test_int8_activations_are_rounded_per_token(tmp_path: Path) -> None:
    weight, scale = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8), torch.rand(OUT, 1).bfloat16()
    save(tmp_path, {"weight": weight, "weight_scale": scale})
    built = replace(
        env(SafetensorsCheckpoint(tmp_path, False)),
        quantization=spec_of(compressed("int-quantized", DYNAMIC)),
    )
    x = torch.randn(4, IN)
    x[1] = 0  # a row of zeros stays one
    step = x.abs().amax(1, keepdim=True) / 127
    codes = torch.where(step > 0, x / step, 0).round()
    wanted = (codes @ weight.float().t()) * step * scale.float().t()
    torch.testing.assert_close(Linear(built, "x", IN, OUT)(x), wanted, atol=1e-4, rtol=1e-4)


def test_blocks_of_activations_have_their_own_scales() -> None:
    weight = Fp8Layout(by_block=True, rounding="block").allocate((), 128, 200, CPU)
    rounded = rounding_of(weight)
    assert rounded is not None
    x = torch.cat((torch.randn(3, 128), 1000 * torch.randn(3, 72)), 1)
    assert (rounded(x)[:, :128] - x[:, :128]).abs().max() < 0.15  # unharmed by the large block beside it
    assert torch.equal(rounded(torch.zeros(2, 200)), torch.zeros(2, 200))


# -------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("method", ["fp8", "fp8-block", "int8", "int4"])
@pytest.mark.parametrize("threads", [False, True], ids=["at-once", "threads"])
def test_plain_weights_are_converted_piece_by_piece(tmp_path: Path, method: Any, threads: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(300, 256).bfloat16()
    values[:, 130] *= 10
    values[7] = 0
    save_file({"x.weight": values, "gate.weight": values.clone()}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, False, Reader(CPU, 2, 1 << 12) if threads else None)
    built = replace(env(checkpoint), quantization=QuantSpec(method=method, convert=method))
    stack = load_stack(built, [[Part("x.weight", (300, 256), WHOLE, WHOLE)]])
    assert open_packed(built, Part("m.gate.weight", (300, 256), WHOLE, WHOLE)) is None  # a router
    checkpoint.unread.clear()
    checkpoint.finish()
    assert not isinstance(stack, torch.Tensor)
    found = stack.expert(0).dequantised()
    error = (found - values.float()).norm() / values.float().norm()
    assert error < {"fp8": 0.03, "fp8-block": 0.03, "int8": 0.02, "int4": 0.15}[method]
    assert stack.nbytes < 300 * 256 * {"int4": 0.54}.get(method, 1.04)
    assert torch.equal(found[7], torch.zeros(256))


def test_conversion_rounds_to_the_nearest_number() -> None:
    values = torch.tensor([[127.0, 0.4, 0.6, -1.5, -127.0, 2.5]])
    weight = Int8Layout("token").allocate((), 1, 6, CPU)
    quantise_into(weight, values)
    assert isinstance(weight, Int8Weight) and weight.weight.tolist() == [[127, 0, 1, -2, -127, 2]]
    grid = torch.arange(16.0).repeat(1, 8) - 5
    group = IntGroupLayout(4, 16, torch.float16, has_zero=True).allocate((), 1, 128, CPU)
    quantise_into(group, grid)
    torch.testing.assert_close(group.dequantised(), grid)  # 16 evenly spaced numbers are exact


def test_saturated_and_extreme_values_stay_finite() -> None:
    for layout in (Fp8Layout(False, "none"), Fp8Layout(True, "none"), Int8Layout("none")):
        weight = layout.allocate((), 128, 128, CPU)
        quantise_into(weight, torch.full((128, 128), 3e38))
        assert weight.dequantised().isfinite().all() and math.isclose(weight.dequantised()[0, 0], 3e38, rel_tol=1e-2)  # fmt: skip


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"scales": torch.full((4, OUT), float("nan")).half()}, GPTQ, "x.scales holds a scale that is not finite"),
        ({"scales": None}, GPTQ, "x.weight is quantised, but x.scales is missing"),
        ({"scales": torch.ones(3, OUT).half(), "qzeros": None}, GPTQ, r"scales for \[64, 3\] rows and groups"),
        ({"weight_scale": torch.tensor(1.0)}, PACK, r"scales for \[\] rows and groups"),
        ({"weight_scale": torch.ones(OUT, 0)}, PACK, r"scales for \[64, 0\] rows and groups"),
        ({"qweight": torch.zeros(12, OUT, dtype=torch.int32)}, GPTQ, "packed into 3 bits"),
        ({"qweight": torch.zeros(16, 7, dtype=torch.int32)}, GPTQ, "unknown number of bits"),
        ({"g_idx": torch.zeros(IN, dtype=torch.int32)}, GPTQ, "g_idx that does not put 32 of its 128 inputs"),
        ({"g_idx": torch.full((IN,), 1 << 30, dtype=torch.int32)}, GPTQ, "g_idx that does not put"),
        ({"qzeros": torch.zeros(1, 8, dtype=torch.int32)}, GPTQ, r"x.qzeros has shape \[1, 8\]"),
    ],
)  # fmt: skip
def test_damaged_groups_are_refused_in_one_sentence(
    tmp_path: Path, change: dict[str, torch.Tensor | None], settings: dict[str, Any], message: str
) -> None:
    layer = pack_quantized(4, 32, True) if settings is PACK else gptq(4, 32)
    tensors = {**layer[0], **change}
    save(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ModelError, match=message):
        load(tmp_path, settings, [Part("x.weight", (OUT, IN), WHOLE, WHOLE)])


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(5, 1), r"has scales \[5, 1\]; supported are one scale, 64 \(one per row\)"),
        (torch.tensor(float("inf")), "x.weight_scale holds a scale that is not finite"),
    ],
)
def test_damaged_fp8_scales_are_refused(tmp_path: Path, scale: torch.Tensor, message: str) -> None:
    save(tmp_path, {"weight": torch.zeros(OUT, IN).to(torch.float8_e4m3fn), "weight_scale": scale})
    with pytest.raises(ModelError, match=message):
        load(tmp_path, FP8, [Part("x.weight", (OUT, IN), WHOLE, WHOLE)])


def test_experts_in_different_formats_are_refused(tmp_path: Path) -> None:
    named = {f"0.{name}": t for name, t in gptq(4, 32)[0].items()} | {"1.weight": torch.zeros(OUT, IN)}
    save_file(named, tmp_path / "model.safetensors")
    built = replace(env(SafetensorsCheckpoint(tmp_path, False)), quantization=spec_of(GPTQ))
    with pytest.raises(ModelError, match=r"1\.weight is not stored like the other experts"):
        load_stack(built, [[Part(f"{i}.weight", (OUT, IN), WHOLE, WHOLE)] for i in range(2)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "supported are: awq, compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size .*supported are blocks"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits; supported are 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv.*supported is gemm"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo .*W4A8_AWQ"),
        (compressed("marlin-24"), "marlin-24"),
        ({**PACK, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({**PACK, "transform_config": {"config_groups": {}}}, "rotations"),
    ],
)
def test_unknown_formats_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    import re

    spec = parse_quantization(settings)
    assert spec is not None and re.search(message, spec.unsupported or "")


def test_parts_fuse_only_at_block_boundaries() -> None:
    class Stored:
        def __init__(self, by_block: bool) -> None:
            self.layout = Fp8Layout(by_block, "none")

        def fill(self, weight: QuantisedWeight) -> None:
            raise AssertionError("not in this test")

    def part(rows: int) -> Part:
        return Part("x", (rows, 8), WHOLE, WHOLE)

    blocks, rows = Stored(True), Stored(False)
    assert [len(run) for run in fused_runs([(part(128), blocks), (part(7), blocks)])] == [2]
    assert [len(run) for run in fused_runs([(part(100), blocks), (part(128), blocks)])] == [1, 1]
    assert [len(run) for run in fused_runs([(part(100), rows), (part(9), rows), (part(9), None)])] == [2, 1]


def test_views_share_memory() -> None:
    weight = Fp8Weight(torch.zeros(2, 256, 128).to(torch.float8_e4m3fn), torch.zeros(2, 2, 1))
    weight.expert(1).rows(128, 256).scale.fill_(1)
    assert weight.scale.flatten().tolist() == [0, 0, 0, 1]
