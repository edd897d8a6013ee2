"""The sampler against a naive implementation: one row at a time, sorted, in numpy and float64.

`expected_token` implements the rules in the simplest form, including the noise, which is computed here from the
documented formula in uint32. Most tests run on each available device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.sampling import filters as row_filters
from quire.sampling.filters import FilterFlags
from quire.sampling.masks import unpack
from quire.sampling.noise import gumbel, noise_bits, row_keys
from quire.sampling.options import check_claims
from quire.sampling.sampler import Sampler
from quire.types import NO_TOKEN, NOT_FINITE, EngineRequest, GrammarSpec, SamplingParams, TokenMasks
from quire.types.sampling_params import FIELD_OWNERS, check_owners

torch.set_num_threads(1)

VOCAB = 331
SLOTS = 13
LENGTH = 48
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
    ),
]


@dataclass
class Columns:
    tokens: Tensor
    num_tokens: Tensor
    prompt_len: Tensor


class Bench:
    """A sampler over random token columns, and the requests in its slots."""

    def __init__(self, device: str = "cpu", seed: int = 0, vocab: int = VOCAB, slots: int = SLOTS) -> None:
        rng = np.random.default_rng(seed)
        self.device = torch.device(device)
        tokens = rng.integers(0, vocab, (slots, LENGTH), dtype=np.int32)
        tokens[:, ::3] %= 7  # repetitions
        num_tokens = rng.integers(2, LENGTH + 1, slots).astype(np.int32)
        prompt_len = np.minimum(rng.integers(1, LENGTH, slots), num_tokens).astype(np.int32)
        self.columns = Columns(
            *(torch.from_numpy(a).to(self.device) for a in (tokens, num_tokens, prompt_len))
        )
        self.sampler = Sampler(self.columns, vocab, slots, self.device)
        self.requests: dict[int, EngineRequest] = {}

    def known(self, slot: int) -> tuple[list[int], int]:
        count = int(self.columns.num_tokens[slot])
        return self.columns.tokens[slot, :count].tolist(), int(self.columns.prompt_len[slot])

    def write(self, slot: int, tokens: list[int], prompt_len: int) -> None:
        self.columns.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.columns.num_tokens[slot] = len(tokens)
        self.columns.prompt_len[slot] = prompt_len

    def admit(self, slot: int, request: EngineRequest) -> None:
        self.requests[slot] = request
        self.sampler.admit(slot, request)
        self.sampler.flush()

    def sample(self, logits: Tensor, slots: list[int], masks: TokenMasks | None = None):
        on_host = np.array(slots, dtype=np.int32)
        on_device = torch.tensor(slots, dtype=torch.int64, device=self.device)
        logits = logits.to(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            return self.sampler.sample(logits, on_host, on_device, masks)
        finally:
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    def tokens(self, logits: Tensor, slots: list[int], masks: TokenMasks | None = None) -> list[int]:
        return self.sample(logits, slots, masks).tokens.tolist()


def request(params: SamplingParams | None = None, **more) -> EngineRequest:
    return EngineRequest("r", [1], params or SamplingParams(temperature=0), **more)


def logits_of(rng: np.random.Generator, rows: int, vocab: int = VOCAB, dtype=torch.float32) -> Tensor:
    return torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32)).to(dtype)


# ------------------------------------------------------------------------------------ the reference


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def expected_bits(seed: int, position: int, vocab: int) -> np.ndarray:
    low, high = np.array([seed], np.int64).view(np.uint32)
    at = np.array([position], np.uint32)
    keys = [mix(mix(mix(np.array([low ^ np.uint32(c)])) ^ high) ^ at) for c in (0x9E3779B9, 0x3C6EF372)]
    return mix(mix(np.arange(vocab, dtype=np.uint32) ^ keys[0]) ^ keys[1])


def expected_noise(seed: int, position: int, vocab: int) -> np.ndarray:
    u = (expected_bits(seed, position, vocab) & np.uint32(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)
    return -np.log(-np.log1p(-np.minimum(u, 2**31 - 128).astype(np.float64) / 2**31))


def processed(x: np.ndarray, req: EngineRequest, known: list[int], prompt_len: int) -> np.ndarray:
    params, x, output = req.params, x.astype(np.float64), known[prompt_len:]
    if params.allowed_token_ids is not None:
        x = np.array([v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(x)])
    for word in req.bad_words_ids:
        if len(word) == 1 or known[-(len(word) - 1) :] == word[:-1]:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        x[[*req.stop_ids, *req.eos_ids]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(known):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def survivors(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the tokens that the filters keep, bool [vocab]; `x` is already divided by the temperature."""
    keep = x > -math.inf
    if not keep.any():
        return keep
    prob = np.exp(x - x.max())
    if min_p:
        keep &= prob >= min_p * (1 - 1e-7)
    if 0 < top_k < keep.sum():
        keep &= x >= np.sort(x[keep])[-top_k]
    if top_p < 1:
        order = np.argsort(-np.where(keep, prob, 0), kind="stable")
        mass = np.cumsum(np.where(keep, prob, 0)[order])
        last = order[np.searchsorted(mass, (top_p - 1e-6) * mass[-1])]
        keep &= x >= x[last]
    return keep


def expected_token(x: np.ndarray, req: EngineRequest, known: list[int], prompt_len: int) -> int:
    x = processed(x, req, known, prompt_len)
    params = req.params
    if params.greedy:
        return int(x.argmax())
    x = x / params.temperature
    keep = survivors(x, params.top_k, params.top_p, params.min_p)
    return int(np.where(keep, x + expected_noise(req.seed, len(known), len(x)), -math.inf).argmax())


def random_request(rng: np.random.Generator, known: list[int]) -> EngineRequest:
    def maybe(value, otherwise, chance=0.35):
        return value if rng.random() < chance else otherwise

    def ids(most: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(1, most)).tolist()

    params = SamplingParams(
        temperature=maybe(0.0, float(rng.uniform(0.2, 2)), 0.2),
        top_k=maybe(int(rng.integers(1, VOCAB + 40)), 0),
        top_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        min_p=maybe(float(rng.uniform(0.001, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        min_tokens=maybe(int(rng.integers(1, 16)), 0),
        logit_bias=maybe({t: float(rng.uniform(-9, 9)) for t in ids(6)}, None),
        allowed_token_ids=maybe(ids(60), None, 0.2),
        logprobs=maybe(int(rng.integers(0, 6)), None),
    )
    words = [ids(4) for _ in range(4)] + [known[-n:] + ids(2) for n in (1, 2, 3)]
    return EngineRequest(
        "r",
        [1],
        params,
        stop_ids=ids(60),
        eos_ids=ids(3),
        bad_words_ids=maybe(words, []),
        seed=int(rng.integers(-(2**63), 2**63)),
    )


# ---------------------------------------------------------------------------------- whole sampler


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_the_reference_in_any_mix(device: str, dtype: torch.dtype) -> None:
    """Random parameters in random batches over reused slots give the tokens of the naive implementation."""
    rng = np.random.default_rng(11)
    bench = Bench(device)
    for turn in range(60):
        for slot in rng.choice(SLOTS, 5 if turn else SLOTS, replace=False).tolist():
            bench.admit(slot, random_request(rng, bench.known(slot)[0]))
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist()
        logits = logits_of(rng, len(slots), dtype=dtype)
        before = logits.clone()
        got = bench.tokens(logits, slots)
        assert torch.equal(before, logits)
        want = [
            expected_token(logits[i].float().numpy(), bench.requests[s], *bench.known(s))
            for i, s in enumerate(slots)
        ]
        assert got == want, [bench.requests[s].params for g, w, s in zip(got, want, slots) if g != w]


def test_nothing_asks_the_device_for_a_value() -> None:
    """Tensors on the meta device have no values, so anything that would wait for a value raises."""
    rng = np.random.default_rng(1)
    device = torch.device("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(2, device=device).nonzero()
    zeros = [
        torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((SLOTS, LENGTH), SLOTS, SLOTS)
    ]
    sampler = Sampler(Columns(*zeros), VOCAB, SLOTS, device)
    for turn in range(30):
        for slot in range(SLOTS):
            sampler.admit(slot, random_request(rng, [1, 2, 3, 4]))
        sampler.flush()
        slots = rng.permutation(SLOTS)[: 1 + turn % SLOTS].astype(np.int32)
        logits = torch.zeros(len(slots), VOCAB, dtype=torch.bfloat16, device=device)
        rows = np.arange(0, len(slots), 2)
        masks = TokenMasks(rows, np.zeros((len(rows), 11), np.int32)) if turn % 2 else None
        out = sampler.sample(logits, slots, torch.from_numpy(slots.astype(np.int64)).to(device), masks)
        assert out.tokens.shape == (len(slots),) and out.tokens.dtype == torch.int32


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    rng = np.random.default_rng(5)
    bench = Bench(device, vocab=5000)
    for slot in range(SLOTS):
        params = SamplingParams(
            temperature=[0.0, 0.7, 1.0][slot % 3],
            top_k=[0, 40, 1500][slot % 3 - 1],
            top_p=[1.0, 0.9][slot % 2],
        )
        bench.admit(slot, request(params, seed=slot))
    slots = list(range(SLOTS))
    logits = logits_of(rng, SLOTS, 5000, torch.bfloat16)
    together = bench.tokens(logits, slots)
    assert together == [bench.tokens(logits[i : i + 1], [i])[0] for i in slots]
    order = rng.permutation(SLOTS).tolist()
    assert [together[i] for i in order] == bench.tokens(logits[order], order)


def test_greedy_rows_are_exact_and_take_the_lowest_of_equals() -> None:
    bench = Bench()
    bench.admit(0, request())
    bench.admit(1, request(SamplingParams(temperature=1.0, top_k=3), seed=1))
    bench.admit(2, request(SamplingParams(temperature=0, presence_penalty=0.5)))
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    logits[:, [20, 30]] = 4.0
    assert bench.tokens(logits[:1], [0]) == [20]
    assert bench.tokens(logits, [0, 1, 2])[0] == 20


def test_a_reused_slot_keeps_nothing() -> None:
    bench = Bench()
    heavy = SamplingParams(
        temperature=2.0, top_k=2, top_p=0.1, min_p=0.5, repetition_penalty=2.0, presence_penalty=2.0, min_tokens=16,
        logit_bias={5: 100.0}, allowed_token_ids=[5, 6], logprobs=3, frequency_penalty=1.0,
    )  # fmt: skip
    bench.admit(4, request(heavy, stop_ids=[9], bad_words_ids=[[9], [5]], seed=3))
    bench.admit(4, request())
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1.0
    out = bench.sample(logits, [4])
    assert out.tokens.tolist() == [9] and out.logprobs is None
    bench.admit(4, request(SamplingParams(), seed=8))
    assert bench.tokens(logits, [4]) == [
        expected_token(logits[0].numpy(), bench.requests[4], *bench.known(4))
    ]


def test_a_reused_slot_of_the_same_batch_loses_its_lists() -> None:
    bench = Bench()
    biased = SamplingParams(temperature=0, logit_bias={5: 9.0})
    for slot in (0, 1):
        bench.admit(slot, request(biased))
    assert bench.tokens(torch.zeros(2, VOCAB), [0, 1]) == [5, 5]
    bench.admit(0, request())
    assert bench.tokens(torch.zeros(2, VOCAB), [0, 1]) == [0, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_host_work_are_chosen_from_device_columns_alone(device: str) -> None:
    bench = Bench(device)
    kinds = [
        dict(temperature=0),
        dict(),
        dict(top_k=5),
        dict(min_p=0.2),
        dict(presence_penalty=1.0),
        dict(logprobs=0),
    ]
    for slot, kind in enumerate(kinds):
        bench.admit(slot, request(SamplingParams(**kind), seed=slot))
    slots = np.arange(len(kinds))
    assert [bench.sampler.needs_host_work(slots[i : i + 1]) for i in slots] == [False] * 4 + [True] * 2
    assert [bench.sampler.has_filters(slots[i : i + 1]) for i in slots] == [False] * 2 + [True] * 2 + [
        False
    ] * 2
    assert bench.sampler.needs_host_work(slots) and bench.sampler.has_filters(slots)
    logits = logits_of(np.random.default_rng(9), 4).to(bench.device)
    tokens = torch.full((4,), -1, dtype=torch.int32, device=bench.device)
    bench.sampler.choose(logits, torch.arange(4, device=bench.device), tokens)
    assert tokens.tolist() == bench.tokens(logits, [0, 1, 2, 3])
    bench.admit(2, request(SamplingParams(temperature=0, top_k=5)))  # greedy, so the filter has no effect
    assert not bench.sampler.has_filters(slots[:3])


# For each field of the sampler: parameters that change the output, and fields of the request that they need.
CHANGES: dict[str, tuple[dict, dict]] = {
    "temperature": ({"temperature": 0.0}, {}),
    "top_k": ({"top_k": 2}, {}),
    "top_p": ({"top_p": 0.01}, {}),
    "min_p": ({"min_p": 0.9}, {}),
    "repetition_penalty": ({"repetition_penalty": 100.0}, {}),
    "presence_penalty": ({"presence_penalty": 2.0}, {}),
    "frequency_penalty": ({"frequency_penalty": 2.0}, {}),
    "seed": ({}, {"seed": 2**40 + 5}),
    "min_tokens": ({"min_tokens": 16}, {"stop_ids": list(range(VOCAB // 2))}),
    "logit_bias": ({"logit_bias": {7: 100.0}}, {}),
    "allowed_token_ids": ({"allowed_token_ids": [7, 9]}, {}),
    "bad_words": ({}, {"bad_words_ids": [[token] for token in range(VOCAB // 2)]}),
    "logprobs": ({"logprobs": 1}, {}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FIELD_OWNERS["sampler"])
def test_every_field_of_the_sampler_changes_its_output(name: str, device: str) -> None:
    """A new field of the sampler needs an entry in `CHANGES`. `choose`, which graphs capture, must honour it too."""
    params, parts = CHANGES[name]
    bench, rows = Bench(device), list(range(SLOTS))
    for slot in rows:  # the same tokens in all slots; the last ten are output
        bench.write(slot, [token % 9 for token in range(40)], prompt_len=30)
    logits = logits_of(np.random.default_rng(3), 1).div(3).repeat(SLOTS, 1).to(bench.device)
    logits[:, :9] += 4.0  # the known tokens are likely
    outputs = []
    for more, extra in (({}, {}), (params, parts)):
        for slot in rows:
            seeded = {"seed": slot, **extra} if "seed" not in extra else {"seed": extra["seed"] + slot}
            bench.admit(slot, request(SamplingParams(**more), **seeded))
        outputs.append(bench.sample(logits, rows))
        if not bench.sampler.needs_host_work(np.array(rows)):
            tokens = torch.empty_like(outputs[-1].tokens)
            slots = torch.arange(SLOTS, device=bench.device)
            bench.sampler.choose(logits, slots, tokens, bench.sampler.has_filters(np.array(rows)))
            assert torch.equal(tokens, outputs[-1].tokens)
    default, changed = outputs
    assert (default.logprobs is None) != (changed.logprobs is None) or not torch.equal(
        default.tokens, changed.tokens
    )


def test_a_field_needs_exactly_one_owner() -> None:
    names = [name for listed in FIELD_OWNERS.values() for name in listed]
    check_owners(names)
    for wrong in ([*names, "new"], names[1:], [*names, names[0]]):
        with pytest.raises(TypeError, match="exactly one owner"):
            check_owners(wrong)
    owned = FIELD_OWNERS["sampler"]
    check_claims(owned)
    for wrong in ([*owned, "stop"], owned[1:], [*owned, owned[0]]):
        with pytest.raises(TypeError, match="exactly one slot column or logits processor"):
            check_claims(wrong)


def test_several_admissions_before_one_flush() -> None:
    bench = Bench()
    for slot in (3, 1, 3, 2):
        bench.requests[slot] = request(
            SamplingParams(logit_bias={10 * slot: 200.0 / 2}, temperature=0.5), seed=slot
        )
        bench.sampler.admit(slot, bench.requests[slot])
    bench.sampler.flush()
    assert bench.tokens(torch.zeros(3, VOCAB), [1, 2, 3]) == [10, 20, 30]


@pytest.mark.parametrize("device", DEVICES)
def test_broken_logits_are_told_apart_from_tokens(device: str) -> None:
    bench = Bench(device)
    kinds = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5),
             SamplingParams(min_p=0.1), SamplingParams(top_k=300, top_p=0.9, min_p=0.1, temperature=1e-4),
             SamplingParams(logprobs=2)]  # fmt: skip
    for slot, params in enumerate(kinds):
        bench.admit(slot, request(params, seed=slot))
    slots = list(range(len(kinds)))
    nothing = torch.full((len(kinds), VOCAB), -math.inf)
    assert bench.tokens(nothing, slots) == [NO_TOKEN] * len(kinds)
    negative_nan = torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (math.nan, negative_nan, math.inf):
            logits = torch.zeros(len(kinds), VOCAB, dtype=dtype)
            assert bench.tokens(torch.full_like(logits, value), slots) == [NOT_FINITE] * len(kinds)
            for row in slots:  # one number of one row, and no other row is changed
                logits = torch.randn(len(kinds), VOCAB).to(dtype)
                want = bench.tokens(logits, slots)
                assert all(0 <= t < VOCAB for t in want)
                logits[row, 7 * row] = value
                want[row] = NOT_FINITE
                assert bench.tokens(logits, slots) == want
            logits[:] = -math.inf  # as masks leave it
            logits[:, 5] = 1e-4
            assert bench.tokens(logits, slots) == [5] * len(kinds)


def test_a_logit_that_the_temperature_makes_infinite_is_finite() -> None:
    bench = Bench()
    bench.admit(0, request(SamplingParams(temperature=1e-4)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 3e38
    assert bench.tokens(logits, [0]) == [9]


def test_masks_that_leave_no_token_are_told_apart() -> None:
    bench = Bench()
    bench.write(0, [1], prompt_len=1)
    bench.admit(0, request(SamplingParams(allowed_token_ids=[8], min_tokens=2), stop_ids=[8], eos_ids=[8]))
    bench.admit(1, request(SamplingParams(allowed_token_ids=[8])))
    assert bench.tokens(torch.zeros(2, VOCAB), [0, 1]) == [NO_TOKEN, 8]


@pytest.mark.parametrize("device", DEVICES)
def test_ties_at_the_top_are_greedy_where_one_of_them_is_enough(device: str) -> None:
    kinds = [SamplingParams(top_p=1e-9), SamplingParams(top_p=0.2), SamplingParams(top_k=1),
             SamplingParams(top_k=3, top_p=0.2), SamplingParams(top_p=1e-9, min_p=0.5),
             SamplingParams(top_k=VOCAB - 1, top_p=1e-9)]  # fmt: skip
    for seed in range(20):
        bench = Bench(device)
        for slot, params in enumerate(kinds):
            bench.admit(slot, request(params, seed=seed))
        for ties in ([3, 60], [VOCAB - 1, 40, 41]):
            logits = torch.full((len(kinds), VOCAB), -30.0)
            logits[:, ties] = 1.0
            assert bench.tokens(logits, list(range(len(kinds)))) == [min(ties)] * len(kinds)
        assert bench.tokens(torch.zeros(2, VOCAB), [0, 5]) == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_ties_at_the_top_are_drawn_where_all_are_asked_for(device: str) -> None:
    found = set()
    for seed in range(60):
        bench = Bench(device)
        bench.admit(0, request(SamplingParams(top_p=0.7), seed=seed))
        logits = torch.full((1, VOCAB), -30.0)
        logits[:, [3, 60]] = 1.0
        found |= set(bench.tokens(logits, [0]))
    assert found == {3, 60}


# -------------------------------------------------------------------------------------- processors


def test_min_tokens_forbids_stopping_until_the_output_is_long_enough() -> None:
    bench = Bench()
    bench.admit(0, request(SamplingParams(temperature=0, min_tokens=3), stop_ids=[8], eos_ids=[9]))
    logits = torch.zeros(1, VOCAB)
    logits[0, [8, 9, 10]] = torch.tensor([3.0, 2.0, 1.0])
    for output in range(5):
        bench.write(0, [4] * (6 + output), 6)
        assert bench.tokens(logits, [0]) == ([10] if output < 3 else [8])


def test_bad_words() -> None:
    bench = Bench()
    bench.admit(0, request(bad_words_ids=[[11], [2, 3, 12], [2, 3, 4, 5, 12], [7, 7, 7, 13]]))
    logits = torch.zeros(1, VOCAB)
    logits[0, [11, 12, 13]] = torch.tensor([4.0, 3.0, 2.0])
    for tokens, prompt_len, want in [
        ([1, 2, 3], 2, 13),  # the prefix crosses from the prompt into the output
        ([1, 3, 2], 2, 12),
        ([3], 1, 12),  # shorter than the word
        ([2, 3, 4, 5], 4, 13),
        ([7, 7], 1, 12),
    ]:
        bench.write(0, tokens, prompt_len)
        assert bench.tokens(logits, [0]) == [want], tokens
    logits[0, 12] = 0.0
    for count, want in [(1, 13), (2, 13), (3, 0), (4, 0)]:
        bench.write(0, [7] * count, 1)
        assert bench.tokens(logits, [0]) == [want]


def test_penalties_ignore_what_lies_beyond_the_known_tokens() -> None:
    bench = Bench()
    bench.columns.tokens[0] = 9
    bench.write(0, [1, 2, 2, 3], 2)
    bench.admit(0, request(SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)))
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 1, 2]] = torch.tensor([2.0, 3.0, 5.0])
    assert bench.tokens(logits, [0]) == [1]  # 1 is prompt only; 2 was said once in the output
    bench.admit(0, request(SamplingParams(temperature=0, repetition_penalty=2.0)))
    assert bench.tokens(logits, [0]) == [2]  # 5 / 2 against 2 and 3 / 2


def test_token_ids_outside_the_vocabulary_are_passed_over() -> None:
    bench = Bench()
    params = SamplingParams(temperature=0, logit_bias={VOCAB: 50.0, 3: 1.0}, allowed_token_ids=[VOCAB + 1, 3])
    bench.admit(0, request(params, bad_words_ids=[[VOCAB]]))
    assert bench.tokens(torch.zeros(1, VOCAB), [0]) == [3]


@pytest.mark.parametrize("device", DEVICES)
def test_masks(device: str) -> None:
    rng = np.random.default_rng(2)
    bench = Bench(device)
    allowed = rng.random((2, VOCAB)) < 0.05
    bits = packed(allowed)
    assert torch.equal(unpack(torch.from_numpy(bits), VOCAB) == 0, torch.from_numpy(allowed))
    bench.admit(0, request())
    bench.admit(1, request(SamplingParams(top_p=0.9), seed=4))
    logits = logits_of(rng, 2)
    masked = np.where(allowed, logits.numpy(), -math.inf)
    got = bench.tokens(logits, [0, 1], TokenMasks(np.array([0, 1]), bits))
    expected = [expected_token(masked[s], bench.requests[s], *bench.known(s)) for s in (0, 1)]
    free = bench.tokens(logits, [0, 1])
    assert got == expected and got[1] != free[1]
    everything = TokenMasks(np.array([0, 1]), np.full_like(bits, -1))
    assert bench.tokens(logits, [0, 1], everything) == free
    one = TokenMasks(np.array([1]), bits[1:])
    assert bench.tokens(logits, [0, 1], one) == [free[0], expected[1]]


def test_a_grammar_needs_the_host() -> None:
    """A step with such a row is therefore not sampled in a graph."""
    bench = Bench("cpu")
    bench.admit(0, request(grammar=GrammarSpec("regex", "a")))
    bench.admit(1, request())
    assert bench.sampler.needs_host_work(np.array([1, 0])) and not bench.sampler.needs_host_work(
        np.array([1])
    )
    bench.admit(0, request())
    assert not bench.sampler.needs_host_work(np.array([0, 1]))


def test_min_tokens_is_left_to_the_grammar() -> None:
    bench = Bench("cpu")
    params = SamplingParams(temperature=0, min_tokens=5)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    bench.write(0, [1, 2], prompt_len=2)
    for grammar, token in ((None, 0), (GrammarSpec("regex", "a"), 7)):
        bench.admit(0, request(params, eos_ids=[7], grammar=grammar))
        assert bench.tokens(logits, [0]) == [token]


def packed(allowed: np.ndarray) -> np.ndarray:
    """Pack bool [rows, VOCAB] into int32 [rows, ceil(VOCAB / 32)]."""
    bits = np.zeros((len(allowed), math.ceil(VOCAB / 32) * 32), dtype=np.uint8)
    bits[:, :VOCAB] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


# ---------------------------------------------------------------------------------------- filters


def kept_rows(x: Tensor, filters: list[tuple[int, float, float]]) -> list[list[int]]:
    """Return the tokens that each row keeps under its (top_k, top_p, min_p)."""
    bench = Bench(vocab=x.shape[1], slots=len(filters))
    for slot, (top_k, top_p, min_p) in enumerate(filters):
        bench.admit(slot, request(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)))
    top_k, top_p, min_p = (np.array(column) for column in zip(*filters))
    columns = bench.sampler.table.gather(torch.arange(len(filters)))
    keep = x >= row_filters.find_cutoffs(x, FilterFlags(top_k, top_p < 1, min_p > 0), columns).cutoff
    return [row.nonzero().flatten().tolist() for row in keep]


def kept(x: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    return kept_rows(x, [(top_k, top_p, min_p)])[0]


def test_top_p_of_one_row_leaves_the_tail_of_another() -> None:
    x = torch.cat((torch.tensor([0.0]), torch.full((2999,), -60.0))).repeat(4, 1)
    x[:, 1:3] = torch.tensor([-50.0, -55.0])  # with a mass that rounds to 0
    small = kept_rows(x[:2], [(3, 1.0, 0.0), (3, 0.5, 0.0)])
    assert small == [[0, 1, 2], [0]]
    assert kept_rows(x[:2], [(2000, 1.0, 0.0), (0, 0.5, 0.0)]) == [list(range(3000)), [0]]
    assert kept_rows(x[:2], [(0, 1.0, 0.0), (0, 0.5, 0.0)]) == [list(range(3000)), [0]]


def test_search_tells_neighbouring_floats_apart() -> None:
    for sign in (1.0, -1.0):
        x = (sign * (1 + torch.arange(4096) * 2.0**-23)).unsqueeze(0)  # one unit in the last place apart
        best = x[0].argsort(descending=True)
        assert kept(x, top_k=1500) == sorted(best[:1500].tolist())
        assert abs(len(kept(x, top_p=0.5)) - 2048) <= 1


def test_filters_keep_equals_together() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept(x, top_k=1) == [1]
    assert kept(x, top_k=2) == [1, 2, 3, 4]
    assert kept(x, top_k=2, top_p=0.999999) == [1, 2, 3, 4]
    assert kept(x, top_p=1e-6) == [1]
    assert kept(torch.zeros(1, 10), top_p=0.3) == list(range(10))
    assert kept(torch.tensor([[0.0, -0.0, -1.0]]), top_k=1) == [0, 1]
    even = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert [len(kept(even, top_p=p)) for p in (0.4, 0.41, 0.69, 0.71, 0.9, 0.95)] == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_filters_agree_with_sorting(dtype: torch.dtype, spread: float) -> None:
    """The vocabulary is larger than the candidates, so the search runs; bfloat16 has many equal logits."""
    rng = np.random.default_rng(3)
    for _ in range(4):
        x = (logits_of(rng, 1, 4096) * spread).to(dtype).float()
        for top_k in (0, 1, 50, 1024, 1025, 4000, 9000):
            for top_p in (1.0, 0.2, 0.97):
                for min_p in (0.0, 0.02):
                    want = survivors(x[0].double().numpy(), top_k, top_p, min_p)
                    got = kept(x, top_k, top_p, min_p)
                    # float32 exp may put the last token of top_p on either side
                    assert len(set(got) ^ set(np.flatnonzero(want).tolist())) <= (
                        1 if dtype == torch.float32 else 0
                    )


# ------------------------------------------------------------------------------------------ noise


def test_noise_follows_the_documented_formula() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789012345):
        low, high = (
            torch.tensor([int(h)], dtype=torch.int32) for h in np.array([seed], np.int64).view(np.int32)
        )
        for position in (0, 1, 131071):
            k0, k1 = row_keys(low, high, torch.tensor([position], dtype=torch.int32))
            ids = torch.arange(1000, dtype=torch.int32)
            assert (
                noise_bits(k0, k1, ids).numpy().view(np.uint32).tolist()
                == expected_bits(seed, position, 1000).tolist()
            )
            np.testing.assert_allclose(
                gumbel(k0, k1, ids).numpy(), expected_noise(seed, position, 1000), rtol=1e-5, atol=1e-6
            )


def grid(seeds: int, positions: int, vocab: int) -> Tensor:
    """Return the noise as uniform numbers, float64 [seeds, positions, vocab]."""
    low = torch.arange(seeds, dtype=torch.int32).repeat_interleave(positions)
    at = torch.arange(positions, dtype=torch.int32).repeat(seeds)
    k0, k1 = row_keys(low, torch.zeros_like(low), at)
    noise = gumbel(k0.unsqueeze(1), k1.unsqueeze(1), torch.arange(vocab, dtype=torch.int32)).double()
    return torch.exp(-torch.exp(-noise)).view(seeds, positions, vocab)


def test_noise_is_uniform_and_independent_along_every_axis() -> None:
    u = grid(60, 60, 120)
    assert u.min() > 0 and u.max() <= 1
    counts = torch.histc(u, bins=256, min=0, max=1)
    expected = u.numel() / 256
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    for axis in range(3):
        for lag in (1, 2, 16):
            a, b = u.narrow(axis, 0, u.shape[axis] - lag), u.narrow(axis, lag, u.shape[axis] - lag)
            correlation = float(((a - 0.5) * (b - 0.5)).mean() * 12)
            assert abs(correlation) < 5 / math.sqrt(a.numel()), (axis, lag)
            pairs = torch.histc(
                (a * 16).floor() * 16 + (b * 16).floor().clamp(max=15), bins=256, min=0, max=256
            )
            chi2 = float(((pairs - a.numel() / 256) ** 2 / (a.numel() / 256)).sum())
            assert chi2 - 255 < 5 * math.sqrt(2 * 255), (axis, lag)


@pytest.mark.parametrize("axis", ["position", "seed"])
@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 12}, {"top_p": 0.8}, {"temperature": 1.7, "min_p": 0.05}],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_draws_have_the_probabilities(params: dict, axis: str) -> None:
    draws, vocab = 20_000, 40
    columns = Columns(*(torch.zeros(shape, dtype=torch.int32) for shape in ((draws, 1), draws, draws)))
    if axis == "position":
        columns.num_tokens = torch.arange(draws, dtype=torch.int32)
    sampler = Sampler(columns, vocab, draws, torch.device("cpu"))
    base = torch.from_numpy(np.random.default_rng(1).normal(0, 1.5, vocab).astype(np.float32))
    sampling = SamplingParams(**params)
    for slot in range(draws):
        sampler.admit(slot, request(sampling, seed=slot if axis == "seed" else 77))
    sampler.flush()
    index = np.arange(draws, dtype=np.int32)
    tokens = sampler.sample(base.expand(draws, -1), index, torch.arange(draws)).tokens
    x = base.double().numpy() / sampling.temperature
    prob = np.where(survivors(x, sampling.top_k, sampling.top_p, sampling.min_p), np.exp(x - x.max()), 0)
    prob /= prob.sum()
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert not counts[prob == 0].any()
    live = prob * draws > 5
    chi2 = ((counts - prob * draws)[live] ** 2 / (prob * draws)[live]).sum()
    assert chi2 - live.sum() < 5 * math.sqrt(2 * live.sum())


# --------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(device: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    bench = Bench(device)
    wanted = [2, None, 0, 5]
    for slot, k in enumerate(wanted):
        params = SamplingParams(
            temperature=1.5, logprobs=k, presence_penalty=1.0, logit_bias={3: 5.0}, top_k=20
        )
        bench.admit(slot, request(params, seed=slot))
    logits = logits_of(rng, 4, dtype=dtype)
    out = bench.sample(logits, [0, 1, 2, 3])
    ids, values, ranks = (t.cpu() for t in out.logprobs)
    assert ids.dtype == ranks.dtype == torch.int32 and values.dtype == torch.float32
    assert ids.shape == values.shape == (4, 6)
    reference = logits.double().log_softmax(1)
    for row, k in enumerate(wanted):
        if k is None:
            continue
        assert ids[row, 0] == out.tokens[row]
        for column in range(1 + k):
            assert values[row, column] == pytest.approx(float(reference[row, ids[row, column]]), abs=1e-4)
        top = reference[row].sort(descending=True).values[:k].float()
        torch.testing.assert_close(values[row, 1 : 1 + k], top, atol=1e-4, rtol=0)
        assert ranks[row] == 1 + (logits[row] > logits[row, ids[row, 0]]).sum()


def test_prompt_logprobs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(np.random.default_rng(6), 10)
    targets = torch.arange(10) * 3
    bench = Bench()
    whole = bench.sampler.prompt_logprobs(logits, targets, 4)
    monkeypatch.setattr("quire.sampling.logprobs._PIECE_ELEMENTS", 3 * VOCAB)
    for a, b in zip(whole, bench.sampler.prompt_logprobs(logits, targets, 4)):
        assert torch.equal(a, b)
    assert whole[0][:, 0].tolist() == targets.tolist()
    assert bench.sampler.prompt_logprobs(logits, targets, VOCAB + 9)[0].shape == (10, 1 + VOCAB)
