"""Division of a device's memory among weights, slot columns, the largest step and KV blocks.

Pure arithmetic over measured figures, so that `quire doctor` shows the numbers that the start-up uses.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from quire.models.spec import ModelSpec
from quire.sampling.logprobs import scoring_bytes
from quire.types import ConfigError, KVGroup, StateLayout
from quire.worker.memory.host_memory import host_memory
from quire.worker.memory.kv_groups import LayerGroups

# Snapshots of states take at most one part in so many of the memory for blocks, and so many of them for each slot.
_SNAPSHOT_SHARE = 8
_SNAPSHOTS_PER_SLOT = 4

log = logging.getLogger("quire")

_MIN_AUTO_LEN = 256  # tokens; an automatic context shorter than this is an error, not a fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Upper bounds of a step and of a request."""

    max_num_seqs: int  # rows of a step; also the number of request slots
    max_num_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of a request, prompt and output


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Partition of the KV cache into blocks."""

    paged_size: int | None  # tokens per block; None: one block holds a whole context
    keeps_kv: bool = True  # False: nothing is kept between steps

    @property
    def paged(self) -> bool:
        return self.paged_size is not None

    def block_size(self, max_len: int) -> int:
        """Return the tokens per block if requests have up to `max_len` tokens."""
        return self.paged_size or max_len


@dataclass(frozen=True, slots=True)
class KVSize:
    """Size of the KV cache: `num_blocks` blocks of `block_size` tokens and `block_bytes` bytes each.

    Layers with a recurrence keep `state_bytes` of each slot and of each snapshot, outside of the blocks.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    groups: tuple[KVGroup, ...] = (KVGroup(),)  # of layers; a block serves one of them
    state_bytes: int = 0
    num_snapshots: int = 0


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of the device's memory."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else host_memory()


def gpu_memory(device: torch.device) -> int:
    """Return the total bytes of a GPU, or 0 for a CPU."""
    return free_memory(device)[1] if device.type == "cuda" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlanner:
    """Division of one device's memory for one model.

    Slot columns come out of the budget for KV blocks, unless `kv_cache_memory` is set: then that number is the budget
    of the blocks alone.
    """

    model: str  # name of the model, for error messages
    spec: ModelSpec
    weight_bytes: int
    dtype: torch.dtype  # of activations and KV entries
    device: torch.device
    groups: LayerGroups
    limits: StepLimits  # max_model_len: the longest context to serve; `size_kv` may lower it
    layout: BlockLayout
    explicit_len: bool  # the user set max_model_len, so it is never lowered
    kv_cache_memory: int | None  # bytes for KV blocks; None: measured
    memory_utilization: float  # share of the device's memory that may be used
    states: tuple[StateLayout, ...] = ()  # by layer
    states_per_slot: int = 1  # 1 + most draft tokens, whose states are kept until they are verified
    snapshots: int | None = 0  # rows for snapshots of states; None: as many as are useful
    ranks: int = 1  # that share the model, each with its own planner; ranks on CPUs also share the memory
    held: float = 1.0  # share of the weights that this rank holds
    draft_bytes: int = 0  # weights of the network that drafts, on this rank
    shares_gpu: bool = False  # with engines that start now and divide memory_utilization among them

    def check_weights_fit(self) -> int:
        """Return the bytes of the weights, with those of the network that drafts.

        Raises:
            ConfigError: if they exceed the free memory of the device.
        """
        needed = int(self.weight_bytes * self.held) + self.draft_bytes
        free, total = self._free_memory()
        if needed > free:
            beside = " and of what drafts" if self.draft_bytes else ""
            raise ConfigError(
                f"the weights of {self.model}{beside} need {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} of "
                f"{total / 2**30:.1f} GiB are free on {self.device}; choose a smaller model or dtype, or free memory"
            )
        return needed

    def kv_budget(self, reserved: int) -> int:
        """Return the bytes for KV blocks and slot columns: what memory_utilization leaves after `reserved` bytes.

        On a CPU other programs need memory too, so only half of that share is used.

        Raises:
            ConfigError: if nothing is left.
        """
        if self.kv_cache_memory is not None:
            return self.kv_cache_memory
        free, total = self._free_memory()
        if self.device.type == "cuda":
            if self.shares_gpu:  # what the others have taken so far depends on who was faster
                free = total - torch.cuda.memory_reserved(self.device)
            budget = int(free - reserved - (1 - self.memory_utilization) * total)
        else:
            budget = int((free - reserved) * self.memory_utilization / 2)
        if budget <= 0:
            raise ConfigError(
                f"no memory is left for the KV cache: {free >> 20} of {total >> 20} MiB are free on {self.device}, "
                f"{reserved >> 20} MiB of which weights and steps need, and memory_utilization is "
                f"{self.memory_utilization}; free memory, raise memory_utilization or lower max_num_batched_tokens"
            )
        return budget

    def column_bytes(self, max_len: int) -> int:
        """Return the bytes of the slot columns: four for each token, and for each block, that a request may have."""
        slots, block = self.limits.max_num_seqs + 1, min(self.layout.block_size(max_len), max_len)
        return 4 * slots * (max_len + 1 + len(self.groups.groups) * -(-max_len // block))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the state of one request."""
        return sum(layout.num_bytes for layout in self.states)

    def fixed_state_bytes(self) -> int:
        """Return the bytes of the states of all slots."""
        return (self.limits.max_num_seqs * self.states_per_slot + 1) * self.state_bytes

    def sampling_bytes(self, logit_rows: int | None = None) -> int:
        """Return the most that a step holds at once after its model has run.

        That is `logit_rows` rows of logits (by default one for each request), a float32 copy that penalties and masks change, the rows with log-probabilities,
        and the temporary memory of scoring them.
        """
        rows, tokens = logit_rows or self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        vocab_size, logit_bytes = self.spec.vocab_size, self.dtype.itemsize
        return rows * vocab_size * (2 * logit_bytes + 4) + scoring_bytes(
            max(rows, tokens), vocab_size, logit_bytes
        )

    def cpu_step_bytes(self, logit_rows: int | None = None) -> int:
        """Estimate the bytes of the largest step on a CPU, where measuring them would take as long as the step."""
        spec = self.spec
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        per_token = 4 * spec.hidden_size + 2 * heads + 3 * spec.intermediate_size
        return self.limits.max_num_batched_tokens * per_token * self.dtype.itemsize + self.sampling_bytes(
            logit_rows
        )

    def fit_context(self, budget: int) -> int:
        """Return the longest context, at most `limits.max_model_len`, of which one request fits into `budget` bytes.

        Raises:
            ConfigError: if an explicit max_model_len does not fit, or not even a short automatic one.
        """
        max_len, column = self.limits.max_model_len, self._columns_in_budget(self.limits.max_model_len)
        budget -= self._states_in_budget()

        def needed(tokens: int) -> int:
            return self._request_bytes(tokens) + -(-column * tokens // max_len)

        if needed(max_len) <= budget:
            return max_len
        room = bisect_right(range(1, max_len + 1), budget, key=needed)
        if budget < 0:
            raise ConfigError(
                f"the states of max_num_seqs {self.limits.max_num_seqs} requests need "
                f"{self._states_in_budget() >> 20} MiB, {-budget >> 20} MiB more than are available; lower max_num_seqs"
            )
        if self.explicit_len or room < min(_MIN_AUTO_LEN, max_len):
            raise ConfigError(
                f"max_model_len {max_len} needs {needed(max_len) >> 20} MiB of KV cache, but "
                f"{budget >> 20} MiB are available; lower max_model_len or raise kv_cache_memory"
            )
        block = self.layout.paged_size
        return room if block is None else max(room // block * block, 1)

    def shortened(self) -> MemoryPlanner:
        """Return a planner whose `limits.max_model_len` fits into the memory that the weights leave.

        Raises:
            ConfigError: if the weights do not fit, or no context does.
        """
        max_len = self.fit_context(self.kv_budget(self.check_weights_fit()))
        return self.limited(max_len)

    def size_kv(self, budget: int) -> KVSize:
        """Return the number and size of the KV blocks that fit into `budget` bytes.

        Raises:
            ConfigError: if not even one request of full length fits.
        """
        max_len = self.fit_context(budget)
        block_size = self.layout.block_size(max_len)
        block_bytes = self.groups.token_bytes * block_size
        per_request = self.request_blocks(max_len)
        budget = max(budget - self._columns_in_budget(max_len) - self._states_in_budget(), 0)
        snapshots = self._num_snapshots(budget)
        if self.kv_cache_memory is None:
            budget -= snapshots * self.state_bytes
        room = budget // max(block_bytes, 1)  # blocks of a model without attention take no memory
        useful = self.limits.max_num_seqs * per_request
        if self.layout.paged and self.device.type == "cuda":
            useful *= 2  # for the prefix cache; on a CPU that memory is left to other programs
        blocks = min(room, useful)
        if blocks < per_request:  # rounding up to whole blocks
            raise ConfigError(
                f"one request of max_model_len {max_len} needs {per_request} blocks of {block_bytes} bytes, but "
                f"kv_cache_memory holds {room}; lower max_model_len or raise kv_cache_memory"
            )
        return KVSize(
            blocks, block_size, block_bytes, max_len, self.groups.groups, self.state_bytes, snapshots
        )

    def limited(self, max_len: int) -> MemoryPlanner:
        """Return this planner for contexts of up to `max_len` tokens."""
        return replace(self, limits=replace(self.limits, max_model_len=max_len))

    def check_kv_fits(self, size: KVSize, reserved: int) -> None:
        """Raise ConfigError if an explicit kv_cache_memory does not fit beside `reserved` bytes.

        On a CPU, where a block takes memory when it is first written, log a warning instead.
        """
        if self.kv_cache_memory is None:
            return
        blocks = size.num_blocks * size.block_bytes
        columns, free = self.column_bytes(size.max_model_len), self._free_memory()[0]
        columns += self.fixed_state_bytes() + size.num_snapshots * self.state_bytes
        if blocks + columns + reserved <= free:
            return
        message = (
            f"the KV cache needs {blocks >> 20} MiB, slot columns and states {columns >> 20} MiB and a step "
            f"{reserved >> 20} MiB, but {free >> 20} MiB are free on {self.device}; "
            "lower kv_cache_memory, max_num_seqs or max_num_batched_tokens"
        )
        if self.device.type == "cuda":
            raise ConfigError(message)
        log.warning("%s", message)

    def request_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` tokens holds at once."""
        block_size = self.layout.block_size(tokens)
        return self.groups.request_blocks(tokens, self.limits.max_num_batched_tokens, block_size)

    def _free_memory(self) -> tuple[int, int]:
        """Return the free and the total bytes that this rank may count on."""
        free, total = free_memory(self.device)
        return (free, total) if self.device.type == "cuda" else (free // self.ranks, total // self.ranks)

    def _request_bytes(self, tokens: int) -> int:
        """Return the bytes of what `request_blocks` counts, without rounding to blocks."""
        return self.groups.token_bytes * self.groups.request_blocks(
            tokens, self.limits.max_num_batched_tokens, 1
        )

    def _num_snapshots(self, budget: int) -> int:
        """Return the number of snapshots of states, for which there are `budget` bytes together with the blocks."""
        if not self.state_bytes:
            return 0
        if self.snapshots is not None:
            return self.snapshots
        room = budget // (_SNAPSHOT_SHARE * self.state_bytes)
        return max(1, min(room, _SNAPSHOTS_PER_SLOT * self.limits.max_num_seqs))

    def _states_in_budget(self) -> int:
        return 0 if self.kv_cache_memory is not None else self.fixed_state_bytes()

    def _columns_in_budget(self, max_len: int) -> int:
        return 0 if self.kv_cache_memory is not None else self.column_bytes(max_len)
