"""The CPU's replacements of argmax, topk and bisection against the originals, on logits with ties and infinities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.sampling import sampler
from quire.sampling.filters import _bisect, _by_digits, _needed
from quire.sampling.on_cpu import highest, largest, top_candidates
from quire.sampling.sampler import Sampler
from quire.types import EngineRequest, SamplingParams

KINDS = ["smooth", "bfloat16", "coarse", "masked", "equal"]


def logits_of(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator) * 3
    if kind == "bfloat16":
        x = x.bfloat16().float()
    if kind == "coarse":
        x = x.round()
    if kind == "masked":
        x[torch.rand(rows, vocab, generator=generator) < 0.995] = float("-inf")
    return torch.zeros(rows, vocab) if kind == "equal" else x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 63, 512, 5003, 8192])
def test_highest_and_largest_are_those_of_torch(kind: str, vocab: int) -> None:
    x = logits_of(kind, 3, vocab)
    assert torch.equal(highest(x), x.argmax(1))
    for half in (x.bfloat16(), x.half(), -x.bfloat16().abs(), x.bfloat16()[:, 1:]):
        if half.numel():
            assert torch.equal(highest(half), half.float().argmax(1))
    for k in (1, 2, 7, 50):
        if k <= vocab:
            assert torch.equal(largest(x, k), x.topk(k).values)


@pytest.mark.parametrize("kind", KINDS)
def test_contenders_are_all_above_the_rest(kind: str) -> None:
    x = logits_of(kind, 4, 5003)
    found = top_candidates(x, 5)
    assert found is not None
    assert torch.equal(found.values, x.gather(1, found.tokens))
    assert (found.tokens.diff(dim=1) > 0).all()
    left_out = x.scatter(1, found.tokens, float("-inf")).amax(1, keepdim=True)
    assert (left_out <= found.rest).all()
    assert (found.rest <= found.values.topk(5).values[:, -1:]).all()


def test_many_contenders_are_not_worth_it() -> None:
    assert top_candidates(torch.zeros(1, 8 * 64 - 1), 1) is None
    assert top_candidates(torch.zeros(1, 8 * 64), 1) is not None
    assert top_candidates(torch.zeros(1, 8 * 64), 2) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_k": 9, "top_p": 0.8}, {"top_k": 9, "min_p": 0.1}])
def test_draws_do_not_depend_on_how_many_tokens_are_looked_at(
    kind: str, params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocab = 6, 5003
    known = torch.full((rows + 1,), 2, dtype=torch.int32)

    class Columns:
        tokens = torch.zeros(rows + 1, 8, dtype=torch.int32)
        num_tokens = prompt_len = known

    drawn = Sampler(Columns(), vocab, rows + 1, torch.device("cpu"))
    for slot in range(rows):
        wants = SamplingParams(temperature=0.5 + slot / 4, **params)
        drawn.admit(slot, EngineRequest(str(slot), [1], wants, seed=slot))
    drawn.flush()
    host, slots = np.arange(rows), torch.arange(rows)
    for position in range(2, 12):
        known.fill_(position)
        x = logits_of(kind, rows, vocab, seed=position)
        few = drawn.sample(x, host, slots).tokens
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "top_candidates", lambda x, k: None)
            assert torch.equal(few, drawn.sample(x, host, slots).tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_digits_find_what_bisection_finds(kind: str) -> None:
    x = torch.cat((logits_of(kind, 3, 700), -logits_of(kind, 3, 300, seed=1).clamp(min=-1e30)), 1)
    x[:, 5:7] = torch.tensor([0.0, -0.0])
    top = x.amax(1, keepdim=True)
    mass = (x - top).exp().mul(2.0**40).to(torch.int64)
    for p in (1e-9, 0.2, 0.5, 0.9, 0.999999):
        need = _needed(mass.sum(1, keepdim=True), torch.full((3, 1), p, dtype=torch.float64))
        assert torch.equal(x >= _by_digits(x, mass, need), x >= _bisect(x, mass, need, top))
    nothing = torch.full((1, 40), float("-inf"))
    need = torch.ones(1, 1, dtype=torch.int64)
    assert _by_digits(nothing, torch.zeros(1, 40, dtype=torch.int64), need).item() == float("-inf")
