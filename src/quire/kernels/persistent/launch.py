"""`DecodeStep`: the compiled kernel of a schedule, loaded onto a device, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from quire.kernels.driver import LoadedKernel
from quire.kernels.nvrtc import compiled
from quire.kernels.persistent.schedule import Schedule

_FOLDER = Path(__file__).parent
_SOURCES = ("device.h", "parts.h", "ring.h", "multiply.h", "attention.h", "step.cu")


def source(replaced: dict[str, str] | None = None) -> str:
    """Return the CUDA C++ of the kernel as one text; `replaced` maps names of its files to other contents."""
    texts = ((replaced or {}).get(name) or (_FOLDER / name).read_text(encoding="utf-8") for name in _SOURCES)
    return "\n".join(texts)


def compile_options(schedule: Schedule, architecture: str) -> tuple[str, ...]:
    """Return NVRTC's options for a kernel; `architecture` is like sm_90a."""
    defines = (f"-D{name}={value}" for name, value in schedule.defines().items())
    return (f"--gpu-architecture={architecture}", "-std=c++17", "-default-device", *defines)


def compile_ahead(schedule: Schedule, architecture: str = "sm_90a") -> bytes:
    """Return the cubin of a schedule's kernel. Compiling takes seconds, reading the cache milliseconds."""
    return compiled(source(), compile_options(schedule, architecture))


class Mailbox:
    """Memory through which blocks exchange results, and the count of launches, which makes their tags unique.

    Kernels that run one after the other may share it. Allocate it outside of any capture, because it must not be zeroed
    again.
    """

    def __init__(self, schedules: Sequence[Schedule], device: torch.device) -> None:
        words = max(schedule.mail_words for schedule in schedules)
        self.words = torch.zeros(words, dtype=torch.int64, device=device)
        self.counters = torch.zeros(2, dtype=torch.int32, device=device)


class DecodeStep:
    """The kernel of a schedule on one device.

    Launches are counted on the device, so a launch can be captured and replayed.
    """

    def __init__(self, schedule: Schedule, binary: bytes, mailbox: Mailbox, device: torch.device) -> None:
        self.schedule, self._mailbox = schedule, mailbox
        self._kernel = LoadedKernel(binary, "decode_step", schedule.shared_bytes, device)

    def __call__(self, *arguments: torch.Tensor | int) -> None:
        """Launch a step on the current stream.

        Args:
            arguments: layers, embedding, final norm, head, ids, positions, KV slots, slots, block table and angles,
                hidden states and logits to write, and the strides of a row of the block table and of a block (step.cu).
        """
        before, after = arguments[:10], arguments[10:]
        values = [
            _argument(value) for value in (*before, self._mailbox.words, self._mailbox.counters, *after)
        ]
        # Blocks poll what others send. Without `together`, two such kernels could each hold a part of the device.
        self._kernel.launch(
            self.schedule.blocks, 1, self.schedule.threads, values, dependent=False, together=True
        )


def _argument(value: torch.Tensor | int) -> ctypes.c_uint64 | ctypes.c_int:
    return ctypes.c_uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else ctypes.c_int(value)
