"""Back ends that share the KV cache with the Triton kernels, in Triton's interpreter without a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from ragged import Layer, check, make_case

pytest.importorskip("triton")

from quire.attention import triton as backend_module
from quire.attention.by_rows import ByRowsAttention
from quire.attention.reference import ReferenceAttention
from quire.attention.triton import TritonAttention

ROWS = [(33, 1), (0, 9), (7, 1), (40, 30)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("triton_decodes", [False, True])
def test_triton_runs_one_kind_of_rows(triton_decodes: bool) -> None:
    torch.manual_seed(1)
    parts = ReferenceAttention(1), TritonAttention()
    backend = ByRowsAttention(*(parts if triton_decodes else parts[::-1]))
    layer = Layer(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.2)
    check(make_case(random.Random(1), backend, layer, ROWS, 16, DEVICE), backend)


@pytest.mark.parametrize(("most", "used"), [(1, 1), (3, 2), (4, 4)])
def test_decode_splits_bound_the_programs_of_a_row(
    most: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    attend = backend_module.attend_short

    def watched(*args, **options):
        found.append(args[12])
        return attend(*args, **options)

    monkeypatch.setattr(backend_module, "attend_short", watched)
    torch.manual_seed(1)
    layer = Layer(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.2)
    backend = TritonAttention(most)
    check(make_case(random.Random(1), backend, layer, [(700, 1)], 16, DEVICE), backend)
    assert found == [used]
