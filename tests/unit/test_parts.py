"""Back ends by part: rows split between two back ends, and norms and MLPs of other implementations."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.assembly.latents import PIECE_BYTES, with_expansion
from quire.assembly.parts import pick_attention_parts
from quire.attention.by_rows import ByRowsAttention
from quire.attention.expansion_rule import GPU_LEAST_SAVED, NO_EXPANSION, ExpansionRule
from quire.attention.reference import ReferenceAttention
from quire.config import EngineConfig
from quire.kernels import pick_kernels
from quire.layers.activation import ACTIVATIONS
from quire.layers.norm import make_layer_norm, make_rms
from quire.layers.written_out import WRITTEN_OUT, layer_norm_written_out, rms_norm_written_out
from quire.models.spec import IndexSpec, LatentSpec, ModelSpec
from quire.types import ConfigError
from ragged import Layer, check, make_case
from tiny import CONFIG, write_tiny

SPEC = ModelSpec.from_config(CONFIG)
CPU = torch.device("cpu")
MIXED = [
    [(33, 1), (0, 9), (7, 1), (100, 30)],
    [(5, 1), (60, 1), (0, 1), (12, 7), (0, 40)],
    [(0, 3), (8, 1)],
    [(5, 1), (9, 1)],
    [(0, 17), (20, 5)],
]


class Watched(ReferenceAttention):
    """The reference, which notes the numbers of new tokens that it is given."""

    def __init__(self, head_axis: int = 2) -> None:
        super().__init__(head_axis)
        self.seen: list[list[int]] = []

    def plan(self, batch):
        self.seen.append(batch.num_tokens.tolist())
        return super().plan(batch)


@pytest.mark.parametrize("rows", MIXED)
@pytest.mark.parametrize("head_axis", [1, 2])
@pytest.mark.parametrize("window", [None, 5])
def test_each_row_runs_on_the_back_end_of_its_kind(rows, head_axis: int, window: int | None) -> None:
    torch.manual_seed(1)
    prefill, decode = Watched(head_axis), Watched(head_axis)
    backend = ByRowsAttention(prefill, decode)
    layer = Layer(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.2, window=window)
    check(make_case(random.Random(1), backend, layer, rows, 4), backend)
    assert all(set(counts) == {1} for counts in decode.seen)
    assert all(1 not in counts for counts in prefill.seen)
    assert sum(map(len, decode.seen + prefill.seen)) == len(rows)


def test_back_ends_of_different_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="different layouts"):
        ByRowsAttention(ReferenceAttention(1), ReferenceAttention(2))


@pytest.mark.parametrize("rows", MIXED)
@pytest.mark.parametrize("head_axis", [1, 2])
@pytest.mark.parametrize(("window", "slack"), [(None, 0), (5, 0), (None, 3)])
def test_library_gathers_the_keys_of_each_row(
    rows, head_axis: int, window: int | None, slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.attention import library

    def by_rows(q, k, v, query_start, key_start, most_queries, most_keys, scale, window_size, **options):
        """Compute the library's function row by row; the library needs a GPU."""
        out = torch.empty_like(q)
        for first, end, k_first, k_end in zip(query_start, query_start[1:], key_start, key_start[1:]):
            assert end - first <= most_queries and k_end - k_first <= most_keys
            keys = torch.arange(k_end - k_first)
            at = keys[-(end - first) :, None]
            seen = keys <= at
            if window_size[0] >= 0:
                seen &= keys >= at - window_size[0]
            operands = (x.transpose(0, 1) for x in (q[first:end], k[k_first:k_end], v[k_first:k_end]))
            found = torch.nn.functional.scaled_dot_product_attention(
                *operands, seen, scale=scale, enable_gqa=True
            )
            out[first:end] = found.transpose(0, 1)
        return out

    monkeypatch.setattr(library, "varlen_attn", by_rows)
    torch.manual_seed(1)
    layer = Layer(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.2, window=window)
    backend = library.LibraryAttention(head_axis)
    check(make_case(random.Random(1), backend, layer, rows, 4, slack=slack), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", MIXED)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "names", ["reference triton", "triton reference", "library triton", "library library"]
)
def test_parts_on_a_gpu(rows, dim: int, names: str) -> None:
    from quire.attention.library import LibraryAttention
    from quire.attention.triton import TritonAttention

    torch.manual_seed(1)
    axis = 1 if "triton" in names else 2
    parts = {
        "reference": ReferenceAttention(axis),
        "library": LibraryAttention(axis),
        "triton": TritonAttention(),
    }
    prefill, decode = (parts[name] for name in names.split())
    backend = prefill if prefill is decode else ByRowsAttention(prefill, decode)
    for window in (None, 5):
        layer = Layer(num_heads=14, num_kv_heads=2, head_dim=dim, scale=0.2, window=window)
        check(make_case(random.Random(1), backend, layer, rows, 16, "cuda", torch.bfloat16), backend)


def pick(kernels: bool = True, dtype: torch.dtype = torch.float32, **settings: str) -> str:
    config = EngineConfig(device="cpu", **settings)
    return pick_attention_parts(config, SPEC, CPU, dtype, pick_kernels(CPU, dtype) if kernels else None).name


def test_parts_of_a_cpu() -> None:
    if pick_kernels(CPU, torch.float32) is None:
        pytest.skip("no C compiler")
    assert pick() == "cpu"
    assert pick(prefill_attention="reference") == "cpu"
    assert pick(decode_attention="reference") == "reference"
    assert pick(attention="reference", decode_attention="cpu") == "cpu"
    for settings, fault in (
        (
            {"prefill_attention": "library"},
            "decode_attention cpu needs prefill_attention reference, got library",
        ),
        ({"prefill_attention": "library", "decode_attention": "reference"}, "library needs a CUDA device"),
        ({"decode_splits": 1}, "decode_splits is of attention triton, but attention is cpu"),
    ):
        with pytest.raises(ConfigError, match=fault):
            pick(**settings)
    with pytest.raises(ConfigError, match="decode_attention must be one of"):
        EngineConfig(decode_attention="flash")


def test_rows_of_prompts_expand_latents() -> None:
    def rule(spec: ModelSpec, device: torch.device = CPU, **settings: Any) -> ExpansionRule:
        config = EngineConfig(device="cpu", **settings)
        absorbed = ReferenceAttention()
        return with_expansion(
            absorbed, config.prefill_attention, spec, device, torch.float32, config.tensor_parallel_size
        ).rule

    latent = LatentSpec(query_rank=None, rank=64, content_dim=16, rotary_dim=8, value_dim=24)
    spec = replace(SPEC, latent=latent)
    for settings in ({}, {"prefill_attention": "expanded"}):
        assert rule(spec, **settings) == ExpansionRule(spec.num_heads, 64, 16, 24, 0.0, PIECE_BYTES)
    gpu = torch.device("cuda")
    for settings in ({}, {"prefill_attention": "expanded"}):
        assert rule(spec, gpu, **settings).least_saved == GPU_LEAST_SAVED
    assert rule(spec, tensor_parallel_size=2).heads == spec.num_heads // 2
    assert rule(spec, prefill_attention="absorbed") is NO_EXPANSION
    assert (
        pick_attention_parts(EngineConfig(device="cpu"), spec, CPU, torch.float32, None).rule
        is not NO_EXPANSION
    )
    index = IndexSpec(heads=2, dim=8, top_k=4, interleaved=True, layers=(True,) * spec.num_layers)
    chooses = replace(spec, latent=replace(latent, index=index))
    assert rule(chooses) is NO_EXPANSION
    with pytest.raises(ConfigError, match="chooses them for each query; use absorbed"):
        rule(chooses, prefill_attention="expanded")
    for way in ("absorbed", "expanded"):
        with pytest.raises(ConfigError, match=f"prefill_attention {way} needs latent attention"):
            pick(prefill_attention=way)


def test_written_out_functions_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x, weight, bias = 3 * torch.randn(7, 32), torch.randn(32), torch.randn(32)
    close = torch.testing.assert_close
    close(rms_norm_written_out(weight, 1e-5)(x), make_rms(weight, 32, 1e-5)(x))
    close(layer_norm_written_out(weight, bias, 1e-5)(x), make_layer_norm(weight, bias, 1e-5)(x))
    for name, act in WRITTEN_OUT.items():
        close(act(x), ACTIVATIONS[name](x))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def answers(tiny: Path, **settings: str) -> list[list[int]]:
    llm = LLM(
        str(tiny), device="cpu", dtype="float32", kv_cache_memory=1 << 24, max_model_len=128, **settings
    )
    prompts = [{"prompt_token_ids": list(range(7 * i + 1, 7 * i + 20 + i))} for i in range(4)]
    outs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False
    )
    llm.close()
    return [list(out.outputs[0].token_ids) for out in outs]


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_backend": "reference", "mlp_backend": "reference", "decode_attention": "reference"},
        {"norm_backend": "library"},
        {"mlp_backend": "library"},
        {"mlp_backend": "reference"},
    ],
)
def test_an_engine_gives_the_same_tokens_with_other_parts(tiny: Path, settings: dict[str, str]) -> None:
    assert answers(tiny, **settings) == answers(tiny)


def test_parts_replace_the_kernels(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.layers import mlp, norm

    made: list[str] = []
    rms, gated = norm.rms_norm_written_out, mlp.gated_written_out
    monkeypatch.setattr(norm, "rms_norm_written_out", lambda w, e: made.append("norm") or rms(w, e))
    monkeypatch.setattr(mlp, "gated_written_out", lambda kind: made.append("mlp") or gated(kind))
    answers(tiny)
    assert not made
    answers(tiny, norm_backend="reference", mlp_backend="reference")
    assert made.count("mlp") == 2 and made.count("norm") >= 5
