"""`quire bench attention` with a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.bench.attention import AttentionBench, AttentionCase
from quire.bench.cost import Machine
from quire.bench.latent_attention import LatentBench, _LatentInputs
from quire.cli.main import main
from quire.models.spec import LatentSpec, ModelSpec
from quire.types import KVCodes
from tiny import CONFIG, write_tiny


def test_every_back_end_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_tiny(tmp_path / "tiny"), tmp_path / "attention.json"
    flags = ["--batch-sizes", "1", "3", "--contexts", "40", "--prompt-lens", "33", "--output-json", str(out)]
    assert main(["bench", "attention", str(folder), "--device", "cpu", *flags]) == 0
    figures = json.loads(out.read_text())["figures"]
    cases = [(one["kind"], one["rows"], one["length"]) for one in figures if one["backend"] == "plain loop"]
    assert cases == [("decode", 1, 40), ("decode", 3, 40), ("prefill", 1, 33)]
    assert {one["backend"] for one in figures} >= {"plain loop", "reference"}
    assert all(one["time_s"] > 0 and one["share_of_limit"] > 0 for one in figures)
    assert "1.00x" in capsys.readouterr().out  # the loop over itself


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_codes_have_a_limit_of_their_own(codes: str, static: bool) -> None:
    plain = ModelSpec.from_config(CONFIG)
    case, limits = AttentionCase(2, 40, False), []
    for spec in (plain, replace(plain, kv_codes=KVCodes(codes, static))):
        bench = AttentionBench(spec, torch.device("cpu"), torch.float32, Machine("a", 1e9, 1e15))
        figures = {one.backend: one for one in bench.measure([case])}
        limits.append(figures["reference"].time_s * figures["reference"].share_of_limit)
    bytes_per_number = 1 if static else 1 + 4 / plain.layer_head_dim(0)
    assert limits[1] == pytest.approx(limits[0] * bytes_per_number / 4)


def test_a_format_of_entries_is_timed_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_tiny(tmp_path / "tiny"), tmp_path / "attention.json"
    flags = ["--batch-sizes", "2", "--contexts", "40", "--prompt-lens", "--kv-cache-dtype", "int8"]
    assert (
        main(["bench", "attention", str(folder), "--device", "cpu", *flags, "--output-json", str(out)]) == 0
    )
    assert json.loads(out.read_text())["kv_cache_dtype"] == "int8"
    assert "reference" in capsys.readouterr().out


def test_prompts_leave_out_what_differs_for_decoding_only() -> None:
    bench = AttentionBench(
        ModelSpec.from_config(CONFIG), torch.device("cpu"), torch.float32, Machine("a", 1e9, 1e10)
    )
    found = {one.backend for one in bench.measure([AttentionCase(1, 20, True)])}
    assert found == {"plain loop", "reference"}


def test_absorbed_and_expanded_latents_are_timed(tmp_path: Path) -> None:
    latent = LatentSpec(query_rank=None, rank=64, content_dim=16, rotary_dim=8, value_dim=24)
    spec = replace(ModelSpec.from_config(CONFIG), latent=latent)
    bench = LatentBench(spec, torch.device("cpu"), torch.float32, Machine("a", 1e9, 1e10))
    cases = [AttentionCase(2, 40, False), AttentionCase(2, 50, True)]
    figures = list(bench.measure(cases))
    decode, prefill = ("plain loop", "absorbed"), ("plain loop", "absorbed", "expanded")
    assert [(one.kind, one.backend) for one in figures] == [
        *(("decode", name) for name in decode), *(("prefill", name) for name in prefill),
    ]  # fmt: skip
    assert all(one.time_s > 0 and one.share_of_limit > 0 for one in figures)


def test_both_ways_that_are_timed_give_the_same_results() -> None:
    latent = LatentSpec(query_rank=None, rank=64, content_dim=16, rotary_dim=8, value_dim=24)
    spec = replace(ModelSpec.from_config(CONFIG), latent=latent)
    bench = LatentBench(spec, torch.device("cpu"), torch.float32, Machine("a", 1e9, 1e10))
    work = _LatentInputs(bench, AttentionCase(2, 50, True))
    absorbed, expanded = (work.call(backend)() for backend in bench.backends().values())
    torch.testing.assert_close(absorbed, expanded, rtol=1e-4, atol=1e-5)
    assert not torch.equal(absorbed, expanded)
