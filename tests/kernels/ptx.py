"""Run the PTX of kernels that convert codes on a CPU, where Triton's interpreter does not run it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch

Words = np.ndarray  # uint32


def run(program: str, inputs: list[Words], outputs: int) -> list[Words]:
    """Run a program of 32-bit registers, and return its first `outputs` operands.

    Args:
        program: PTX as in `tl.inline_asm_elementwise`. Operands are first the outputs, then the inputs.
        inputs: uint32, of one shape.
        outputs: number of output operands.

    Raises:
        KeyError: the program has an instruction that is not known here, or reads what was not written.
    """
    registers = {f"${outputs + i}": words for i, words in enumerate(inputs)}
    for line in re.split(r";\s*", program.strip().strip("{}")):
        words = line.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        operation, to, *names = words
        shape = inputs[0].shape
        registers[to] = _OPERATIONS[operation](
            *(registers[n] if n in registers else np.full(shape, int(n, 0), np.uint32) for n in names)
        )
    return [registers[f"${i}"] for i in range(outputs)]


def halves(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Return the two 16-bit numbers of each word, [..., 2], the lower one first."""
    return torch.from_numpy(words.copy().view(np.int16).reshape(*words.shape, 2)).view(dtype)


def _packed(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., Words]:
    """Return `function` of two 16-bit numbers in each word, computed in float64 and rounded once."""

    def apply(*words: Words) -> Words:
        result = function(*(halves(word, dtype).double() for word in words)).to(dtype)
        return result.view(torch.int16).numpy().view(np.uint32).reshape(words[0].shape)

    return apply


def _permute(a: Words, b: Words, selector: Words) -> Words:
    both = [(word >> (8 * i)) & 255 for word in (a, b) for i in range(4)]
    chosen = int(selector.flat[0])
    assert not chosen & 0x8888, "copies of a sign bit are not known here"
    picked = [both[(chosen >> (4 * i)) & 7] << (8 * i) for i in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def _and_or(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert int(table.flat[0]) == 0xEA, "only (a & b) | c is known here"
    return (a & b) | c


_OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, by: a << by,
    "shr.u32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": _and_or,
    "prmt.b32": _permute,
    "fma.rn.bf16x2": _packed(lambda a, b, c: a * b + c, torch.bfloat16),
    "sub.f16x2": _packed(lambda a, b: a - b, torch.float16),
}
