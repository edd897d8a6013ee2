"""A GPU with the properties of another one: its tiles, fallbacks and graphs, from kernels to engines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from targets import TARGETS

from quire import LLM, SamplingParams
from quire.kernels import target as targets
from ragged import Layer, check, check_packed, make_case
from tiny import CONFIG

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 24},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


@pytest.fixture(params=[75, 80, 89])
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(targets.KNOWN_TARGETS, torch.device("cuda", 0), TARGETS[request.param])
    return int(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_attention(dim: int, dtype: torch.dtype, window: int | None, other: int) -> None:
    from quire.attention.triton import TritonAttention

    for rows in ([(700, 1)] * 3, [(500, 5), (0, 300), (40, 1)], [(9000, 1)]):
        torch.manual_seed(0)
        backend, layer = TritonAttention(), Layer(8, 2, dim, dim**-0.5, window)
        case = make_case(random.Random(0), backend, layer, rows, 16, "cuda:0", dtype)
        check(case, backend)
        check_packed(make_case(random.Random(0), backend, layer, rows, 16, "cuda:0", dtype), backend, True)


def tokens_of(folder: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        kv_cache_memory=1 << 24,
        **settings,
    )
    prompts = [[1, 2, 3], list(range(5, 120)), [7], [200, 9]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_engines(model: str, dtype: str, other: int, tmp_path: Path) -> None:
    """Engines start, and in fp32 generate the same tokens as on a CPU."""
    config = {**CONFIG, **SIZES, **MODELS[model], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if dtype == "bfloat16" and other == 75:
        pytest.skip("refused")
    got = tokens_of(tmp_path, dtype=dtype, device="cuda:0")
    assert [len(tokens) for tokens in got] == [12] * 4
    if dtype == "float32":
        assert got == tokens_of(tmp_path, dtype=dtype, device="cpu")
