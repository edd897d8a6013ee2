"""The setting kv_cache_dtype: sizes, static scales of a checkpoint, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.assembly.kv_codes import kv_coded_spec
from quire.config import EngineConfig
from quire.kernels.target import KNOWN_TARGETS, Target
from quire.models.kv_scales import stores_kv_scales
from quire.models.spec import LatentSpec, ModelSpec
from quire.types import ConfigError, KVCodes, ModelError
from tiny import CONFIG, write_tiny

SPEC = ModelSpec.from_config(CONFIG)
CPU = torch.device("cpu")


def spec_of(kv_cache_dtype: str, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32) -> ModelSpec:
    config = EngineConfig(kv_cache_dtype=kv_cache_dtype, load_format="dummy")
    return kv_coded_spec(config, Path("unused"), spec, dtype, CPU)


def test_stored_bytes_are_counted_with_their_scales() -> None:
    plain = spec_of("auto").kv_layout(0, "float32").token_bytes
    heads, dim = SPEC.num_kv_heads, SPEC.head_dim
    assert plain == 2 * heads * dim * 4
    for name in ("int8", "fp8", "fp8_e4m3"):
        assert spec_of(name).kv_layout(0, "float32").token_bytes == 2 * heads * (dim + 4)
    static = replace(SPEC, kv_codes=KVCodes("float8_e4m3fn", static=True))
    assert static.kv_layout(0, "float32").token_bytes == 2 * heads * dim


def test_what_cannot_be_stored_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="kv_cache_dtype must be one of auto, bfloat16, fp8, fp8_e4m3, int8, got 'int4'"
    ):
        EngineConfig(kv_cache_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="needs dtype bfloat16, but activations are float32; use kv_cache_dtype auto"
    ):
        spec_of("bfloat16")
    assert spec_of("bfloat16", dtype=torch.bfloat16).kv_codes is None
    latent = LatentSpec(query_rank=None, rank=8, content_dim=8, rotary_dim=4, value_dim=8)
    with pytest.raises(ConfigError, match="keeps one latent per token"):
        spec_of("int8", replace(SPEC, latent=latent))
    gpu = torch.device("cuda", 7)
    monkeypatch.setitem(KNOWN_TARGETS, gpu, Target("A100", 80, 166_912, 108))
    config = EngineConfig(kv_cache_dtype="fp8", load_format="dummy")
    with pytest.raises(ConfigError, match=r"since Ada, got A100 .*; use kv_cache_dtype int8"):
        kv_coded_spec(config, Path("unused"), SPEC, torch.bfloat16, gpu)


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    path = write_tiny(folder)
    file = next(path.glob("*.safetensors"))
    save_file(load_file(file) | scales, file)
    return path


def tokens_of(path: Path, **settings: Any) -> list[int]:
    llm = LLM(
        str(path),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory=1 << 22,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (out,) = llm.generate([{"prompt_token_ids": [5, 9, 3, 7, 1]}], params, use_tqdm=False)
    return list(out.outputs[0].token_ids)


def test_static_scales_of_a_checkpoint_are_used(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn." for i in range(CONFIG["num_hidden_layers"])]
    fitting = {name + f"{part}_scale": torch.tensor(0.01) for name in names for part in "kv"}
    path = with_scales(tmp_path / "fitting", fitting)
    assert stores_kv_scales(path)
    assert tokens_of(path, kv_cache_dtype="fp8") == tokens_of(path)
    # A scale so large that every key and value is rounded to 0 shows that it is used.
    coarse = {name: torch.tensor([1e6]) for name in fitting}
    path = with_scales(tmp_path / "coarse", coarse)
    assert tokens_of(path, kv_cache_dtype="fp8") != tokens_of(path)
    assert tokens_of(path, kv_cache_dtype="fp8", attention="reference") == tokens_of(
        path, kv_cache_dtype="fp8"
    )
    assert tokens_of(path, kv_cache_dtype="int8") == tokens_of(path)


def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path) -> None:
    path = with_scales(tmp_path, {"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)})
    with pytest.raises(ModelError, match=r"self_attn\.k_scale must be one finite positive number"):
        tokens_of(path, kv_cache_dtype="fp8")
