"""The order in which kernels read the numbers of a quantised weight.

Graphs are captured while threads still read the checkpoint. So the memory that kernels read is allocated when a product
is built, and never moves: it is filled once the checkpoint is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.kernels.matmul.packed import PackedTensors, reorder_nibbles
from quire.quant.forms import IntGroupWeight, QuantisedWeight


@dataclass(frozen=True, slots=True)
class KernelOrder:
    """A weight [outputs, inputs], or a stack [experts, outputs, inputs], as it is stored and as kernels read it.

    Args:
        stored: the tensors that the checkpoint fills.
        ordered: the same codes, and memory for scales, zeros and offsets, [groups, outputs].
        signs: codes of 8 bits are unsigned in the checkpoint, and become signed.
    """

    stored: PackedTensors
    ordered: PackedTensors
    signs: bool

    @classmethod
    def of(cls, stored: PackedTensors, form: QuantisedWeight) -> KernelOrder:
        """Allocate what kernels read of a weight, whose tensors are `stored`."""
        signs = isinstance(form, IntGroupWeight) and not stored.half
        scale, zero, offset = stored.scale, stored.zero, stored.offset
        dtype = torch.bfloat16 if scale.dtype == torch.float8_e4m3fn else scale.dtype
        shifts = signs and (offset is not None or zero is not None)  # zeros of unsigned codes become offsets
        new_offset = _transposed(scale, torch.float32) if shifts else None
        ordered = replace(
            stored,
            scale=scale.flatten(-2) if stored.group == 0 else _transposed(scale, dtype),
            zero=None if zero is None or shifts else _transposed(zero, zero.dtype),
            offset=new_offset if offset is None or shifts else _transposed(offset, offset.dtype),
        )
        return cls(stored, ordered, signs)

    def fill(self) -> None:
        """Put codes into the kernels' order in place, and fill the ordered scales, zeros and offsets."""
        stored, ordered = self.stored, self.ordered
        scale, zero, offset = stored.scale, stored.zero, stored.offset
        if stored.half:
            stack = stored.codes.view(-1, *stored.codes.shape[-2:])
            for codes in stack:  # one expert at a time, because it takes several times the memory
                codes.copy_(reorder_nibbles(codes, stored.half))
        elif self.signs:
            stored.codes.bitwise_xor_(128)
            if offset is not None:
                offset = offset.float() + 128 * scale.float()
            elif zero is not None:
                offset = scale.float() * (128 - zero.float())
        if stored.group:
            ordered.scale.copy_(scale.mT)
        for to, source in ((ordered.zero, zero), (ordered.offset, offset)):
            if to is not None and source is not None:
                to.copy_(source.mT)


def _transposed(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate contiguous memory for the transposed matrices of `like`."""
    return torch.empty_like(like.mT, dtype=dtype, memory_format=torch.contiguous_format)
