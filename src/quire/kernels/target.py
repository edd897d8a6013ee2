"""`Target`: the properties of a GPU that decide which kernels run and with which tile sizes.

Sizes are tuned for Hopper (132 multiprocessors, 232,448 bytes of shared memory per program). Other GPUs follow the
same rules with their own figures, and take the first tile that fits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

log = logging.getLogger("quire")

_BESIDE_STAGES = 4096  # bytes of shared memory that a pipelined kernel takes beside its stages
OLDEST = 75  # the lowest compute capability that kernels support, 7.5: Turing


@dataclass(frozen=True, slots=True)
class Target:
    """The properties of one GPU."""

    name: str
    capability: int  # 90 is compute capability 9.0
    shared_bytes: int  # limit of shared memory per program (CUDA's opt-in limit per block)
    sms: int  # multiprocessors

    @property
    def has_bf16(self) -> bool:
        return self.capability >= 80

    @property
    def has_matrix_units(self) -> bool:
        """Return whether Triton uses the matrix units. It does not use Turing's."""
        return self.capability >= 80

    @property
    def has_dependent_launch(self) -> bool:
        """Return whether a kernel may start before the previous one has ended (PDL): Hopper and later."""
        return self.capability >= 90

    @property
    def has_fp8(self) -> bool:
        """Return whether Triton converts e4m3 numbers: Ada and later, and its interpreter."""
        return self.capability >= 89 or self.name == INTERPRETER.name

    @property
    def has_ptx(self) -> bool:
        """Return whether kernels may contain PTX, which Triton's interpreter does not run."""
        return self.name != INTERPRETER.name

    @property
    def has_grouped_mm(self) -> bool:
        """Return whether torch's `grouped_mm` runs bf16 without synchronizing with the device: Hopper and B200."""
        return self.capability // 10 in (9, 10)

    def stages(self, stage_bytes: int, most: int) -> int:
        """Return the depth of a pipeline whose stages take `stage_bytes` of shared memory: from 2 to `most`."""
        return max(2, min(most, (self.shared_bytes - _BESIDE_STAGES) // stage_bytes))

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability // 10}.{self.capability % 10})"


INTERPRETER = Target("interpreter", 80, 232_448, 132)  # Triton's interpreter on a CPU, for tests
# The properties of each device in use; tests override entries.
KNOWN_TARGETS = {torch.device("cpu"): INTERPRETER}


def target_of(device: torch.device) -> Target:
    """Return the properties of `device`, which are read from the driver once."""
    target = KNOWN_TARGETS.get(device)
    if target is None:
        target = KNOWN_TARGETS[device] = _ask(device)
    return target


def _ask(device: torch.device) -> Target:
    found = torch.cuda.get_device_properties(device)
    return Target(
        found.name,
        10 * found.major + found.minor,
        getattr(
            found, "shared_memory_per_block_optin", found.shared_memory_per_block
        ),  # ROCm has only the latter
        found.multi_processor_count,
    )


@cache
def log_choice(message: str) -> None:
    """Log which implementation replaces a kernel, once per process however many layers do it."""
    log.warning(message)
