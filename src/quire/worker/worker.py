"""One rank: its device, its model, and the memory that its slots and blocks take.

Made in two steps, because the KV cache gets what the weights leave: construction loads the model,
`allocate` makes the runner once the number of blocks is known.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend
from quire.config import EngineConfig
from quire.kernels import Kernels, available
from quire.kernels.cpu.ops import CpuKernels
from quire.models.decoder import Model
from quire.sampling.sampler import Sampler
from quire.types import StepPlan
from quire.worker.batch import Batcher, KernelBatcher, TorchBatcher
from quire.worker.cpu_replay import CpuReplay
from quire.worker.graphs import MOST_GRAPHS, CudaGraphs, Eager, Launcher, Threads
from quire.worker.kv_cache import KVCache
from quire.worker.pooling import Pooler
from quire.worker.results import Results
from quire.worker.runner import Runner
from quire.worker.sizing import KVSize, cpu_step_bytes, gpu_memory, sampling_bytes
from quire.worker.staging import Staging
from quire.worker.state import SlotState

_GRAPH_TOKENS = 2048  # the longest step with prompts that is captured if that takes padding
_FULL_TOKENS = 8192  # and without padding: launching a longer one takes less than running it
_ROWS_WITH_KERNELS = (2, 4, 8, 16, 32, 64)  # numbers of rows, each for a range with kernels of its own
_FEW_TOKENS = 16  # of a step with a prompt that has kernels of its own
_GRAPH_BYTES_PER_LAYER = 46 << 10  # of a captured step (measured: up to 1.3 MiB with 28 layers)
_PROMPT_TOKENS = 128  # of the request that is rehearsed


class Worker:
    """`config` is resolved; `model` lives on `device` and computes in `dtype`."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        depth: int,
        kernels: Kernels | None = None,
    ) -> None:
        self._kernels = kernels
        self.config, self.model, self.device = config, model, device
        self._backend, self._dtype, self._depth = backend, dtype, depth
        self._graph_bytes = 0  # of the memory that captured steps share
        self._blocks: list[KV] = []
        self._columns: SlotState | None = None
        self.reserved_bytes = 0  # as `measure` found

    def compile_kernels(self) -> None:
        """Have the kernels of usual steps compiled side by side, or found on disk, and loaded."""
        config = self.config
        if not available(self.device) or config.kv_layout != "paged":  # elsewhere a single page can be huge
            return
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels.ahead import background_compilation

        rows, per_row = self._largest_step()
        size = self._scratch_size(per_row)
        blocks = self._make_blocks(size)
        eager = self._make_runner(size, blocks, graphs=False)
        usual = self._make_runner(size, blocks, config.cuda_graphs)
        with background_compilation(self.device) as missing:
            _run(eager, min(rows, 16), per_row)  # as 16 rows, so any other multiple of 16
            self._run_request(usual, size)
        if missing:  # then those of other sizes are not on disk either: better now than while requests wait
            with background_compilation(self.device):
                self._run_prompt(usual, size, _FEW_TOKENS)
                for few in _ROWS_WITH_KERNELS:
                    if few <= rows:
                        _run(usual, few, 1)
        del eager, usual, blocks
        torch.cuda.empty_cache()

    def measure(self) -> int:
        """Return, and keep, the bytes that steps take beyond weights, KV blocks and slot columns.

        That is buffers, activations, sampling and captured graphs. On CUDA the first two are measured; on a CPU all
        is estimated.
        """
        on_cpu = self.device.type != "cuda"
        self.reserved_bytes = self._estimated_bytes() if on_cpu else self._measured_bytes()
        return self.reserved_bytes

    def _estimated_bytes(self) -> int:
        return cpu_step_bytes(self.config, self.model.spec, self._dtype)

    def _measured_bytes(self) -> int:
        rows, per_row = self._largest_step()
        size = self._scratch_size(per_row)
        blocks, columns = self._make_blocks(size), self._columns_for(size)
        # Not the whole device: another engine in this process may be capturing a graph, which forbids that.
        torch.cuda.current_stream(self.device).synchronize()
        begin = torch.cuda.memory_allocated(self.device)
        runner = self._make_runner(size, blocks, graphs=False)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        _run(runner, rows, per_row)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del runner, blocks, columns
        self._columns = None  # made anew once the context is known
        torch.cuda.empty_cache()
        sampling = sampling_bytes(self.config, self.model.spec.vocab_size, self._dtype)
        return before - begin + max(peak, sampling) + self._bytes_of_graphs(peak, rows * per_row)

    def _largest_step(self) -> tuple[int, int]:
        """(rows, tokens of each): no row is longer than a context without the token that is sampled."""
        config = self.config
        tokens, rows = config.max_num_batched_tokens or 1, config.max_num_seqs or 1
        rows = min(rows, tokens)
        return rows, min(tokens // rows, max((config.max_model_len or 1) - 1, 1))

    def _scratch_size(self, per_row: int) -> KVSize:
        """A single block, which all positions share, in tables of the real width: other numbers would need
        kernels of their own. Elsewhere than in the paged layout, a page that is just long enough."""
        if self.config.kv_layout == "paged":
            return KVSize(1, self.config.block_size, 0, self.config.max_model_len or 1)
        return KVSize(1, per_row + 1, 0, per_row + 1)

    def _bytes_of_graphs(self, largest_step: int, tokens: int) -> int:
        """Return the memory of captured steps, and note how much of it they share: they run one at a time, so their
        activations are cut from one block. `largest_step` is what one of `tokens` tokens takes."""
        config = self.config
        if not (config.cuda_graphs and self._backend.capturable):
            return 0
        longest = min(config.max_num_batched_tokens or 1, _FULL_TOKENS)
        logits = (config.max_num_seqs or 1) * self.model.spec.vocab_size * self._dtype.itemsize
        self._graph_bytes = largest_step * min(longest, tokens) // tokens + 2 * logits
        return self._graph_bytes + logits + self._most_graphs() * self._bytes_per_graph()

    def _most_graphs(self) -> int:
        """Return how many steps are captured at most: graphs take at most a hundredth of the device's memory."""
        return min(MOST_GRAPHS, gpu_memory(self.device) // 100 // self._bytes_per_graph())

    def _bytes_per_graph(self) -> int:
        return _GRAPH_BYTES_PER_LAYER * self.model.spec.num_layers

    def allocate(self, size: KVSize) -> Runner:
        """The runner, with KV blocks of `size` and columns for every slot."""
        self._blocks = self._make_blocks(size)
        return self._make_runner(size, self._blocks, self.config.cuda_graphs)

    def rehearse(self, runner: Runner, size: KVSize) -> None:
        """Run what a first request would, so that everything it takes is there. The weights need not be."""
        self._run_request(runner, size)
        # Admission overwrites a slot's columns, but not its blocks, and what lies behind the end of a
        # request must be finite. A slot without an owner uses the first block, padding the last.
        for pair in self._blocks:
            for blocks in pair:
                blocks[0].zero_()
                blocks[-1].zero_()

    def _run_request(self, runner: Runner, size: KVSize) -> None:
        """A short prompt, and a token after it."""
        if tokens := self._run_prompt(runner, size, _PROMPT_TOKENS):
            _run(runner, 1, 1, before=tokens)

    def _run_prompt(self, runner: Runner, size: KVSize, tokens: int) -> int:
        """So many tokens, or as many as fit; how many there were."""
        tokens = min(tokens, size.max_model_len - 1, self.config.max_num_batched_tokens or 1)
        if tokens > 0:
            _run(runner, 1, tokens)
        return tokens

    def _make_blocks(self, size: KVSize) -> list[KV]:
        first = self.model.attention_layers[0]
        cache = KVCache(
            self._backend,
            len(self.model.attention_layers),
            size.num_blocks + 1,  # the last block is the dummy slot's
            size.block_size,
            first.num_kv_heads,
            first.head_dim,
            self._dtype,
            self.device,
            self.config.kv_layout != "none",
        )
        return cache.layers

    def _columns_for(self, size: KVSize) -> SlotState:
        """Return the slot columns, empty. All runners use one set, for it can take gigabytes."""
        slots, max_blocks = self.config.max_num_seqs or 1, -(-size.max_model_len // size.block_size)
        if self._columns is None or self._columns.shape != (slots, size.max_model_len, max_blocks):
            self._columns = None
            keeps_kv = self.config.kv_layout != "none"
            self._columns = SlotState(slots, size.max_model_len, max_blocks, keeps_kv, self.device)
        self._columns.clear(size.num_blocks)
        return self._columns

    def _make_runner(self, size: KVSize, blocks: list[KV], graphs: bool) -> Runner:
        model, config, device = self.model, self.config, self.device
        state = self._columns_for(size)
        num_slots = state.dummy
        sampler = Sampler(state, model.spec.vocab_size, num_slots + 1, device)
        turns = self._depth + 1
        launcher: Launcher
        batcher: Batcher
        if available(device):
            tokens = max(config.max_num_batched_tokens or 1, num_slots)
            batcher = KernelBatcher(
                state, self._backend, blocks, size.block_size, tokens, num_slots, turns, device
            )
            launcher = Eager(model, batcher)
            if graphs and self._backend.capturable:
                budget = config.max_num_batched_tokens or 1
                launcher = CudaGraphs(
                    launcher,
                    model,
                    batcher,
                    sampler,
                    num_slots,
                    min(budget, _GRAPH_TOKENS),
                    budget if budget <= _FULL_TOKENS else 0,
                    self._graph_bytes,
                    self._most_graphs(),
                    self._dtype,
                    device,
                )
        else:
            batcher = TorchBatcher(state, self._backend, blocks, size.block_size)
            threads = self._threads()
            launcher = eager = Eager(model, batcher, threads)
            if threads and isinstance(self._kernels, CpuKernels) and config.cpu_replay:
                launcher = CpuReplay(eager, model, batcher, self._kernels, threads)
        staging, results = Staging(device, self._depth), Results(device, turns)
        pooler = Pooler(state.dummy + 1, device)
        return Runner(model, launcher, batcher, state, sampler, staging, results, pooler)

    def _threads(self) -> Threads | None:
        if self.device.type != "cpu":
            return None
        return Threads(self.model.spec.num_parameters, self.config.cpu_threads)


def _run(runner: Runner, rows: int, per_row: int, before: int = 0) -> None:
    """A greedy step of `rows` rows with `per_row` tokens each, in slots that nobody has been admitted to and
    that have run `before` tokens."""
    plan = StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        num_tokens=np.full(rows, per_row, np.int32),
        num_drafts=np.zeros(rows, np.int32),
        starts=np.full(rows, before, np.int32),
        samples=np.ones(rows, np.bool_),
        admits=[],
        new_blocks=[],
        total_tokens=rows * per_row,
        max_seq_len=before + per_row,
    )
    runner.forward(plan)
    runner.sample(0, None).wait()
