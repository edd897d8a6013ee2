"""Experts spread over ranks: the logits are those of one rank, whichever way tokens and experts come together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_families import CASES, MOE, ROWS, make_reference
from whole import load_model, logits_of

from quire.kernels.experts.choice import ExpertChoice
from quire.layers.local_experts import ExchangedExperts, LocalExperts
from quire.parallel.experts import ExpertExchange, ExpertShard, exchange_rows, pick_exchange
from quire.parallel.ranks import Parallel
from thread_ranks import on_ranks

EXCHANGES: tuple[ExpertExchange, ...] = ("all-reduce", "all-to-all")


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("mixtral", 2), ("deepseek-v3", 2), ("gpt-oss", 2), ("llama4", 2), ("qwen3-moe-four", 4)],
)
def test_ranks_with_whole_experts_give_the_logits_of_one(
    case: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral has five experts, so that two ranks hold different numbers of them."""
    monkeypatch.setitem(CASES, "qwen3-moe-four", ("Qwen3Moe", {**MOE, "num_attention_heads": 8}))
    make_reference(case, tmp_path)
    whole = torch.cat(logits_of(load_model(tmp_path), ROWS))
    for exchange in EXCHANGES:

        def logits(parallel: Parallel, exchange: ExpertExchange = exchange) -> torch.Tensor:
            model = load_model(tmp_path, parallel=parallel, exchange=exchange)
            return torch.cat(logits_of(model, ROWS))

        found = on_ranks(ranks, logits)
        assert all(torch.equal(rank, found[0]) for rank in found)
        assert (found[0] - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("favourite", [0, 6, None])
def test_uneven_routing_loses_no_token(tokens: int, favourite: int | None) -> None:
    """All tokens go to one expert, or each anywhere; a rank may have no token at all."""
    generator = torch.Generator().manual_seed(tokens)
    matrices = torch.randn(7, 16, 16, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    ids = torch.rand(tokens, 7, generator=generator).argsort(1)[:, :2]
    if favourite is not None:
        ids = torch.tensor([[favourite, (favourite + 1) % 7]] * tokens)
    weights = torch.rand(tokens, 2, generator=generator)
    wanted = torch.stack(
        [
            sum(w * (matrices[i] @ row) for i, w in zip(chosen, ws))
            for row, chosen, ws in zip(x, ids, weights.double())
        ]
    )

    def run(parallel: Parallel) -> list[torch.Tensor]:
        shard = ExpertShard("all-to-all", parallel.rank, parallel.size, 7)
        own = matrices[shard.held(7).start : shard.held(7).stop]

        def mlps(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            valid = of < len(own)
            out = torch.full_like(rows, torch.nan)  # as an implementation leaves rows of other ranks
            out[valid] = torch.einsum("nij,nj->ni", own[of[valid]], rows[valid])
            return out

        choice = ExpertChoice(ids, weights)
        parts = [LocalExperts(mlps, shard.held(7), fixed)(x, choice) for fixed in (False, True)]
        sums = [parallel.all_reduce(part) for part in parts]
        return [*sums, ExchangedExperts(LocalExperts(mlps, shard.held(7), False), shard, parallel)(x, choice)]

    for rank in on_ranks(3, run):
        for found in rank:
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_the_exchange_with_the_fewest_bytes_is_picked() -> None:
    assert exchange_rows(2, 8)["all-reduce"] == 1.0
    assert exchange_rows(4, 8)["all-to-all"] > exchange_rows(4, 8)["all-reduce"] == 1.5
    assert pick_exchange(4, 8, fixed_shapes=False) == "all-reduce"
    assert pick_exchange(8, 1, fixed_shapes=False) == "all-to-all"
    assert pick_exchange(8, 1, fixed_shapes=True) == "all-reduce"
