"""What attention layers keep of each token, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}


# Dtypes of codes, by the name of `kv_cache_dtype`.
CODE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class KVCodes:
    """A format of KV entries with fewer bits: a number is a code times a scale."""

    dtype: str  # of codes, a value of CODE_DTYPES
    static: bool = (
        False  # scales of whole layers come from the checkpoint; else each head of a token has its own
    )


@dataclass(frozen=True, slots=True)
class KVTensor:
    """The part of a token's KV entry that one tensor holds: `heads` vectors of `dim` numbers."""

    heads: int
    dim: int
    dtype: str  # name of a torch.dtype, one of DTYPE_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return self.heads * self.dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV entry of a token in one layer, and its lifetime. A layer declares it, and its attention back end reads it.

    Most layers have two tensors, keys and values of all KV heads. If these are codes with a scale for each head of a
    token, two tensors of scales follow. A layer with a compressed cache may have one tensor.
    """

    tensors: tuple[KVTensor, ...]
    window: int | None = None  # entries that many tokens back are never read again; None: all are
    chunked: bool = (
        False  # a token reads its own chunk of `window` tokens, instead of the last `window` tokens
    )
    is_shared: bool = False  # other layers, which keep nothing of a token themselves, read the entries too

    @classmethod
    def keys_and_values(
        cls, heads: int, dim: int, dtype: str, window: int | None = None, codes: KVCodes | None = None
    ) -> KVLayout:
        """Return the layout of plain attention, one tensor of keys and one of values.

        Args:
            heads, dim: KV heads, and numbers of each.
            dtype: of plain entries.
            window: as in the class.
            codes: stored instead of numbers of `dtype`; None: plain numbers.
        """
        tensor = KVTensor(heads, dim, codes.dtype if codes else dtype)
        scales = (KVTensor(heads, 1, "float32"),) * 2 if codes and not codes.static else ()
        return cls((tensor, tensor, *scales), window)

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return sum(tensor.token_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that a layer keeps of each request, such as a convolution window or a recurrent matrix."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # name of a torch.dtype, one of DTYPE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes per request."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The state of a request in one layer: fixed-size tensors, however many tokens the request has."""

    tensors: tuple[StateTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes per request."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table, because all keep their entries equally long."""

    layers: tuple[int, ...] = ()  # indices
    window: int | None = None  # as in `KVLayout`

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that a token at `position`, or any later one, reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size

    def most_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks that a request of `tokens` KV entries holds at once.

        Args:
            tokens: KV entries of the request.
            step_tokens: most tokens of the request in one step, all of which attend before any block is released.
            block_size: tokens per block.
        """
        whole = -(-tokens // block_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + step_tokens) // block_size) + 1)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group, in the order of its tokens.

    Blocks before index `first` are behind the window and released. Their entries in `blocks` are meaningless.
    """

    blocks: list[int]
    first: int = 0

    @property
    def held(self) -> list[int]:
        """Blocks that the request holds. Read-only."""
        return self.blocks[self.first :] if self.first else self.blocks
