"""One rank: its device, its model, and the memory that its slots and pages take.

Made in two steps, because the KV cache gets what the weights leave: construction loads the model,
`allocate` makes the runner once the number of pages is known.
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
from quire.worker.graphs import CudaGraphs, Eager, Launcher, Threads
from quire.worker.kv_cache import KVCache
from quire.worker.pooling import Pooler
from quire.worker.recorded import Recorded
from quire.worker.results import Results
from quire.worker.runner import Runner
from quire.worker.sizing import KVSize
from quire.worker.staging import Staging
from quire.worker.state import SlotState

_GRAPH_TOKENS = 2048  # the longest step with prompts that is captured if that takes padding
_FULL_TOKENS = 8192  # and without padding: launching a longer one takes less than running it
_ROWS_WITH_KERNELS = (2, 4, 8, 16, 32, 64)  # numbers of rows, each for a range with kernels of its own
_FEW_TOKENS = 16  # of a step with a prompt that has kernels of its own
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
        self._graph_bytes = 0  # activations of the largest captured step
        self._pages: list[KV] = []

    def compile_kernels(self) -> None:
        """Have the kernels of usual steps compiled side by side, or found on disk, and loaded."""
        config = self.config
        if not available(self.device) or config.kv_layout != "paged":  # elsewhere a single page can be huge
            return
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels.ahead import side_by_side

        rows, per_row = self._largest_step()
        size = self._scratch_size(per_row)
        pages = self._make_pages(size)
        slots = config.max_num_seqs or 1
        eager = self._make_runner(size, slots, pages, graphs=False)
        usual = self._make_runner(size, slots, pages, config.cuda_graphs)
        with side_by_side(self.device) as missing:
            _run(eager, min(rows, 16), per_row)  # as 16 rows, so any other multiple of 16
            self._run_request(usual, size)
        if missing:  # then those of other sizes are not on disk either: better now than while requests wait
            with side_by_side(self.device):
                self._run_prompt(usual, size, _FEW_TOKENS)
                for few in _ROWS_WITH_KERNELS:
                    if few <= rows:
                        _run(usual, few, 1)
        del eager, usual, pages
        torch.cuda.empty_cache()

    def activation_bytes(self) -> int:
        """Memory that steps take beyond weights and KV pages: measured on CUDA, 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        rows, per_row = self._largest_step()
        size = self._scratch_size(per_row)
        runner = self._make_runner(size, rows, self._make_pages(size), graphs=False)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        _run(runner, rows, per_row)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del runner
        torch.cuda.empty_cache()
        self._graph_bytes = self._bytes_of_graphs(peak, rows * per_row)
        return peak + self._column_bytes() + self._graph_bytes

    def _largest_step(self) -> tuple[int, int]:
        """(rows, tokens of each): no row is longer than a context, beyond which there are no positions."""
        config = self.config
        tokens, rows = config.max_num_batched_tokens or 1, config.max_num_seqs or 1
        rows = min(rows, tokens)
        return rows, min(tokens // rows, config.max_model_len or 1)

    def _scratch_size(self, per_row: int) -> KVSize:
        """A single page, which all positions share, in tables of the real width: other numbers would need
        kernels of their own. Elsewhere than in the paged layout, a page that is just long enough."""
        if self.config.kv_layout == "paged":
            return KVSize(1, self.config.block_size, 0, max(self.config.max_model_len or 1, per_row + 1))
        return KVSize(1, per_row + 1, 0, per_row + 1)

    def _column_bytes(self) -> int:
        """Of the slot columns: a place for each token that a request may have, and for each page."""
        config = self.config
        rows, length = config.max_num_seqs or 1, config.max_model_len or 1
        return 4 * (rows + 1) * (length + -(-length // config.block_size))

    def _bytes_of_graphs(self, largest_step: int, tokens: int) -> int:
        """Of captured steps: they run one at a time, so their activations share one block. `largest_step` is what
        one of `tokens` tokens takes."""
        config = self.config
        if not (config.cuda_graphs and self._backend.capturable):
            return 0
        longest = min(config.max_num_batched_tokens or 1, _FULL_TOKENS)
        logits = (config.max_num_seqs or 1) * self.model.spec.vocab_size * self._dtype.itemsize
        return largest_step * min(longest, tokens) // tokens + 2 * logits

    def allocate(self, size: KVSize) -> Runner:
        """The runner, with KV pages of `size` and columns for every slot."""
        self._pages = self._make_pages(size)
        return self._make_runner(size, self.config.max_num_seqs or 1, self._pages, self.config.cuda_graphs)

    def rehearse(self, runner: Runner, size: KVSize) -> None:
        """Run what a first request would, so that everything it takes is there. The weights need not be."""
        self._run_request(runner, size)
        # Admission overwrites a slot's columns, but not its pages, and what lies behind the end of a
        # request must be finite. A slot without an owner uses the first page, padding the last.
        for pair in self._pages:
            for pages in pair:
                pages[0].zero_()
                pages[-1].zero_()

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

    def _make_pages(self, size: KVSize) -> list[KV]:
        first = self.model.attention_layers[0]
        cache = KVCache(
            self._backend,
            len(self.model.attention_layers),
            size.num_blocks + 1,  # the last page is the dummy slot's
            size.block_size,
            first.num_kv_heads,
            first.head_dim,
            self._dtype,
            self.device,
            self.config.kv_layout != "none",
        )
        return cache.layers

    def _make_runner(self, size: KVSize, num_slots: int, pages: list[KV], graphs: bool) -> Runner:
        model, config, device = self.model, self.config, self.device
        keeps_kv = config.kv_layout != "none"
        max_blocks = -(-size.max_model_len // size.block_size)
        state = SlotState(num_slots, size.max_model_len, max_blocks, size.num_blocks, keeps_kv, device)
        sampler = Sampler(state, model.spec.vocab_size, num_slots + 1, device)
        turns = self._depth + 1
        launcher: Launcher
        batcher: Batcher
        if available(device):
            tokens = max(config.max_num_batched_tokens or 1, num_slots)
            batcher = KernelBatcher(
                state, self._backend, pages, size.block_size, tokens, num_slots, turns, device
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
                    self._dtype,
                    device,
                )
        else:
            batcher = TorchBatcher(state, self._backend, pages, size.block_size)
            threads = self._threads()
            launcher = eager = Eager(model, batcher, threads)
            if threads and isinstance(self._kernels, CpuKernels) and config.cpu_replay:
                launcher = Recorded(eager, model, batcher, self._kernels, threads, max_blocks)
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
