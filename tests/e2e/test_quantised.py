"""Quantised models from end to end: copies written by `quire quantize`, conversions, switches, doctor, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.models.checkpoint.sizes import weight_bytes
from quire.models.config.load import load_spec
from quire.quant.spec import served_format
from quire.types import QuireError
from tiny import write_tiny

torch.set_num_threads(1)
FORMATS = ("fp8", "fp8-block", "int8", "int4")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["Hello", "The quick brown fox", "a"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def copies(plain: Path) -> dict[str, Path]:
    """Return a quantised copy in each format."""
    found = {}
    for form in FORMATS:
        out = found[form] = plain.parent / form
        command = [
            "quantize",
            str(plain),
            str(out),
            "--format",
            form,
            "--group-size",
            "16",
            "--device",
            "cpu",
        ]
        assert main(command) == 0
    return found


def answers(model: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(str(model), device="cpu", kv_cache_memory=1 << 20, max_model_len=64, **settings)
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_runs_and_keeps_everything_else(
    copies: dict[str, Path], plain: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copies[form]
    names = {file.name for file in plain.iterdir()}
    assert {file.name for file in folder.iterdir()} == names
    spec = load_spec(folder)
    assert spec.quantization and spec.quantization.unsupported is None
    before, after = load_file(plain / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_norm.weight"):
        assert torch.equal(before[name], after[name])
    assert all(len(tokens) == 6 for tokens in answers(folder))
    assert main(["doctor", str(folder), "--device", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    described, needed = plan["plan"]["quantization"], plan["memory_map"]["weights"]["bytes"]
    assert described.startswith(str(spec.quantization))
    if form.startswith("fp8"):  # no C kernel takes FP8
        assert "unpacked and computed in float32" in described and needed == spec.num_parameters * 4
    elif "C kernels" in described:
        assert needed == pytest.approx(sum(t.nbytes for t in after.values()), rel=0.2)


def test_eight_bits_hardly_change_an_answer(copies: dict[str, Path], plain: Path) -> None:
    """Log-probabilities of a copy are those of the plain model within the precision of its format."""

    def scores(model: Path) -> torch.Tensor:
        llm = LLM(str(model), device="cpu", kv_cache_memory=1 << 20, max_model_len=64)
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        (out,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        return torch.tensor([next(iter(at.values())).logprob for at in out.prompt_logprobs if at])

    wanted = scores(plain)
    for form, limit in (("fp8", 0.6), ("int8", 0.2), ("int4", 2.0)):
        assert (scores(copies[form]) - wanted).abs().mean() < limit


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": False},
        {"batching": "static"},
        {"kv_layout": "contiguous"},
        {"prefix_caching": False, "chunked_prefill": True, "max_num_batched_tokens": 8},
        {"attention": "reference", "cpu_kernels": False},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("form", ["int4", "fp8-block"])
def test_switches_do_not_change_answers(copies: dict[str, Path], form: str, settings: dict[str, Any]) -> None:
    assert answers(copies[form], dtype="float32", **settings) == answers(copies[form], dtype="float32")


def test_conversions_count_their_bytes(plain: Path) -> None:
    spec = load_spec(plain)
    sizes = {}
    for form in ("auto", *FORMATS):
        served = replace(spec, quantization=served_format(None, form, dummy=False))
        sizes[form] = weight_bytes(plain, served, torch.bfloat16, torch.device("cuda"))
    assert sizes["auto"] == spec.num_parameters * 2
    assert sizes["int4"] < sizes["fp8"] < sizes["auto"]


@pytest.mark.parametrize("form", FORMATS)
def test_dummy_weights_are_converted_too(plain: Path, form: str) -> None:
    assert all(len(tokens) == 6 for tokens in answers(plain, load_format="dummy", quantization=form))


def test_shards_keep_their_names(plain: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(plain, source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    placed = {}
    for i, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, source / file)
        placed |= dict.fromkeys(names, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    out = tmp_path / "out"
    assert main(["quantize", str(source), str(out), "--format", "int8", "--device", "cpu"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.embed_tokens.weight"] == placed["model.embed_tokens.weight"]
    assert index["metadata"]["total_size"] < sum(t.nbytes for t in tensors.values())
    assert len(answers(out)) == 3


def test_refusals_name_the_way_out(
    copies: dict[str, Path], plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["quantize", *words]) == 1
        return capsys.readouterr().err

    full = str(copies["int8"])
    assert "is not empty; choose a new folder" in refused(str(plain), full, "--format", "int8")
    assert "quantised already (compressed-tensors (int-quantized))" in refused(
        full, str(tmp_path), "--format", "int8"
    )
    words = ("--format", "int4", "--group-size", "128")
    assert "groups of 128 do not divide; choose another" in refused(str(plain), str(tmp_path / "x"), *words)
    assert not (tmp_path / "x").exists()
    with pytest.raises(QuireError, match=r"is quantised already .*; use quantization auto"):
        LLM(full, device="cpu", quantization="int4")
