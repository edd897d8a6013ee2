"""One rank of an engine: from settings to a worker, in phases that the host (`host.py`) drives. No scheduler.

Only this module, `assembly/`, `host.py` and `wiring.py` read `EngineConfig` to build an engine; everything below
receives objects and values. `assembly/` makes the parts of a rank, this module puts them together.

On a GPU background threads read the weights. Meanwhile this thread measures memory, allocates blocks and compiles
kernels, with whatever the weights hold so far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from quire.assembly.device import host_addresses, pick_device, pick_dtype, rank_device
from quire.assembly.drafting import DraftLoader, find_draft
from quire.assembly.kv_codes import kv_coded_spec
from quire.assembly.memory import memory_planner, request_state_bytes
from quire.assembly.model import load_model, served_spec
from quire.assembly.parts import pick_attention_parts
from quire.assembly.speculation import pick_speculation
from quire.assembly.stages import pick_experts, pick_place, pick_stage, with_buffers
from quire.assembly.steps import pick_launch, step_limits
from quire.assembly.transfer import block_fingerprint, disk_blocks, host_rows, open_mover, snapshot_pages
from quire.assembly.transport import open_exports, open_reader, pick_transport
from quire.compilers import NO_COMPILERS, Compilers
from quire.config import EngineConfig
from quire.kernels import pick_kernels
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import Checkpoint
from quire.models.registry import check_shards, check_stages
from quire.models.spec import ModelSpec
from quire.parallel.connection import Meeting
from quire.parallel.pipeline import NO_LINK, Link
from quire.parallel.ranks import Parallel
from quire.types import BlockKey, ConfigError, SharedBlocks
from quire.wiring import queue_depth
from quire.worker.executor import device_guard
from quire.worker.memory.sizing import KVSize, gpu_memory
from quire.worker.runner import Runner
from quire.worker.transfer.block_bytes import BlockBytes, SnapshotBytes
from quire.worker.transfer.mover import LocalMover
from quire.worker.transfer.peers import BlockExports, PeerMover, describe_blocks
from quire.worker.worker import Worker


class Rank:
    """One rank of an engine: its device, model, worker and runner.

    The host runs the phases in the order of `PHASES`, on all ranks at the same time and inside `guard`. What ranks must
    agree on, it passes as an argument.

    Args:
        config: settings.
        path: folder or file of the model.
        spec: the model's spec.
        index: number of this rank.
        exports: descriptor of the memory in which the blocks of a prefill engine are; None for other engines.
        compilers: the processes that compile kernels.

    Raises:
        ConfigError: if the settings do not suit the model or the machine.
    """

    runner: Runner  # from `allocate` on
    size: KVSize
    mover: LocalMover | None = None  # from `open_tiers` on, with kv_host_memory
    pages: int  # of a snapshot in host memory, from `host_rows` on

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        spec: ModelSpec,
        index: int = 0,
        exports: int | None = None,
        compilers: Compilers = NO_COMPILERS,
    ) -> None:
        self._compilers = compilers
        place = self._place = pick_place(config, index)
        check_shards(spec, place.size, config.enable_expert_parallel)
        check_stages(spec, place.stages)
        self.device = (
            pick_device(config.device)  # ranks of other hosts choose their own
            if config.rank_address
            else rank_device(config.device, index, place.count)
        )
        self._parallel = Parallel(place.shard, place.size)
        self._experts = pick_experts(config, spec, self._parallel, self.device)
        self.guard = device_guard(self.device)
        self._path = path
        self._explicit_len = config.max_model_len is not None
        if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
            raise ConfigError(
                f"max_model_len {config.max_model_len} exceeds the {spec.max_model_len} positions of {config.model}"
            )
        spec = served_spec(config, spec)
        self.dtype = pick_dtype(config.dtype, spec, self.device)
        spec = kv_coded_spec(config, path, spec, self.dtype, self.device)
        self._draft = find_draft(config, path, spec)
        longest = min([spec.max_model_len, *(draft.max_model_len for draft in self._draft)])
        self.spec, self.config = (
            spec,
            config.resolved(
                gpu_memory(self.device),
                longest,
                request_state_bytes(spec, self.dtype, config.tensor_parallel_size),
            ),
        )
        self._kernels = pick_kernels(self.device, self.dtype, config.cpu_kernels)
        self.backend = pick_attention_parts(config, spec, self.device, self.dtype, self._kernels)
        self._stage = pick_stage(config, spec, place)
        self._link: Link = NO_LINK
        self._loading = ExitStack()
        self.exports: BlockExports | None = None
        self._shares_device = exports is not None or config.num_prefills > 0
        if self._shares_device:
            self._transport = pick_transport(config, self.device)
        if exports is not None:
            self.exports = open_exports(self._transport, exports, self.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, from `fit_context` on."""
        return self._memory.weight_bytes

    @property
    def draft_weight_bytes(self) -> int:
        """Bytes of the weights of the network that drafts, on this rank."""
        return self._memory.draft_bytes

    @property
    def has_states(self) -> bool:
        """Return whether a layer of the model, on any rank, keeps a state per request."""
        return request_state_bytes(self.spec, self.dtype, self._place.size) > 0

    def run_phase(self, phase: str, argument: int) -> int:
        """Run the phase of the start-up with this name. Return its result, or 0 if it has none."""
        return self.PHASES[phase](self, argument) or 0

    def connect(self, port: int) -> None:
        """Connect to the other ranks, which meet at `port` of the first one's host."""
        config, place, device = self.config, self._place, self.device
        if place.count > 1:
            hosts = host_addresses(config.rank_address)
            meeting = Meeting(port, place, device, config.rank_timeout, hosts)
            self._parallel = replace(self._parallel, communicator=meeting.communicator())
            limits = step_limits(config)
            tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
            self._stage = with_buffers(self._stage, self.spec, tokens, self.dtype, device)
            self._link = meeting.link(self._stage, queue_depth(config))

    def fit_context(self) -> int:
        """Return the longest context, in tokens, of which one request fits beside the weights."""
        self._memory = memory_planner(
            self.config,
            self._path,
            self.spec,
            self.dtype,
            self.device,
            explicit_len=self._explicit_len,
            stage=self._stage,
            drafts=self._draft,
            shares_gpu=self._shares_device,
        ).shortened()
        return self._memory.limits.max_model_len

    def load(self, max_model_len: int) -> None:
        """Build the model for contexts of up to `max_model_len` tokens, and start to load its weights."""
        limits = replace(self._memory.limits, max_model_len=max_model_len)
        memory = self._memory = replace(self._memory, limits=limits)
        # Position tables and token columns are allocated for the context that is served, not for the model's longest.
        spec = self.spec = replace(self.spec, max_model_len=max_model_len)
        config, backend, kernels = self.config, self.backend, self._kernels
        model, checkpoint = load_model(
            config,
            self._path,
            spec,
            backend=backend,
            kernels=kernels,
            parallel=self._parallel,
            stage=self._stage,
            experts=self._experts,
            device=self.device,
            dtype=self.dtype,
        )
        self._checkpoints: list[Checkpoint] = []
        self._keep(checkpoint)
        env = Env(checkpoint, self._parallel, backend, self.device, self.dtype, kernels, spec.quantization)
        loader = DraftLoader(config, self._draft, model, env, self._keep)
        speculation = pick_speculation(config, loader)
        launch = pick_launch(
            config, memory, backend, kernels, drafts=speculation.tokens, depth=queue_depth(config)
        )
        self.worker = Worker(model, backend, memory, launch, speculation, self._link)

    def _keep(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint until its weights are loaded."""
        self._loading.enter_context(closing(checkpoint))
        self._checkpoints.append(checkpoint)

    def compile(self) -> None:
        """Compile the kernels of common steps. Ranks may find different kernels on disk, so they do not communicate."""
        with self._parallel.communicator.muted(), self._link.muted():
            self.worker.compile_kernels(self._compilers)

    def measure(self) -> int:
        """Return the longest context that fits into what the largest step leaves for the KV cache."""
        self._kv_budget = self._memory.kv_budget(self.worker.measure())
        return self._memory.size_kv(self._kv_budget).max_model_len

    def count_snapshots(self, max_model_len: int) -> int:
        """Return the number of snapshots of states that fit if contexts have up to `max_model_len` tokens."""
        memory = self._memory = self._memory.limited(max_model_len)
        # A stage without such layers does not limit the others.
        return memory.size_kv(self._kv_budget).num_snapshots if memory.state_bytes else 1 << 30

    def count_blocks(self, snapshots: int) -> int:
        """Return the number of KV blocks that fit beside so many snapshots."""
        size = replace(self._memory, snapshots=snapshots).size_kv(self._kv_budget)
        # All stages number the same rows, also those whose layers keep no state.
        self.size = replace(size, num_snapshots=snapshots if self.has_states else 0)
        return self.size.num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Allocate `num_blocks` KV blocks."""
        self.size = replace(self.size, num_blocks=num_blocks)
        self._memory.check_kv_fits(self.size, self.worker.reserved_bytes)
        self.runner = self.worker.allocate(self.size, self.exports.memory if self.exports else None)

    def least_pages(self) -> int:
        """Return minus the pages into which this rank cuts a snapshot: ranks agree on the smallest result."""
        state_bytes = self._memory.state_bytes if self.size.num_snapshots else 0
        return -snapshot_pages(self.config, state_bytes, self.size.block_bytes)

    @property
    def first_page(self) -> int:
        """Return the number of the first page of a snapshot, behind the blocks and the dummy block."""
        return self.size.num_blocks + 1

    def host_rows(self, pages: int) -> int:
        """Return the rows of host memory for this rank's part of evicted blocks, and of snapshots of `pages` pages."""
        self.pages = pages
        parts = self.worker.snapshots(self.size) if pages else []
        self._snapshots = SnapshotBytes(parts, pages, self.first_page)
        self._row_bytes = max(self.size.block_bytes, self._snapshots.page_bytes)
        return host_rows(self.config, self._row_bytes)

    def open_tiers(self, rows: int) -> None:
        """Open `rows` rows of host memory, and the files of kv_disk, for evicted blocks."""
        if not rows:
            return
        blocks = BlockBytes(self.worker.blocks)
        fingerprint = block_fingerprint(
            self.config,
            self._path,
            self.spec,
            groups=self._memory.groups,
            backend=self.backend.name,
            dtype=self.dtype,
            rank=self._place.rank,
            pages=self.pages,
        )
        self.mover = open_mover(
            self.config, blocks, self._snapshots, rows, self._row_bytes, self.device, fingerprint
        )

    def shared_blocks(self) -> SharedBlocks | None:
        """Return the description of the blocks for a decode engine; None unless this is a prefill engine."""
        return None if self.exports is None else self._describe_blocks(BlockBytes(self.worker.blocks))

    def _describe_blocks(self, blocks: BlockBytes) -> SharedBlocks:
        groups = [(len(group.layers), group.window) for group in self.size.groups]
        return describe_blocks(self._transport, blocks, self.size.block_size, groups, self.exports)

    def open_peers(self) -> PeerMover:
        """Return a mover that copies blocks of prefill engines."""
        blocks = BlockBytes(self.worker.blocks)
        reader = open_reader(self._transport, blocks, self.device)
        return PeerMover(self._describe_blocks(blocks), reader, self.guard)

    def stored_blocks(self) -> tuple[int, list[BlockKey]]:
        """Return the most files that kv_disk may hold, and the keys of those that exist, oldest first."""
        found = self.mover.found() if self.mover is not None else []
        return disk_blocks(self.config, self._row_bytes), found

    def rehearse(self) -> None:
        """Run a first request and capture common steps. A CPU has nothing to compile or capture."""
        if self.device.type == "cuda":
            self.worker.rehearse(self.runner, self.size)

    def finish(self) -> None:
        """Wait until the weights are loaded.

        Raises:
            ModelError: if the checkpoint holds tensors that the model does not use, or cannot be read.
        """
        for checkpoint in self._checkpoints:
            checkpoint.finish()

    def close(self) -> None:
        """End the loading of weights. The engine may be in use."""
        self._loading.close()

    # By name, each with its argument, whether it uses that or not.
    PHASES: ClassVar[dict[str, Callable[[Rank, int], int | None]]] = {
        "connect": connect,
        "fit_context": lambda rank, _: rank.fit_context(),
        "load": load,
        "compile": lambda rank, _: rank.compile(),
        "measure": lambda rank, _: rank.measure(),
        "count_snapshots": count_snapshots,
        "count_blocks": count_blocks,
        "allocate": allocate,
        "least_pages": lambda rank, _: rank.least_pages(),
        "host_rows": host_rows,
        "open_tiers": open_tiers,
        "rehearse": lambda rank, _: rank.rehearse(),
        "finish": lambda rank, _: rank.finish(),
    }
