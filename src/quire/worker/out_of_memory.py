"""Recognising errors that mean: the device, or the host, has no memory for this."""

from __future__ import annotations

import torch

# Of the CPU allocator, of C++, of oneDNN, of a driver call that the allocator did not make.
_MESSAGES = ("can't allocate memory", "std::bad_alloc", "out of memory", "out_of_memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error`, or one during whose handling it was raised, says that memory is short."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES):
            return True
        error = error.__context__
    return False
