"""`KernelBatcher` against `TorchBatcher`: the same batches and the same slot columns."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.base import ForwardBatch
from quire.speculation.drafter import DraftRows
from quire.speculation.ngram import LONGEST, NgramDrafter
from quire.types import (
    REJECTED,
    EngineRequest,
    SamplingParams,
    SlotAdmission,
    StateLayout,
    StateTensor,
    StepPlan,
)
from quire.worker.memory.states import StateMemory
from quire.worker.staging import Staging
from quire.worker.state import SlotState
from quire.worker.step.batch import Batcher, BatchParts, DeviceStep
from quire.worker.step.kernel_batch import KernelBatcher
from quire.worker.step.step_shapes import StepShape
from quire.worker.step.torch_batch import TorchBatcher

pytest.importorskip("triton")
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]
SLOTS, MAX_LEN, BLOCK, MAX_BLOCKS = 7, 600, 4, 150
GROUP_OF = [0, 1, 2]  # one layer each
DRAFTS = 4


class NoAttention:
    name, capturable = "none", True
    forward_packed = None
    reads_shared = False
    plans_blocks = False

    def kv_shape(self, *sizes: int) -> tuple[int, ...]:
        return sizes

    def plan(self, batch: ForwardBatch) -> None:
        return None

    def forward(self, *args: Any) -> torch.Tensor:
        raise AssertionError("no layer calls it here")


class PatternDrafter:
    """Draft tokens from 0 to 2 that depend on slot and position."""

    def __init__(self, state: SlotState) -> None:
        self._state = state

    def follow(self, batch: ForwardBatch) -> None:
        pass

    def propose(self, rows: DraftRows) -> None:
        for slot, count in zip(rows.slots.tolist(), rows.counts.tolist()):
            known = int(self._state.num_tokens[slot])
            place = torch.arange(known, known + count, dtype=torch.int32)
            self._state.tokens[slot, known : known + count] = (slot + place * place) % 3


class Side:
    """Slot columns and one of the two batchers."""

    def __init__(self, kernels: bool, device: str, keeps_kv: bool) -> None:
        self.device = torch.device(device)
        self.state = SlotState(
            SLOTS, MAX_LEN, MAX_BLOCKS, len(GROUP_OF), keeps_kv=keeps_kv, device=self.device
        )
        self.state.clear(999)
        self.staging = Staging(self.device, 2)
        layout = StateLayout((StateTensor("window", (2, 3), "float32"),))
        self.states = StateMemory([layout], SLOTS, 2, self.device, DRAFTS)
        parts = BatchParts(
            self.state, NoAttention(), [], BLOCK, GROUP_OF, PatternDrafter(self.state), self.states
        )
        self.batcher: Batcher = TorchBatcher(parts)
        if kernels:
            self.batcher = KernelBatcher(
                parts, max_tokens=SLOTS * MAX_LEN, max_rows=SLOTS + 1, turns=3, device=self.device,
                max_drafts=DRAFTS,
            )  # fmt: skip

    def build(self, plan: StepPlan) -> DeviceStep:
        """Return the step of `plan` with its batch."""
        step = self.batcher.open(plan, self.staging)
        self.batcher.prepare(step)
        return step

    def build_padded(self, plan: StepPlan, rows: int, tokens: int, drafts: int = 0) -> DeviceStep:
        """Return a step of this shape with its batch, for the header of `plan`."""
        assert isinstance(self.batcher, KernelBatcher)
        shape = StepShape(rows, tokens, drafts=drafts)
        self.batcher.open(plan, self.staging, shape)
        step = self.batcher.padded(shape)
        self.batcher.prepare(step)
        return step

    def columns(self) -> list[torch.Tensor]:
        state = self.state
        columns = (
            state.tokens,
            state.num_tokens,
            state.prompt_len,
            state.num_computed,
            *state.block_tables,
            self.states.turn,
        )
        return [column.cpu() for column in columns]


def random_plan(rng: random.Random, step: int, known: dict[int, list[int]], drafts: int = 0) -> StepPlan:
    """Return a plan in which some slots get new owners and some run a chunk or one token.

    Args:
        known: [tokens, computed] by slot.
        drafts: most draft tokens of a row.
    """
    admissions = []
    for slot in range(SLOTS):
        if rng.random() < (0.2 if slot in known else 0.5):
            length, computed = rng.randint(1, 500), 0
            computed = rng.randrange(length) // BLOCK * BLOCK
            known[slot] = [length, computed]
            tokens = array("i", [rng.randrange(1000) for _ in range(length)])
            blocks = [rng.sample(range(900), MAX_BLOCKS) for _ in GROUP_OF]
            request = EngineRequest(f"{step}.{slot}", list(tokens), SamplingParams())
            admissions.append(SlotAdmission(slot, tokens, length, computed, blocks, request))
    fresh = {
        admit.slot for admit in admissions
    }  # a step gives new blocks to a slot or a new owner, never both
    rows = [slot for slot in rng.sample(range(SLOTS), SLOTS) if slot in known and rng.random() < 0.7]
    rows = [slot for slot in rows if known[slot][0] < MAX_LEN - 1 - drafts]
    counts, starts, samples, drafted = [], [], [], []
    single = rng.random() < 0.3
    for slot in rows:
        length, computed = known[slot]
        n = 1 if single else rng.choice((1, length - computed, rng.randint(1, length - computed)))
        starts.append(computed)
        samples.append(computed + n == length)
        drafted.append(rng.randint(0, drafts) if samples[-1] else 0)
        counts.append(n + drafted[-1])
        known[slot] = [length + samples[-1], computed + n]  # if the row has no drafts
    return StepPlan(
        step=step,
        slots=np.array(rows, np.int32),
        num_tokens=np.array(counts, np.int32),
        num_drafts=np.array(drafted, np.int32),
        starts=np.array(starts, np.int32),
        samples=np.array(samples, np.bool_),
        admissions=admissions,
        new_blocks=np.array(
            [
                (slot, rng.choice(GROUP_OF), 3, rng.randrange(900))
                for slot in rows
                if slot not in fresh and rng.random() < 0.2
            ],
            np.int32,
        ).reshape(-1, 4),
        total_tokens=sum(counts),
    )


def same(one: ForwardBatch, other: ForwardBatch) -> None:
    for name in (
        "input_ids",
        "positions",
        "kv_slots",
        "query_start",
        "seq_lens",
        "slots",
        "logit_index",
        "state_rows",
        "fresh",
    ):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()), name
    if one.state_targets is not None or other.state_targets is not None:
        assert torch.equal(one.state_targets, other.state_targets)
    for layer in GROUP_OF[1:]:
        mine, twin = one.for_layer(layer), other.for_layer(layer)
        assert torch.equal(mine.kv_slots.cpu(), twin.kv_slots.cpu()), f"kv_slots of group {layer}"
        assert not torch.equal(mine.kv_slots, one.kv_slots), "two groups write to the same places"


@pytest.mark.parametrize("device", DEVICES)
def test_steps_with_drafts_are_those_of_the_plain_twin(device: str) -> None:
    rng = random.Random(11)
    kernel, plain = Side(True, device, True), Side(False, device, True)
    known: dict[int, list[int]] = {}
    kept: list[int] = []
    for step in range(40):
        plan = random_plan(rng, step, known, DRAFTS if step % 4 else 0)
        logits = len(plan.slots) + int(plan.num_drafts.sum())
        sampled = torch.tensor(
            [rng.randrange(-1, 3) for _ in range(logits)], dtype=torch.int32, device=device
        )
        results = []
        for side in (kernel, plain):
            side.staging.begin()
            side.state.apply(plan, side.staging)
            if len(plan.slots):
                made = side.build(plan)
                results.append((made.batch, made.logit_rows, side.batcher.advance(made, sampled)))
        if results:
            (one, at_one, tokens_one), (other, at_other, tokens_other) = results
            same(one, other)
            assert np.array_equal(at_one.slots_host, at_other.slots_host)
            assert torch.equal(at_one.slots, at_other.slots) and torch.equal(at_one.lengths, at_other.lengths)
            if device == "cuda":
                torch.cuda.synchronize()
            drawn = torch.from_numpy(plan.samples)
            assert torch.equal(tokens_one[drawn], tokens_other[drawn].cpu())
            kept += (tokens_one[drawn] != REJECTED).sum(1).tolist()
        for a, b in zip(kernel.columns(), plain.columns()):
            assert torch.equal(a, b)
        for slot in known:
            known[slot] = [int(plain.state.num_tokens[slot]), int(plain.state.num_computed[slot])]
    assert {1, 2, 3} <= set(kept)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_changes_no_step_with_drafts(device: str) -> None:
    """A captured shape has more rows, tokens and draft tokens than the step."""
    rng = random.Random(6)
    side, exact = Side(True, device, True), Side(True, device, True)
    plan = random_plan(rng, 0, {}, DRAFTS - 1)
    while len(plan.slots) < 3 or plan.num_drafts.sum() < 3:
        plan = random_plan(rng, 0, {}, DRAFTS - 1)
    logits = len(plan.slots) + int(plan.num_drafts.sum())
    for which in (side, exact):
        which.staging.begin()
        which.state.apply(plan, which.staging)
    padded, total = SLOTS + 1, plan.total_tokens
    shaped, step = side.build_padded(plan, padded, total + 300, DRAFTS), exact.build(plan)
    batch, expected = shaped.batch, step.batch
    assert torch.equal(batch.logit_index[:logits], expected.logit_index) and len(batch.logit_index) > logits
    targets, rows = batch.state_targets, expected.state_targets
    assert torch.equal(targets[:total], rows) and (targets[total:] == -1).all() and (rows >= 0).any()
    slots, lengths = shaped.logit_rows.slots, shaped.logit_rows.lengths
    assert torch.equal(slots[:logits], step.logit_rows.slots)
    assert torch.equal(lengths[:logits], step.logit_rows.lengths)
    assert (slots[logits:] == SLOTS).all() and (batch.logit_index[logits:] == 0).all()
    sampled = torch.tensor([rng.randrange(3) for _ in range(len(slots))], dtype=torch.int32, device=device)
    side.batcher.advance(shaped, sampled)
    exact.batcher.advance(step, sampled[:logits])
    for a, b in zip(side.columns(), exact.columns()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_the_ngram_kernel_drafts_what_its_plain_twin_drafts(device: str) -> None:
    from quire.kernels.ngram import propose

    rng = random.Random(4)
    twins = [Side(False, device, True).state for _ in range(2)]
    for slot in range(SLOTS):
        known = rng.choice([1, 2, 7, 300, MAX_LEN - 3, MAX_LEN])
        tokens = torch.tensor([rng.randrange(rng.choice([2, 40])) for _ in range(MAX_LEN)], dtype=torch.int32)
        for state in twins:
            state.tokens[slot, :MAX_LEN], state.num_tokens[slot] = tokens, known
    order = torch.tensor(rng.sample(range(SLOTS), SLOTS), device=device)
    counts = torch.tensor([rng.randint(0, 5) for _ in range(SLOTS)], device=device)
    one, other = twins
    NgramDrafter(one, torch.device("cpu")).propose_plain(DraftRows(order, counts, 5, MAX_LEN))
    before = other.tokens.clone()
    propose(other.tokens, other.num_tokens, order, counts, 5, LONGEST)
    assert torch.equal(one.tokens, other.tokens) and not torch.equal(before, other.tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keeps_kv", [True, False])
def test_steps_are_those_of_the_plain_twin(device: str, keeps_kv: bool) -> None:
    rng = random.Random(1 + keeps_kv)
    kernel, plain = Side(True, device, keeps_kv), Side(False, device, keeps_kv)
    known: dict[int, list[int]] = {}
    compared = 0
    for step in range(40):
        plan = random_plan(rng, step, known)
        if not keeps_kv:  # every step starts from the beginning
            plan.starts[:] = 0
        sampled = torch.tensor([rng.randrange(1000) for _ in plan.slots], dtype=torch.int32, device=device)
        batches, steps = [], []
        for side in (kernel, plain):
            side.staging.begin()
            side.state.apply(plan, side.staging)
            if len(plan.slots):
                made = side.build(plan)
                batches.append(made.batch)
                steps.append(made)
                side.batcher.advance(made, sampled)
        if steps:
            same(*batches)
            assert torch.equal(steps[0].slots, steps[1].slots)
            if device == "cuda":
                torch.cuda.synchronize()
            assert torch.equal(steps[0].tokens[plan.samples, 0], sampled.cpu()[plan.samples])
            compared += 1
        for a, b in zip(kernel.columns(), plain.columns()):
            assert torch.equal(a, b)
    assert compared > 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_each", [True, False])
def test_padding_changes_nothing(device: str, one_each: bool) -> None:
    """Dummy rows in the header change neither the real part of the batch nor any column of a slot."""
    rng = random.Random(5)
    side, exact = Side(True, device, True), Side(True, device, True)
    known: dict[int, list[int]] = {}
    plan = random_plan(rng, 0, known)
    while len(plan.slots) < 3 or one_each != (plan.total_tokens == len(plan.slots)):
        known.clear()
        plan = random_plan(rng, 0, known)
    rows, total = len(plan.slots), plan.total_tokens
    padded = SLOTS + 1
    places = padded if one_each else total + 300
    for which in (side, exact):
        which.staging.begin()
        which.state.apply(plan, which.staging)
    sampled = torch.arange(padded, dtype=torch.int32, device=device)
    shaped, step = side.build_padded(plan, padded, places), exact.build(plan)
    batch, expected = shaped.batch, step.batch
    side.batcher.advance(shaped, sampled)
    exact.batcher.advance(step, sampled)
    for name in ("input_ids", "positions", "kv_slots"):
        assert torch.equal(getattr(batch, name)[:total], getattr(expected, name)), name
    if not one_each:
        assert (batch.kv_slots[total:] == -1).all() and (batch.input_ids[total:] == 0).all()
        assert (batch.seq_lens[rows:] == 0).all() and (batch.query_start[rows:] == total).all()
    assert torch.equal(batch.seq_lens[:rows], expected.seq_lens)
    assert torch.equal(batch.logit_index[:rows], expected.logit_index)
    for a, b in zip(side.columns(), exact.columns()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_arrive_after_a_step_that_failed_half_way(device: str) -> None:
    """The host had advanced to the next row of pinned memory, but the device had not."""
    rng, side = random.Random(3), Side(True, device, True)
    plan = random_plan(rng, 0, {})
    assert len(plan.slots)
    side.staging.begin()
    side.state.apply(plan, side.staging)
    side.batcher.open(plan, side.staging)  # and then memory runs out
    side.batcher.recover()
    sampled = torch.arange(100, 100 + len(plan.slots), dtype=torch.int32, device=device)
    step = side.build(plan)
    side.batcher.advance(step, sampled)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(step.tokens[plan.samples, 0], sampled.cpu()[plan.samples])
