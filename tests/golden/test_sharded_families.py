"""Every family sharded over ranks: the logits are those of one rank, and the ranks' are equal bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_families import CASES, ROWS, make_reference
from whole import ONE_RANK, load_model, logits_of

from quire.models.config.load import load_spec
from quire.models.registry import check_shards
from quire.parallel.ranks import Parallel
from quire.types import ModelError
from thread_ranks import on_ranks

# The first case of every class of transformers, and one with fewer K/V heads than ranks.
FIRST = list({name: case for case, (name, _) in reversed(CASES.items())}.values())


@pytest.mark.parametrize("case", [*FIRST, "llama-mqa", "llama-biases", "gpt2-untied"])
def test_two_ranks_give_the_logits_of_one(case: str, tmp_path: Path) -> None:
    make_reference(case, tmp_path)
    try:
        check_shards(load_spec(tmp_path), 2)
    except ModelError as error:
        assert "5" in str(error)  # heads of gpt2-untied
        return
    whole = torch.cat(logits_of(load_model(tmp_path), ROWS))
    first, second = on_ranks(
        2, lambda parallel: torch.cat(logits_of(load_model(tmp_path, parallel=parallel), ROWS))
    )
    assert torch.equal(first, second)
    assert (first - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_four_ranks_share_two_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each K/V head is on two ranks, and the vocabulary of 97 leaves the last rank three rows short."""
    make_reference("gpt2", tmp_path / "gpt2")
    monkeypatch.setitem(CASES, "qwen3-four", ("Qwen3", {"num_attention_heads": 8}))
    make_reference("qwen3-four", tmp_path / "qwen3")
    for folder in ("gpt2", "qwen3"):

        def logits(parallel: Parallel, path: Path = tmp_path / folder) -> torch.Tensor:
            return torch.cat(logits_of(load_model(path, parallel=parallel), ROWS))

        whole, ranks = logits(ONE_RANK), on_ranks(4, logits)
        assert all(torch.equal(rank, ranks[0]) for rank in ranks)
        assert (ranks[0] - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize(
    ("size", "words"), [(3, ("intermediate size 56", "K/V heads 2")), (4, ("heads 6",)), (5, ("heads 6",))]
)
def test_sizes_that_do_not_divide_are_named(size: int, words: tuple[str, ...], tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    with pytest.raises(ModelError) as caught:
        check_shards(load_spec(tmp_path), size)
    assert all(word in str(caught.value) for word in (*words, f"{size} ranks", "tensor_parallel_size"))
