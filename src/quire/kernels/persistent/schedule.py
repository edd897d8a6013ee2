"""The schedule of a decode step: which sizes the kernel is compiled for, and what each block does in each stage.

The kernel derives the same tasks from the constants of a `Schedule` (parts.h, attention.h); `stages` lists them for
documentation and tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

WeightFormat = Literal["bf16", "fp8", "fp8-block", "int4"]
_FORMATS: tuple[WeightFormat, ...] = ("bf16", "fp8", "fp8-block", "int4")  # as `Format` in parts.h
_BITS = {"bf16": 16, "fp8": 8, "fp8-block": 8, "int4": 4}

INT4_GROUP = 128  # columns with one scale
TILE = 8  # rows of a weight that are multiplied together
_LARGEST_SPLIT = 16
_MOST_SLOTS, _LEAST_SLOTS = 64, 4
_MOST_BLOCK_COLUMNS = 16384  # whose scales of blocks a warp's lanes hold
_SMALL_INPUT = 8192  # columns times rows: measured on an H200
_SHARED_BYTES = 232_448 - 1024  # of a block on Hopper, without what the driver takes
MOST_ROWS = 8  # rows of a matrix unit's fragment


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a dense decoder, and the format of its layers' weights. The head has bf16."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    vocab: int  # 0: the kernel ends with the hidden states
    eps: float
    scale: float  # of scores
    qk_norm: bool = False
    qkv_bias: bool = False
    weights: WeightFormat = "bf16"

    @property
    def bits(self) -> int:
        """Return the bits of a number of a layer's weight."""
        return _BITS[self.weights]


@dataclass(frozen=True, slots=True)
class StageTasks:
    """The tasks of one stage of a layer."""

    name: str
    tasks: int
    waits_for: str  # the mailbox that the stage reads
    sends_to: str
    weight_bytes: int


@dataclass(frozen=True)
class Schedule:
    """The constants of one compiled kernel."""

    sizes: DecoderSizes
    rows: int
    block_size: int  # of the KV cache
    blocks: int
    warps: int = 8  # that multiply
    pieces: int = 4  # of 64 bytes of a row for each warp, in a slot of the ring
    trace: bool = False
    most_slots: int = _MOST_SLOTS

    @property
    def pace(self) -> int:
        """Return the least cycles between copies to two slots. Measured on an H200: FP8 and INT4 are faster without."""
        return 500 if self.sizes.weights == "bf16" else 0

    @property
    def chunk_bytes(self) -> int:
        """Return the bytes of a row in a slot."""
        return self.warps * self.pieces * 64

    def _padded(self, columns: int, bits: int) -> int:
        """Return columns rounded up to whole slots."""
        chunk = self.chunk_bytes * 8 // bits
        return -(-columns // chunk) * chunk

    @property
    def share(self) -> int:
        """Return into how many tasks the query heads of a KV head are divided."""
        return -(-self.sizes.heads // self.sizes.kv_heads // 4)

    @property
    def queries(self) -> int:
        """Return the query heads of an attention task."""
        return -(-(self.sizes.heads // self.sizes.kv_heads) // self.share)

    @property
    def splits(self) -> int:
        """Return the splits of a row's older tokens: a power of two that leaves no block with two tasks."""
        most = self.blocks // (self.rows * self.sizes.kv_heads * self.share)
        return min(1 << max(most, 1).bit_length() - 1, _LARGEST_SPLIT)

    @property
    def attention_tasks(self) -> int:
        return self.rows * self.sizes.kv_heads * self.share * self.splits

    @property
    def widest(self) -> int:
        """Return the columns of the widest input of a product."""
        return max(self.sizes.hidden, self.sizes.heads * self.sizes.head_dim, self.sizes.intermediate)

    @property
    def copies(self) -> int:
        """Return the copies of the mailboxes that all blocks read."""
        return 1 if self.rows * self.widest <= _SMALL_INPUT else 2

    @property
    def qkv_rows(self) -> int:
        return (self.sizes.heads + 2 * self.sizes.kv_heads) * self.sizes.head_dim

    @property
    def mail_words(self) -> int:
        """Return the 64-bit words of all mailboxes (parts.h lists them)."""
        s = self.sizes
        halves = 2 * s.hidden + self.qkv_rows + s.heads * s.head_dim + s.intermediate
        return self.copies * (
            self.rows * halves // 2 + self.attention_tasks * self.queries * (s.head_dim + 2)
        )

    @property
    def group(self) -> int:
        """Return how many tiles are summed over warps together."""
        return max(8 // self.rows, 4)

    @property
    def slot_bytes(self) -> int:
        scales = self.chunk_bytes // 16 if self.sizes.weights == "int4" else 0
        return TILE * (self.chunk_bytes + 64 + scales)

    @property
    def _other_bytes(self) -> int:
        """Return the shared memory beside the ring, with barriers of up to 64 slots."""
        s = self.sizes
        heads = (self.queries + 2) * s.head_dim * 2
        attended = self.warps * self.queries * (s.head_dim + 2) * 4
        sums = 2 * self.warps * (max(self.rows, 4) * self.group * TILE + self.rows) * 4
        stream = -(-s.hidden // TILE // self.blocks) * self.rows * TILE * 4
        columns = max(self._padded(self.widest, s.bits), self._padded(s.hidden, 16))
        inputs = columns * self.rows * 2
        inputs += inputs // 64 if s.weights == "int4" else 0  # sums of groups
        return 1024 + inputs + heads + max(attended, sums) + stream + 112 * s.layers + 160

    @cached_property
    def slots(self) -> int:
        """Return the slots of the ring: as many as shared memory holds."""
        return min((_SHARED_BYTES - self._other_bytes) // self.slot_bytes, self.most_slots)

    @property
    def fits(self) -> bool:
        """Return whether shared memory holds the inputs of the rows beside some slots."""
        return self.slots >= _LEAST_SLOTS

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a block."""
        return self.slots * self.slot_bytes + self._other_bytes

    @property
    def threads(self) -> int:
        return (self.warps + 1) * 32

    def defines(self) -> dict[str, str]:
        """Return the constants that the kernel is compiled with."""
        s = self.sizes
        values = dict(
            HIDDEN=s.hidden, HEADS=s.heads, KV_HEADS=s.kv_heads, DIM=s.head_dim, INTER=s.intermediate, LAYERS=s.layers,
            VOCAB=s.vocab, QK_NORM=int(s.qk_norm), QKV_BIAS=int(s.qkv_bias), EPS=s.eps, SCALE=s.scale,
            FORMAT=_FORMATS.index(s.weights), ROWS=self.rows,
            BLOCK_SIZE=self.block_size, BLOCKS=self.blocks, WARPS=self.warps, PIECES=self.pieces,
            CONSUMERS=self.warps * 32, THREADS=self.threads, SLOTS=self.slots, PACE=self.pace,
            GROUP=self.group,
            COPIES=self.copies, SPLITS=self.splits, SHARED=self.shared_bytes, TRACE=int(self.trace),
        )  # fmt: skip
        return {name: repr(value) for name, value in values.items()}

    def stages(self) -> list[StageTasks]:
        """Return the stages of a layer, and the head's, in the order in which a block runs them."""
        s = self.sizes

        def product(name: str, rows: int, columns: int, waits_for: str, sends_to: str) -> StageTasks:
            bits = 16 if name == "head" else s.bits
            scales = rows * columns // INT4_GROUP * 4 if bits == 4 else 0
            return StageTasks(name, rows // TILE, waits_for, sends_to, rows * columns * bits // 8 + scales)

        attended = s.heads * s.head_dim
        return [
            product("qkv", self.qkv_rows, s.hidden, "stream", "qkv"),
            StageTasks("attention", self.attention_tasks, "qkv", "attended", 0),
            product("out", s.hidden, attended, "attended", "middle"),
            product("gate_up", 2 * s.intermediate, s.hidden, "middle", "gated"),
            product("down", s.hidden, s.intermediate, "gated", "stream"),
            product("head", s.vocab, s.hidden, "stream", "logits"),
        ]


def takes(sizes: DecoderSizes) -> str:
    """Return why the kernel does not take these sizes; empty if it does."""
    if sizes.head_dim not in (64, 128):
        return f"heads have {sizes.head_dim} dimensions, not 64 or 128"
    # Copies have multiples of 16 bytes, a slot has whole blocks of scales, and two groups of INT4 share bytes.
    multiple = {"bf16": TILE, "fp8": 16, "fp8-block": 512, "int4": 2 * INT4_GROUP}[sizes.weights]
    for name, value, least in (
        ("hidden", sizes.hidden, multiple),
        ("intermediate", sizes.intermediate, multiple),
        ("heads times head_dim", sizes.heads * sizes.head_dim, multiple),
        ("vocab", sizes.vocab, TILE),
    ):
        if value % least:
            return f"{name} {value} is not a multiple of {least}"
        if sizes.weights == "fp8-block" and name != "vocab" and value > _MOST_BLOCK_COLUMNS:
            return f"{name} {value} exceeds {_MOST_BLOCK_COLUMNS} with scales of blocks"
    return ""
