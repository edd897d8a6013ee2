"""`quire bench compare`: every comparison that a CPU can run, with a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire.bench.comparison import COMPARISONS
from quire.bench.ladder.rungs import LadderScale
from quire.cli.bench_compare import _NAMES
from quire.cli.main import main
from tiny import write_tiny

SCALE = LadderScale("tiny", 256, 260, is_full=False, on_gpu=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def compare(tiny: Path, name: str, out: Path, *flags: str) -> dict:
    command = [
        "bench",
        "compare",
        name,
        str(tiny),
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--output-json",
        str(out),
    ]
    assert main([*command, *flags]) == 0
    return json.loads(out.read_text())


def test_the_command_knows_every_comparison() -> None:
    assert tuple(COMPARISONS) == _NAMES


def test_parts_are_compared_with_the_reference(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    found = compare(tiny, "parts", tmp_path / "parts.json", "--plot", str(tmp_path / "parts.svg"))
    assert list(found["variants"]) == [
        "reference",
        "C attention",
        "C norms and MLPs",
        "C for all",
        "all, with graphs",
    ]
    figures = {(one["variant"], one["load"]): one for one in found["figures"]}
    assert len(figures) == 8 and all(one["value"] > 0 for one in figures.values())
    one = figures["C for all", "decode"]
    assert one["gain"] == pytest.approx(one["base"] / one["value"])
    assert "ms per token" in (tmp_path / "parts.svg").read_text()
    assert "C for all" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["chunked-prefill", "prefix-caching", "graphs", "users"])
def test_a_setting_is_compared_with_its_absence(tiny: Path, name: str, tmp_path: Path) -> None:
    found = compare(tiny, name, tmp_path / "x.json")
    assert len(found["variants"]) == 2 and all(one["gain"] > 0 for one in found["figures"])


def test_prompts_expand_latents_in_one_variant_only() -> None:
    both = COMPARISONS["latent-prefill"](SCALE)
    assert [settings["prefill_attention"] for settings in both.variants.values()] == ["absorbed", "expanded"]
    assert [len(load.make(random.Random(0)).work) for load in both.loads] == [1] * len(both.loads)


def test_users_share_equal_memory() -> None:
    users = COMPARISONS["users"](SCALE)
    assert users.context == 256 and users.variants["contiguous"]["max_num_seqs"] == 8


def test_on_a_gpu_prefill_and_decode_attention_form_a_matrix() -> None:
    variants = COMPARISONS["parts"](SCALE).variants
    pairs = [(one.get("prefill_attention"), one.get("decode_attention")) for one in variants.values()]
    assert pairs[:4] == [(p, d) for p in ("reference", "triton") for d in ("reference", "triton")]
    assert [load.label for load in COMPARISONS["split-decoding"](SCALE).loads] == ["context 127"]


def test_a_setting_of_the_comparison_cannot_be_given(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", "graphs", str(tiny), "--no-cuda-graphs"]) == 2
    assert "graphs chooses cuda_graphs itself" in capsys.readouterr().err
    assert main(["bench", "compare", "split-decoding", str(tiny), "--device", "cpu"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
