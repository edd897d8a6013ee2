"""Recognition of out-of-memory errors of the device and the host."""

from __future__ import annotations

import torch

# From the CPU allocator, C++, oneDNN, and driver calls that bypass the allocator.
_MESSAGES = ("can't allocate memory", "std::bad_alloc", "out of memory", "out_of_memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error`, or an error during whose handling it was raised, reports a lack of memory."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES):
            return True
        error = error.__context__
    return False
