"""Tables of kernels, from traces in the format of torch.profiler."""

from __future__ import annotations

from typing import Any

import pytest

from quire.bench.cost import Cost, Machine, MatrixProduct
from quire.bench.kernel_table import busy_and_span_us, events_of, part_of, short_name, tables

MACHINE = Machine("m", bytes_per_s=1e9, flops_per_s=1e12)  # 1,000 bytes a microsecond


def device(name: str, start: float, duration: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": 7}


def operator(name: str, start: float, duration: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "pid": 1, "tid": tid}


GRAPH = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0},
        operator("aten::copy_", 0, 5),
        device("step 0", 10, 90, "gpu_user_annotation"),
        device("Memcpy HtoD (Pinned -> Device)", 10, 2, "gpu_memcpy"),
        device("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 12, 20),
        device("_short_kernel", 32, 10),
        device("void gemmSN_TN_kernel<float, 128, 16>(cublasGemmParams<float>)", 42, 30),
        device("void cublasLt::splitKreduce_kernel<32, 16, int>(int, float*)", 72, 8),
        device("_rms_norm", 90, 10),
    ]
}


def test_device_events_of_a_replayed_graph() -> None:
    events = events_of(GRAPH)
    assert [e.self_us for e in events] == [2, 20, 10, 30, 8, 10]
    busy, span = busy_and_span_us(events)
    assert (busy, span) == (80, 90), "idle from 80 to 90"
    products = [MatrixProduct("qkv", 10_000, 0), MatrixProduct("lm_head", 15_000, 0)]
    parts, by_product, kernels = tables(events, [Cost(25_000, 0, 9_000, 0)], [products], MACHINE)
    assert [(row.name, row.calls, row.busy_us) for row in parts] == [
        ("matrix products", 3, 58),
        ("attention", 1, 10),
        ("norms, rotary, activation", 1, 10),
        ("copies", 1, 2),
    ]
    assert parts[0].least_us == 25 and parts[1].least_us == 9
    # the reduction belongs to the product before it
    assert [(row.name, row.busy_us, row.least_us) for row in by_product] == [
        ("lm_head", 38, 15),
        ("qkv", 20, 10),
    ]
    assert {row.name: row.bytes for row in kernels}["gemmSN_TN_kernel"] == 15_000


def test_products_stay_unknown_when_the_kernels_do_not_match() -> None:
    products = [MatrixProduct(str(i), 1, 1) for i in range(3)]
    parts, by_product, kernels = tables(events_of(GRAPH), [Cost(3, 3, 0, 0)], [products], MACHINE)
    assert by_product == [] and all(row.bytes == 0 for row in kernels)
    assert parts[0].bytes == 3, "the part as a whole is known all the same"


def test_operators_without_those_that_they_call() -> None:
    events = events_of(
        {
            "traceEvents": [
                operator("aten::linear", 0, 10),
                operator("aten::t", 1, 2),
                operator("aten::mm", 4, 5),
                operator("aten::add", 10, 3),
                operator("aten::add", 2, 4, tid=2),
            ]
        }
    )
    assert {(e.name, e.start_us): e.self_us for e in events} == {
        ("aten::linear", 0): 3, ("aten::t", 1): 2, ("aten::mm", 4): 5, ("aten::add", 10): 3, ("aten::add", 2): 4,
    }  # fmt: skip
    assert busy_and_span_us(events) == (13, 13)


@pytest.mark.parametrize(
    ("name", "short", "part"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH", "copies"),
        ("std::enable_if<!(T7), void>::type internal::gemvx::kernel<int, __nv_bfloat16>(cublasGemvParamsEx<int>)", "internal::gemvx::kernel", "matrix products"),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long>(long)", "at::native::indexSelectSmallIndex", "other"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float> > >(int)", "at::native::reduce_kernel", "sampling"),
        ("_write_kernel", "_write_kernel", "KV write"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("mkldnn::_linear_pointwise", "mkldnn::_linear_pointwise", "matrix products"),
    ],
)  # fmt: skip
def test_names(name: str, short: str, part: str) -> None:
    assert short_name(name) == short and part_of(name) == part
