"""`Target`: the properties of a GPU that kernels and their sizes are chosen by.

Tuned sizes are those of Hopper (132 multiprocessors, 232,448 bytes of shared memory per program). On any other
GPU the same rules apply to its own figures, and the first tile that fits is taken.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

log = logging.getLogger("quire")

OLDEST = 75  # compute capability that kernels are compiled for: Turing


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    capability: int  # 90 is compute capability 9.0
    shared_bytes: int  # most shared memory of one program (per block, opt-in)
    sms: int  # multiprocessors

    @property
    def has_bf16(self) -> bool:
        return self.capability >= 80

    @property
    def has_matrix_units(self) -> bool:
        """Whether Triton multiplies matrices on them. It does not use those of Turing."""
        return self.capability >= 80

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start before the one before it has ended: Hopper and later."""
        return self.capability >= 90

    @property
    def has_grouped_mm(self) -> bool:
        """Whether torch's `grouped_mm` multiplies bf16 without waiting for the device: Hopper and B200."""
        return self.capability // 10 in (9, 10)

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability // 10}.{self.capability % 10})"


INTERPRETER = Target("interpreter", 80, 232_448, 132)  # of the kernels on a CPU, for tests
_TARGETS = {torch.device("cpu"): INTERPRETER}


def target_of(device: torch.device) -> Target:
    """The target that `device` is. The driver is asked once."""
    target = _TARGETS.get(device)
    if target is None:
        target = _TARGETS[device] = _ask(device)
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
    """Say what replaces a kernel: one line for all layers of all engines of a process."""
    log.warning(message)
