"""When a step is captured, replayed or run eagerly. Only a GPU can check the contents of a graph (`-m gpu`)."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from quire.attention.expansion_rule import NO_EXPANSION, ExpansionRule
from quire.models.decoder import NO_BRIEF_STEPS, BriefSteps
from quire.sampling.columns import LogitRows
from quire.types import StepPlan
from quire.worker.launch.graphs import CudaGraphs
from quire.worker.step.batch import DeviceStep, FirstEntries
from quire.worker.step.stage_functions import StageFunctions
from quire.worker.step.step_shapes import GraphLimits, StepShape, StepShapes, row_sizes, token_sizes
from quire.worker.step.step_stages import FILTERED_TOKENS, LOGITS, TOKENS, StepStage


def opened(plan: StepPlan, staging: Any, shape: StepShape | None = None) -> DeviceStep:
    step = DeviceStep(plan, len(plan.slots), plan.max_drafts, torch.empty(0))
    step.logit_rows = LogitRows(plan.slots, torch.empty(0), torch.empty(0))
    return step


def padded(shape: StepShape) -> DeviceStep:
    step = DeviceStep(None, shape.rows, shape.drafts, torch.empty(0), shape)
    step.logit_rows = LogitRows(np.empty(0), torch.empty(0), torch.empty(0))
    return step


class Graphs(CudaGraphs):
    """Launcher without a device: it lists what it runs, captures and replays."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        full_tokens: int,
        max_graphs: int = 99,
        rule: ExpansionRule = NO_EXPANSION,
        brief: BriefSteps = NO_BRIEF_STEPS,
    ) -> None:
        self.done: list[tuple[str, Any]] = []
        self.has_memory = True
        limits = GraphLimits(
            max_rows=max_rows,
            max_tokens=max_tokens,
            full_tokens=full_tokens,
            shared_bytes=0,
            max_graphs=max_graphs,
            brief=brief,
        )
        self._set_limits(limits)
        self._logits = torch.zeros(max_rows, 1)
        self._first_logits = FirstEntries(self._logits)
        self.filters = False
        sampler = SimpleNamespace(
            needs_host_work=lambda slots: False,
            has_filters=lambda slots: self.filters,
            choose=lambda logits, *more: self.done.append(("choose", len(logits))),
        )
        self._batcher = SimpleNamespace(open=opened, padded=padded, advance=lambda step, tokens: tokens)
        self._stages = StageFunctions(None, self._batcher, sampler, rule=rule)

    def _run(self, shape: StepShape) -> None:
        self.done.append(("run", (shape.rows, shape.tokens)))

    def _begin_pool(self) -> Any:
        self.done.append(("pool", None))

    def _graph_of(self, run: Any) -> Any:
        run()
        if not self.has_memory:
            self.done.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        ((_, shape),) = self.done[-1:]
        self.done[-1] = "capture", shape
        return SimpleNamespace(replay=lambda: self.done.append(("replay", shape)))

    def step(self, *tokens: int, drafts: int = 0, start: int = 0) -> list[tuple[str, Any]]:
        """Launch a step whose rows have `tokens` new tokens; return what the launcher did.

        `drafts` of the tokens of the first row are draft tokens. Its context has `start` tokens.
        """
        self.done.clear()
        counts = np.array(tokens, np.int32)
        none = np.zeros_like(counts)
        drafted = none.copy()
        drafted[0] = drafts
        starts = none.copy()
        starts[0] = start
        plan = StepPlan(
            0,
            none,
            counts,
            drafted,
            starts,
            np.ones(len(tokens), bool),
            [],
            np.empty((0, 4), np.int32),
            int(counts.sum()),
        )
        step = self.launch(plan, SimpleNamespace())
        if step.done is StepStage.OPEN:
            self.done.append(("eager", None))
        return list(self.done)


def test_a_shape_is_captured_when_it_first_occurs() -> None:
    steps = Graphs(64, 2048, 8192)
    assert steps.step(1, 1, 1) == [("run", (4, 4)), ("capture", (4, 4))]
    assert steps.step(1, 1, 1, 1) == [("replay", (4, 4))]
    assert steps.step(100, 1) == [("run", (8, 112)), ("capture", (8, 112))]
    assert steps.step(1, 104) == [("replay", (8, 112))]
    assert steps.step(8000, 192) == [("run", (8, 8192)), ("capture", (8, 8192))]
    assert steps.step(8000, 191) == [("eager", None)]  # would be padded, or is too long


def test_steps_with_rows_that_expand_latents_run_eagerly() -> None:
    least = ExpansionRule(16, 512, 128, 128).saved(np.array([500]), np.array([500]))[0]
    steps = Graphs(64, 2048, 8192, rule=ExpansionRule(16, 512, 128, 128, least))
    assert steps.step(500, 1) == [("run", (8, 512)), ("capture", (8, 512))]
    assert steps.step(501, 1) == steps.step(501) == [("eager", None)]
    assert steps.step(300, 200) == [("replay", (8, 512))]
    assert steps.step(1, 1) == [("run", (2, 2)), ("capture", (2, 2))]


def test_shapes_beyond_the_most_run_eagerly() -> None:
    steps = Graphs(64, 2048, 8192, max_graphs=2)
    for rows in (1, 2):
        steps.step(*[1] * rows)
    for _ in range(2):
        assert steps.step(1, 1, 1, 1) == [("run", (4, 4))]
    assert steps.step(1, 1) == [("replay", (2, 2))]


def test_an_idle_engine_captures_all_sizes_of_rows_once() -> None:
    steps, staging = Graphs(300, 64, 64, 512), SimpleNamespace(begin=lambda: None)
    steps.step(1, 1)
    captured = 0
    while steps.warm_up(staging):
        captured += 1
    assert captured >= len(row_sizes(300)) - 1
    for rows in row_sizes(300):
        assert steps.step(*[1] * rows) == [("replay", (rows, rows))]


def started(max_rows: int, max_tokens: int, max_graphs: int = 512) -> Graphs:
    steps = Graphs(max_rows, max_tokens, 8192, max_graphs)
    steps.capture_common()
    return steps


def test_after_the_start_no_step_of_up_to_max_tokens_waits_for_a_capture() -> None:
    rng = random.Random(0)
    for max_rows, max_tokens in ((1024, 2048), (256, 512), (7, 100), (1, 16)):
        steps = started(max_rows, max_tokens)
        for _ in range(300):
            rows = rng.randint(1, max_rows)
            counts = [1] * rows
            if rng.random() < 0.5 and rows < max_tokens:
                counts[rng.randrange(rows)] += rng.randint(1, max_tokens - rows)
            fit = steps.shapes.fit(rows, sum(counts), TOKENS, False)
            if fit is None:
                continue
            (kind, (run_rows, run_tokens)), *tail = steps.step(*counts)
            assert kind == "replay" and run_rows >= rows and run_tokens >= sum(counts)
            if tail and tail[-1][0] == "capture":  # padding has cost as much as a capture
                assert tail[-1] == ("capture", (fit.rows, fit.tokens))
                assert steps.step(*counts) == [("replay", (fit.rows, fit.tokens))]


def test_a_stand_in_is_used_until_its_padding_has_cost_a_capture() -> None:
    steps = started(64, 2048)
    kinds = []
    for _ in range(40):
        kinds += [done for done in steps.step(600, 1) if done[0] != "choose"]
    replays = kinds.index(("capture", (8, 640)))
    assert kinds[:replays] == [("replay", (32, 768))] * replays
    lost = StepShape(32, 768, LOGITS).excess_over(StepShape(8, 640))
    assert replays * lost >= 3 > (replays - 1) * lost
    assert set(kinds[replays + 1 :]) == {("replay", (8, 640))}


def test_a_stand_in_that_ends_with_the_logits_is_sampled_after_it() -> None:
    steps = started(64, 2048)
    steps.filters = True
    assert steps.step(1, 1, 1) == [("replay", (4, 4))], (
        "decoding steps with filters are captured at the start"
    )
    assert steps.step(400, 1) == [("replay", (32, 512)), ("choose", 32)]


def test_stand_ins_serve_when_no_graph_may_be_added() -> None:
    steps = started(64, 2048)
    steps._max_graphs = 0
    for _ in range(50):
        assert steps.step(600, 1)[0] == ("replay", (32, 768))


def test_a_small_gpu_keeps_room_for_the_shapes_that_occur() -> None:
    """62 graphs fit into a hundredth of 8 GB. Those of the start must not be all, nor leave a step without a graph."""
    steps, staging = started(256, 2048, 62), SimpleNamespace(begin=lambda: None)
    while steps.warm_up(staging):
        pass
    steps.filters = True
    for rows in (1, 100, 256):
        assert steps.step(*[1] * rows)[0][0] == "replay", "a stand-in that ends with the logits"
    for _ in range(100):
        kind, shape = steps.step(*[1] * 100)[0]
    assert (kind, shape) == ("replay", (104, 104)), "captured exactly in the end"


def test_steps_that_share_blocks_have_graphs_of_their_own() -> None:
    shape, sharing = StepShape(64, 64), StepShape(64, 64, TOKENS, True)
    assert not shape.stands_in_for(sharing) and not sharing.stands_in_for(shape)
    assert any(common.stands_in_for(sharing) for common in StepShapes(started(64, 64)._limits).at_start())


def test_brief_steps_have_graphs_of_their_own() -> None:
    steps = Graphs(64, 2048, 8192, brief=BriefSteps(rows=4, tokens=1000))
    assert steps.step(1, start=999) == [("run", (1, 1)), ("capture", (1, 1))]
    assert steps.step(1, start=10) == [("replay", (1, 1))]
    # Contexts grow beyond the limit: the graph of brief steps does not serve such a step.
    assert steps.step(1, start=1000) == [("run", (1, 1)), ("capture", (1, 1))]
    assert steps.step(1, 1, 1, start=997)[0] == ("run", (4, 4))
    assert steps.step(*[1] * 5, start=10)[0] == ("run", (8, 8))
    assert steps.step(*[1] * 5, start=5000) == [("replay", (8, 8))], "more rows have no brief steps"


def test_others_stand_in_for_brief_steps_for_a_while() -> None:
    other, brief = StepShape(4, 4), StepShape(4, 4, brief=True)
    assert other.stands_in_for(brief) and not brief.stands_in_for(other)
    steps = Graphs(64, 2048, 8192, brief=BriefSteps(rows=4, tokens=1000))
    steps.step(1, 1, 1, 1, start=5000)
    done = [steps.step(1, 1, 1, 1)[-1][0] for _ in range(40)]
    assert done[0] == "replay" and done.count("capture") == 1, "captured once it has cost a capture"


def test_brief_steps_are_captured_at_the_start() -> None:
    limits = GraphLimits(max_rows=64, max_tokens=512, full_tokens=0, shared_bytes=0, max_graphs=512)
    sizes = {shape.rows for shape in StepShapes(limits).at_start() if shape.brief}
    assert not sizes, "only for models that have such steps"
    shapes = StepShapes(replace(limits, brief=BriefSteps(4, 1000))).at_start()
    brief = {(shape.rows, shape.prefix) for shape in shapes if shape.brief}
    assert brief == {(rows, prefix) for rows in (1, 2, 4) for prefix in (TOKENS, FILTERED_TOKENS, LOGITS)}


def test_kernels_of_shapes_that_differ_in_sampling_alone_are_run_once() -> None:
    limits = GraphLimits(max_rows=64, max_tokens=512, full_tokens=0, shared_bytes=0, max_graphs=512)
    shapes = StepShapes(limits)
    run, common = shapes.with_all_kernels(), shapes.at_start()
    assert run[0] == common[-1] and run[0].prefix == FILTERED_TOKENS, (
        "the kernel that takes longest comes first"
    )
    sizes = [replace(shape, prefix=TOKENS) for shape in run]
    assert len(set(sizes)) == len(sizes) < len(common)
    assert set(sizes) == {replace(shape, prefix=TOKENS) for shape in common}


def test_a_shape_for_which_memory_is_short_runs_without_a_graph() -> None:
    steps = Graphs(64, 2048, 8192)
    steps.step(1)
    steps.has_memory = False
    assert steps.step(1, 1) == [("run", (2, 2))], "the step has run, so it must not fail"
    steps.has_memory = True
    assert steps.step(1, 1) == [("run", (2, 2))], "a capture would fail in every step"
    assert steps.step(1) == [("replay", (1, 1))]


def test_graphs_that_were_dropped_are_captured_again_once_the_engine_is_idle() -> None:
    steps, staging = Graphs(2, 64, 64), SimpleNamespace(begin=lambda: None)
    steps.step(1, 1)
    steps.drop_graphs()
    assert steps.step(1, 1) == [("run", (2, 2))]
    steps.done.clear()
    assert steps.warm_up(staging)
    assert steps.done[0] == ("pool", None)
    steps.step(1, 1)
    assert steps.step(1, 1) == [("replay", (2, 2))]


def test_short_steps_with_prompts_are_padded_by_few_tokens() -> None:
    sizes = token_sizes(2048)
    assert sizes[:8] == [16, 32, 48, 64, 80, 96, 112, 128]
    for tokens in range(1, 2049):
        padding = min(size for size in sizes if size >= tokens) - tokens
        assert padding < 16 if tokens <= 128 else padding * 9 <= tokens + padding


def test_steps_with_drafts_are_captured_by_depth() -> None:
    steps = Graphs(64, 2048, 8192)
    assert steps.step(6, drafts=5) == [("run", (1, 6)), ("capture", (1, 6))]
    assert steps.step(6, drafts=5) == [("replay", (1, 6))]
    assert steps.step(4, 1, 1, drafts=3) == [("run", (4, 16)), ("capture", (4, 16))]
    assert steps.step(4, 700, drafts=3) == [("run", (2, 704)), ("capture", (2, 704))]
    # A shallower step runs in a graph of deeper ones as long as that costs less than a capture.
    assert steps.step(5, drafts=4) == [("replay", (1, 6))]


def test_shapes_with_drafts_hold_their_logits() -> None:
    limits = GraphLimits(
        max_rows=256,
        max_tokens=2048,
        full_tokens=0,
        shared_bytes=0,
        max_graphs=512,
        drafts=5,
        max_logit_rows=1024,
    )
    shapes, rng = StepShapes(limits), random.Random(0)
    drafted = [shape for shape in shapes.at_start() if shape.drafts]
    assert {shape.rows for shape in drafted} >= {1, 2, 4, 8, 64} and all(s.drafts == 5 for s in drafted)
    for _ in range(300):
        rows = rng.randint(1, 256)
        depths = [rng.randint(0, 5) for _ in range(rows)]
        prompt = rng.choice([0, rng.randint(1, 900)])
        tokens, longest = rows + sum(depths) + prompt, max(1 + max(depths), prompt)
        shape = shapes.fit(rows, tokens, TOKENS, False, max(depths), longest)
        if shape is not None and max(depths):
            assert shape.rows >= rows and shape.tokens >= tokens and shape.drafts >= max(depths)
            assert rows + sum(depths) <= shape.logit_rows <= 1024
            assert longest <= 1 + max(depths) or not shape.decodes_only


def test_the_steps_of_an_unchanged_batch_are_decided_once() -> None:
    steps, asked = Graphs(64, 2048, 8192), list[np.ndarray]()
    host_work = False

    def needs_host_work(slots: np.ndarray) -> bool:
        asked.append(slots)
        return host_work

    steps._stages.sampler.needs_host_work = needs_host_work
    slots, none = np.arange(2, dtype=np.int32), np.zeros(2, np.int32)

    def launch(slots: np.ndarray, admissions: list[Any]) -> StepStage:
        ones, no_blocks = none + 1, np.empty((0, 4), np.int32)
        plan = StepPlan(0, slots, ones, none, none, ones > 0, admissions, no_blocks, 2)
        return steps.launch(plan, SimpleNamespace()).done

    assert [launch(slots, []) for _ in range(3)] == [StepStage.COMMIT] * 3 and len(asked) == 1
    host_work = True
    assert launch(slots, [object()]) == StepStage.HEAD, "a new owner has other parameters"
    host_work = False
    assert launch(slots, []) == StepStage.HEAD and len(asked) == 2
    assert launch(slots.copy(), []) == StepStage.COMMIT and len(asked) == 3
