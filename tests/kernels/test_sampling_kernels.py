"""The sampling kernels against the sampler's plain torch code, which defines their results.

Without a GPU they run in Triton's interpreter, with smaller constants so that few tokens take every path. On a GPU they
run with the real constants and vocabularies, also in a captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from targets import pretend
from torch import Tensor

from quire.sampling.columns import LogitRows
from quire.sampling.processors import Penalties
from quire.sampling.sampler import Sampler
from quire.types import EngineRequest, SamplingParams

pytest.importorskip("triton")

from quire.kernels.sampling import choose as sampling
from quire.kernels.sampling import filtered_draw, filters, row

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")


def cases(small: list[int], real: list[int]) -> list:
    """Return cases of (device, dtype, vocab)."""
    off = [pytest.param(CPU, dtype, vocab, marks=interpreted) for dtype in DTYPES for vocab in small]
    return off + [pytest.param(GPU, dtype, vocab, marks=on_gpu) for dtype in DTYPES for vocab in real]


VOCABS = cases([1, 7, 331, 3000], [1, 7, 2048, 32768, 128256, 151936])
LARGE = cases([3000], [32768, 128256, 151936])

Spoil = Callable[[Tensor], object]
LOGITS: dict[str, Spoil] = {
    "flat": lambda x: x.mul_(0.5),
    "almost flat": lambda x: x.mul_(0.01),
    "peaked": lambda x: x.mul_(6.0),
    "far from zero": lambda x: x.add_(40.0),
    "sorted": lambda x: x.mul_(3.0).copy_(x.sort(descending=True).values),
    "few values": lambda x: x.mul_(2.0).round_(),
    "all equal": lambda x: x.fill_(2.0),
    "two values": lambda x: x.copy_((x > 0).to(x.dtype)),
    "one huge": lambda x: x[x.shape[0] // 2 :][:1].fill_(500.0),
    "mostly out": lambda x: x[x.shape[0] // 40 :].fill_(-math.inf),
    "all out": lambda x: x.fill_(-math.inf),
    "the last alone": lambda x: x.fill_(-math.inf)[-1:].fill_(1.0),
    "some nan": lambda x: x[:: 3].fill_(math.nan),
    "all nan": lambda x: x.fill_(math.nan),
    "some infinite": lambda x: x[x.shape[0] // 2 :: 5].fill_(math.inf),
    "tiny": lambda x: x.mul_(1e-36),
}  # fmt: skip

KINDS = [
    dict(temperature=0.0),
    dict(temperature=0.7),
    dict(temperature=0.6, top_p=0.95, top_k=50),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=700, temperature=1.4),
    dict(top_k=2500),
    dict(top_k=2_000_000_000),
    dict(top_p=1e-6),
    dict(top_p=0.3),
    dict(top_p=0.95, temperature=0.6),
    dict(top_p=0.9999999),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(min_p=1e-4, top_p=0.8),
    dict(top_k=2500, top_p=0.9),
    dict(top_k=40, top_p=0.5, min_p=0.02, temperature=2.0),
    dict(top_p=0.95, temperature=0.01),
]


class Columns:
    def __init__(self, slots: int, device: torch.device) -> None:
        counts = np.random.default_rng(5).integers(1, 30, slots).astype(np.int32)
        self.tokens = torch.zeros(slots, 32, dtype=torch.int32, device=device)
        self.num_tokens = torch.from_numpy(counts).to(device)
        self.prompt_len = torch.ones_like(self.num_tokens)


class Pair:
    """A sampler with a slot for each set of parameters, and both of its implementations."""

    def __init__(self, kinds: list[dict], vocab: int, device: torch.device) -> None:
        self.device, self.kinds = device, kinds
        self.columns = Columns(len(kinds), device)
        self.sampler = Sampler(self.columns, vocab, len(kinds), device)
        for slot, kind in enumerate(kinds):
            seed = (-1) ** slot * 12345678901234 * (slot + 1)
            self.sampler.admit(slot, EngineRequest("r", [1], SamplingParams(**kind), seed=seed))
        self.sampler.flush()
        self.kernels = self.sampler.kernel_choice(vocab, len(kinds))

    def choose(self, logits: Tensor, order: np.ndarray, plain: bool = False, filtered: bool = True) -> Tensor:
        slots = torch.from_numpy(order).to(self.device, torch.int64)
        tokens = torch.full((len(order),), -7, dtype=torch.int32, device=self.device)
        choose = self.sampler.choose_plain if plain else self.kernels
        choose(logits, slots, self.columns.num_tokens[slots], tokens, order if plain else None, filtered)
        return tokens


def normal(rows: int, vocab: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng([seed, rows, vocab]).normal(0, 1, (rows, vocab)).astype(np.float32)
    return torch.from_numpy(drawn).to(device, dtype)


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use constants, in the interpreter, that make a few thousand tokens a large vocabulary."""
    if torch.cuda.is_available():
        return
    sizes = dict(GROUP=16, MOST_GROUPS=32, SAMPLES=512, BINS=64, CAPACITY=1024)
    for name, size in sizes.items():
        monkeypatch.setattr(filters, name, size)
    for name, size in dict(FEW=16, LISTING=8, ROW_BLOCK=512).items():
        monkeypatch.setattr(filtered_draw, name, size)
    monkeypatch.setattr(sampling, "_BLOCK", 256)


def some(name: str, vocab: int, device: torch.device) -> list[dict]:
    """All kinds of rows on a GPU; in the slow interpreter a few, which differ by the kind of logits."""
    if device == GPU:
        return KINDS
    rng = np.random.default_rng(list(name.encode()))
    return [KINDS[i] for i in rng.choice(len(KINDS), 4 if vocab > 1000 else 1, replace=False)]


@pytest.mark.parametrize(("device", "dtype", "vocab"), VOCABS)
@pytest.mark.parametrize("name", LOGITS)
def test_any_mix_of_rows(device: torch.device, dtype: torch.dtype, vocab: int, name: str) -> None:
    kinds = some(f"{name} {vocab} {dtype}", vocab, device)
    pair = Pair(kinds, vocab, device)
    order = np.random.default_rng(1).permutation(len(kinds)).astype(np.int32)
    logits = normal(len(kinds), vocab, device, dtype)
    for line in logits:
        LOGITS[name](line)
    before = logits.clone()
    got, wanted = pair.choose(logits, order).tolist(), pair.choose(logits, order, plain=True).tolist()
    assert torch.equal(before.view(torch.uint8), logits.view(torch.uint8))
    assert got == wanted, [(g, w, kinds[s]) for g, w, s in zip(got, wanted, order) if g != w]


@pytest.mark.parametrize(("device", "dtype", "vocab"), LARGE)
@pytest.mark.parametrize(
    "kinds", [KINDS[:1], KINDS[1:2], KINDS[2:3], [KINDS[0], KINDS[1], KINDS[10], KINDS[11]]]
)
def test_large_batches(device: torch.device, dtype: torch.dtype, vocab: int, kinds: list[dict]) -> None:
    """Many seeds of a few kinds of rows; unfiltered rows also without the launches for filters."""
    rows = 4 if device == CPU else 256
    pair = Pair((kinds * rows)[:rows], vocab, device)
    order = np.random.default_rng(2).permutation(rows).astype(np.int32)
    logits = 3 * normal(rows, vocab, device, dtype)
    got, wanted = pair.choose(logits, order), pair.choose(logits, order, plain=True)
    # float32 noise and mass differ in their last bits, so two scores that are that close may swap
    assert (got != wanted).sum() <= rows // 100
    plain = [i for i, slot in enumerate(order) if pair.kinds[slot] in KINDS[:2]]
    assert torch.equal(pair.choose(logits, order, filtered=False)[plain], got[plain])


@pytest.mark.parametrize(("device", "dtype", "vocab"), LARGE)
def test_a_token_does_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row gets the same token alone and in a batch so large that a program handles several blocks."""
    rows, alone = (4, 4) if device == CPU else (256, 24)
    kinds = [KINDS[i] for i in (2, 10, 1, 6, 0, 12)]
    pair = Pair((kinds * rows)[:rows], vocab, device)
    logits = normal(rows, vocab, device, dtype)
    order = np.arange(rows, dtype=np.int32)
    wanted = torch.cat([pair.choose(logits[i : i + 1], order[i : i + 1]) for i in range(alone)])
    for programs in (2 * rows,) if device == CPU else (1, 20 * rows):
        monkeypatch.setattr(sampling, "_SCANNING", 1)
        monkeypatch.setattr(sampling, "_COLLECTING", 1)
        pretend(monkeypatch, logits.device, sms=programs)
        assert torch.equal(pair.choose(logits, order)[:alone], wanted)


def test_more_rows_than_scratch_are_refused() -> None:
    scratch = sampling.Scratch.empty(2, 100, CPU)
    table = torch.zeros(3, len(sampling.COLUMNS), dtype=torch.int64)
    ints = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 rows"):
        sampling.choose(torch.zeros(3, 100), torch.arange(3), table, ints, scratch, ints)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=on_gpu) for dtype in DTYPES])
@pytest.mark.parametrize("kind", [dict(), dict(top_k=50), dict(top_p=0.9), dict(top_k=9000), dict(min_p=0.1)])
def test_draws_have_the_probabilities(dtype: torch.dtype, kind: dict) -> None:
    """The frequencies of draws, in buckets of ids, match the mass of the tokens that plain torch keeps."""
    rows, vocab, positions, buckets = 1024, 32768, 16, 64
    pair = Pair([kind] * rows, vocab, GPU)
    logits = normal(1, vocab, GPU, dtype)
    x = logits.double()[0]
    keep = torch.ones_like(x, dtype=torch.bool)
    if top_k := kind.get("top_k"):
        keep &= x >= x.topk(top_k).values[-1]
    if min_p := kind.get("min_p"):
        keep &= x >= x.max() + math.log(min_p)
    if top_p := kind.get("top_p"):
        ordered, ids = x.softmax(0).sort(descending=True)
        keep &= x >= x[ids[(ordered.cumsum(0) < top_p - 1e-6).sum()]]
    prob = torch.where(keep, x.exp(), 0)
    prob /= prob.sum()
    counts = torch.zeros(vocab, dtype=torch.int64, device=GPU)
    order = np.arange(rows, dtype=np.int32)
    for position in range(positions):
        pair.columns.num_tokens.fill_(position)
        counts += pair.choose(logits.expand(rows, -1), order).long().bincount(minlength=vocab)
    assert not counts[~keep].any()
    wanted = prob.view(buckets, -1).sum(1) * rows * positions
    live = wanted > 5
    chi2 = float(((counts.view(buckets, -1).sum(1) - wanted)[live] ** 2 / wanted[live]).sum())
    assert abs(chi2 - int(live.sum())) < 5 * math.sqrt(2 * int(live.sum()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_captured_choice_serves_any_requests() -> None:
    """A replay follows changes of parameters, slots, positions and logits on the device."""
    rows, vocab = 32, 50257
    pair = Pair((KINDS * rows)[:rows], vocab, GPU)
    logits, slots = normal(rows, vocab, GPU, torch.bfloat16), torch.arange(rows, device=GPU)
    tokens = torch.zeros(rows, dtype=torch.int32, device=GPU)
    pair.sampler.choose(logits, slots, tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair.sampler.choose(logits, slots, tokens)
    rng = np.random.default_rng(4)
    for turn in range(4):
        logits.copy_((1 + 2 * turn) * normal(rows, vocab, GPU, torch.bfloat16, seed=turn))
        order = rng.permutation(rows).astype(np.int32)
        slots.copy_(torch.from_numpy(order))
        pair.columns.num_tokens.add_(1)
        for slot in range(0, rows, 2):
            params = SamplingParams(**KINDS[rng.integers(len(KINDS))])
            pair.sampler.admit(slot, EngineRequest("r", [1], params, seed=turn * rows + slot))
        pair.sampler.flush()
        graph.replay()
        assert torch.equal(tokens, pair.choose(logits, order))
        assert (tokens != pair.choose(logits, order, plain=True)).sum() <= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads what the interpreter computes")
def test_noise_near_its_ends() -> None:
    """log(1 - u) keeps its relative precision for the smallest and the largest u."""
    import triton
    import triton.language as tl

    @triton.jit
    def of_array(u, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(out + at, row.log1p_of_minus(tl.load(u + at)))

    u = torch.tensor([2.0**-32, 1e-8, 1e-7, 1e-3, 0.1249, 0.1251, 0.5, 1 - 2.0**-24])
    out = torch.empty_like(u)
    of_array[(1,)](u, out, SIZE=8)
    torch.testing.assert_close(out.double(), torch.log1p(-u.double()), rtol=5e-7, atol=0)


# ---------------------------------------------------------------------------------------- penalties


@pytest.mark.parametrize(
    ("device", "slots", "length", "vocab"),
    [
        pytest.param(CPU, 7, 50, 40, marks=interpreted),
        pytest.param(CPU, 3, 9, 1, marks=interpreted),
        pytest.param(GPU, 300, 5000, 151936, marks=on_gpu),
        pytest.param(GPU, 40, 3000, 11, marks=on_gpu),
    ],
)
def test_penalties(device: torch.device, slots: int, length: int, vocab: int) -> None:
    """Penalties equal those of plain torch bit for bit, also for ids beyond the vocabulary and for reused slots."""
    rng = np.random.default_rng(8)
    columns = Columns(slots, device)
    drawn = rng.integers(0, vocab + 2, (slots, length), dtype=np.int32)
    drawn[:, ::3] %= 5
    counts = rng.integers(1, length + 1, slots).astype(np.int32)
    prompts = np.minimum(rng.integers(1, length, slots), counts).astype(np.int32)
    columns.tokens, columns.num_tokens, columns.prompt_len = (
        torch.from_numpy(array).to(device) for array in (drawn, counts, prompts)
    )
    penalties = Penalties(columns, vocab, slots, device)
    with_kernel = penalties.kernel_form(vocab)
    for turn in range(2):
        for slot in range(turn, slots, 1 + turn):
            values = {
                "repetition_penalty": float(rng.choice([1.0, 0.7, 1.3])),
                "presence_penalty": float(rng.choice([0.0, 0.5])),
                "frequency_penalty": float(rng.choice([0.0, -0.3])),
            }
            penalties.add(slot, EngineRequest("r", [1], SamplingParams(**values)))
        penalties.flush()
        order = rng.permutation(slots).astype(np.int32)
        on_device = torch.from_numpy(order).to(device, torch.int64)
        logits = normal(slots, vocab, device, torch.float32, seed=turn)
        wanted = logits.clone()
        rows = LogitRows(order, on_device, columns.num_tokens[on_device])
        with_kernel(logits, rows)
        penalties.penalise_plain(wanted, rows)
        assert torch.equal(logits, wanted)
