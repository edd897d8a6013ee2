"""One rank: its device, its model, and the memory of its slots and blocks.

A worker is built in two steps, because the KV cache gets the memory that the weights leave: the constructor takes the
loaded model, and `allocate` makes the runner once the number of blocks is known.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend
from quire.compilers import Compilers
from quire.kernels import available
from quire.models.decoder import Model
from quire.models.layer_kinds import few_layers
from quire.parallel.pipeline import NO_LINK, Link
from quire.sampling.sampler import Sampler
from quire.speculation.drafter import NO_SPECULATION, DraftContext, Speculation
from quire.types import StepPlan, max_logit_rows
from quire.worker.launch.launch_factory import LaunchFactory
from quire.worker.memory.kv_cache import KVCache
from quire.worker.memory.sizing import KVSize, MemoryPlanner
from quire.worker.memory.states import StateMemory
from quire.worker.pooling import Pooler
from quire.worker.results import Results
from quire.worker.runner import Runner
from quire.worker.stage import StageRunner, TokenRelay
from quire.worker.staging import Staging
from quire.worker.state import SlotState
from quire.worker.step.batch import BatchParts
from quire.worker.step.stage_functions import StageFunctions
from quire.worker.step.step_shapes import PADDED_TOKENS
from quire.worker.transfer.shared_memory import SharedMemory

_KERNEL_ROW_COUNTS = (2, 4, 8, 16, 32, 64)  # one row count from each range that has its own kernels
_SHORT_ROW_COUNTS = (16, 128)  # of rows of two tokens that have their own kernels
# Rows of prompts in a step that is not padded. Nine have more rows of logits than small tiles hold, and 256 so many tiles
# that attention does not sort them.
_LONG_ROW_COUNTS = (9, 256)
_SHORT_PROMPT_TOKENS = 16  # of a step with a prompt that has its own kernels
_REHEARSED_TOKENS = 128  # of the prompt that is rehearsed


class Worker:
    """One rank of an engine.

    Args:
        model: lives on `memory.device` and computes in `memory.dtype`.
        memory: sizes of steps, slot columns and blocks; its `limits.max_model_len` fits beside the weights.
        launch: factory of batchers and launchers.
        speculation: how steps draft tokens.
        link: the connection to the other stages of a pipeline.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        memory: MemoryPlanner,
        launch: LaunchFactory,
        speculation: Speculation = NO_SPECULATION,
        link: Link = NO_LINK,
    ) -> None:
        self._link, self._relay = link, TokenRelay(link)
        self._speculation = speculation
        self._max_logit_rows = max_logit_rows(memory.limits.max_num_seqs, speculation.tokens)
        self.model, self.device, self.memory = model, memory.device, memory
        self._limits, self._layout, self._groups = memory.limits, memory.layout, memory.groups
        self._backend, self._launch = backend, launch
        self.blocks: list[KV] = []  # of each layer; empty until `allocate`
        self._columns: SlotState | None = None
        self._states: StateMemory | None = None
        self.reserved_bytes = 0  # the last result of `measure`

    def compile_kernels(self, compilers: Compilers) -> None:
        """Compile the kernels of common steps with `compilers`, or find them on disk, and load them."""
        if (
            not available(self.device) or not self._layout.paged
        ):  # in other layouts a single block can be huge
            return
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels.ahead import background_compilation

        rows, per_row = self.largest_step()
        size = self.scratch_size()
        blocks = self.make_blocks(size)
        eager, usual = (self.make_runner(size, blocks, graphs) for graphs in (False, True))
        usual.launcher.drop_graphs()  # otherwise a step that was captured stands in for one with other kernels
        with few_layers(self.model), background_compilation(self.device, compilers) as compilation:
            usual.run_common(most=1)  # its kernels take longest
            run_step(eager, min(rows, 16), per_row)  # any other multiple of 16 rows uses the same kernels
            self._run_request(usual, size)
            if compilation.any_missing():  # then those of other sizes are missing too: better now than later
                usual.run_common()
                self._run_prompt(usual, size, _SHORT_PROMPT_TOKENS)
                for count in _KERNEL_ROW_COUNTS:
                    if count <= rows:
                        run_step(usual, count, 1)
                for count in _SHORT_ROW_COUNTS:
                    self._run_rows(usual, count, 2)
                self._run_long_prompts(eager, size)
        del eager, usual, blocks
        torch.cuda.empty_cache()

    def measure(self) -> int:
        """Return the bytes that steps take beyond weights, KV blocks and slot columns, and keep them.

        These are buffers, activations, sampling and captured graphs. On CUDA the first two are measured; on a CPU all
        of them are estimated.
        """
        on_cpu = self.device.type != "cuda"
        self.reserved_bytes = (
            self.memory.cpu_step_bytes(self._max_logit_rows) if on_cpu else self._measured_bytes()
        ) + self._backend.rule.scratch_bytes
        return self.reserved_bytes

    def _measured_bytes(self) -> int:
        rows, per_row = self.largest_step()
        size = self.scratch_size()
        blocks, columns, states = self.make_blocks(size), self._columns_for(size), self._states_for(size)
        # Only this stream: another engine in this process may be capturing a graph, which forbids a device-wide wait.
        torch.cuda.current_stream(self.device).synchronize()
        begin = torch.cuda.memory_allocated(self.device)
        runner = self.make_runner(size, blocks, graphs=False)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run_step(runner, rows, per_row)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del runner, blocks, columns, states
        self._columns = self._states = None  # rebuilt when the context is known
        torch.cuda.empty_cache()
        sampling = self.memory.sampling_bytes(self._max_logit_rows)
        return before - begin + max(peak, sampling) + self._launch.reserve(peak, rows * per_row)

    def largest_step(self) -> tuple[int, int]:
        """Return the rows of the largest step, and the tokens of each row.

        A row is at most one token shorter than the context, which must also hold the sampled token.
        """
        limits = self._limits
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        return rows, min(limits.max_num_batched_tokens // rows, max(limits.max_model_len - 1, 1))

    def scratch_size(self) -> KVSize:
        """Return the size of a KV cache of one block, for steps whose results are not used.

        In the paged layout all positions share the block, in block tables of the real width: another width would need
        other kernels. In other layouts the block is as long as a row of the largest step.
        """
        if self._layout.paged:
            max_len = self._limits.max_model_len
            return KVSize(1, self._layout.block_size(max_len), 0, max_len)
        _, per_row = self.largest_step()
        return KVSize(1, per_row + 1, 0, per_row + 1)

    def allocate(self, size: KVSize, shared: SharedMemory | None = None) -> Runner:
        """Allocate `blocks` of `size` and return the engine's runner, with columns for every request slot.

        Args:
            size: the size of the KV cache.
            shared: memory for the blocks that other processes read; None takes memory of this process.
        """
        self.blocks = self.make_blocks(size, shared)
        return self.make_runner(size, self.blocks, graphs=True)

    def rehearse(self, runner: Runner, size: KVSize) -> None:
        """Run a first request, so that everything it needs is loaded. The weights may still be undefined."""
        self._run_request(runner, size)
        runner.capture_common()
        # Admission overwrites a slot's columns but not its blocks, and the entries after the end of a request must be
        # finite. A slot without an owner uses the first block, padding the last.
        for tensors in self.blocks:
            for blocks in tensors:
                blocks[0].zero_()
                blocks[-1].zero_()
        self._states_for(size).clear()

    def _run_request(self, runner: Runner, size: KVSize) -> None:
        """Run a short prompt and one decode step."""
        if tokens := self._run_prompt(runner, size, _REHEARSED_TOKENS):
            run_step(runner, 1, 1, before=tokens)

    def _run_prompt(self, runner: Runner, size: KVSize, tokens: int) -> int:
        """Run one row of `tokens` tokens, clipped to what fits. Return the number of tokens run."""
        tokens = min(tokens, size.max_model_len - 1, self._limits.max_num_batched_tokens)
        if tokens > 0:
            run_step(runner, 1, tokens)
        return tokens

    def _run_rows(self, runner: Runner, rows: int, tokens: int) -> None:
        """Run `rows` rows of `tokens` tokens, or of as many as fit; nothing if there are no such steps."""
        limits = self._limits
        tokens = min(tokens, limits.max_num_batched_tokens // rows, limits.max_model_len - 1)
        if rows <= limits.max_num_seqs and tokens > 0:
            run_step(runner, rows, tokens)

    def _run_long_prompts(self, runner: Runner, size: KVSize) -> None:
        """Run prompts that are too long to be padded: one for each power of two, and several in one step."""
        budget, tokens = self._limits.max_num_batched_tokens, 2 * PADDED_TOKENS
        while tokens < 2 * budget:
            self._run_prompt(runner, size, tokens)
            tokens *= 2
        if budget > PADDED_TOKENS:
            for count in _LONG_ROW_COUNTS:
                self._run_rows(runner, count, budget)

    def make_blocks(self, size: KVSize, shared: SharedMemory | None = None) -> list[KV]:
        """Allocate the KV blocks of all layers, and one more block for the dummy slot."""
        cache = KVCache(
            self._backend,
            self._groups,
            num_blocks=size.num_blocks + 1,
            block_size=size.block_size,
            device=self.device,
            shared=shared,
        )
        return cache.layers

    def _columns_for(self, size: KVSize) -> SlotState:
        """Return empty slot columns. All runners use one set, because it can take gigabytes."""
        slots, max_blocks = self._limits.max_num_seqs, -(-size.max_model_len // size.block_size)
        shape = slots, size.max_model_len, max_blocks, len(self._groups.groups)
        if self._columns is None or self._columns.shape != shape:
            self._columns = None
            self._columns = SlotState(*shape, keeps_kv=self._layout.keeps_kv, device=self.device)
        self._columns.clear(dummy_block=size.num_blocks)
        return self._columns

    def _states_for(self, size: KVSize) -> StateMemory:
        """Return the states of all slots and snapshots. All runners of one size use the same."""
        slots, snapshots = self._limits.max_num_seqs, size.num_snapshots
        if self._states is None or self._states.shape != (slots, snapshots):
            self._states = None
            self._states = StateMemory(
                self.memory.states, slots, snapshots, self.device, self._speculation.tokens
            )
        return self._states

    def snapshots(self, size: KVSize) -> list[torch.Tensor]:
        """Return the rows of snapshots of each tensor of each layer, once blocks of `size` are allocated."""
        return self._states_for(size).snapshots()

    def make_runner(self, size: KVSize, blocks: list[KV], graphs: bool) -> Runner:
        """Return a runner over `blocks`. It takes the slot columns from every earlier runner.

        Args:
            graphs: replay captured steps on a GPU, if the launch factory does.
        """
        model, device = self.model, self.device
        state, states = self._columns_for(size), self._states_for(size)
        sampler = Sampler(
            state, model.spec.vocab_size, state.dummy + 1, device, max_rows=self._max_logit_rows + 1
        )
        drafter = self._speculation.make(
            DraftContext(
                columns=state,
                kv=blocks[model.spec.num_layers :],
                group_of=self._groups.group_of[model.spec.num_layers :],
                block_size=size.block_size,
                vocab_size=model.spec.vocab_size,
                choose=sampler.choose,
                device=device,
            )
        )
        parts = BatchParts(
            state, self._backend, blocks, size.block_size, self._groups.group_of, drafter, states
        )
        is_last = self._link.stage.is_last
        stages = StageFunctions(
            self._speculation.observe(model, drafter),
            self._launch.batcher(parts),
            sampler,
            has_head=is_last,
            rule=self._backend.rule,
        )
        runner_class = Runner if is_last else partial(StageRunner, self._relay)
        depth = self._launch.depth
        return runner_class(
            stages=stages,
            launcher=self._launch.launcher(stages, captures=graphs),
            staging=Staging(device, depth),
            results=Results(device, depth + 1),
            pooler=Pooler(state.dummy + 1, device),
            link=self._link,
        )


def run_step(runner: Runner, rows: int, per_row: int, before: int = 0) -> None:
    """Run a greedy step in slots without an owner, and wait for it.

    Args:
        rows: number of rows; row i uses slot i.
        per_row: new tokens of each row.
        before: tokens that the slots have already run.
    """
    plan = StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        num_tokens=np.full(rows, per_row, np.int32),
        num_drafts=np.zeros(rows, np.int32),
        starts=np.full(rows, before, np.int32),
        samples=np.ones(rows, np.bool_),
        admissions=[],
        new_blocks=np.empty((0, 4), np.int32),
        total_tokens=rows * per_row,
    )
    runner.forward(plan)
    runner.sample(0, None).wait()
