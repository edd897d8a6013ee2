"""The machine's limits, and the use of its memory."""

from __future__ import annotations

import psutil
import pytest
import torch

from quire.bench import machine
from quire.bench.machine import measure
from quire.bench.memory import memory_map
from quire.types import EngineInfo


def info(device: str) -> EngineInfo:
    return EngineInfo(
        model="m", family="llama", vocab_size=9, max_model_len=9, eos_ids=[], device=device, dtype="float32",
        attention="reference", max_num_seqs=1, max_num_batched_tokens=1, num_blocks=1, block_size=1, block_bytes=1,
        weight_bytes=4000, num_parameters=1000,
    )  # fmt: skip


def test_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BUFFER_BYTES", 1 << 24)
    monkeypatch.setattr(machine, "_SIDE", {"cpu": 256})
    found = measure(torch.device("cpu"), torch.float32)
    assert found.bytes_per_s > 1e7 and found.flops_per_s > 1e7 and "CPU" in found.device
    memory = memory_map(info("cpu"))
    assert sum(memory.values()) == pytest.approx(psutil.virtual_memory().total, rel=0.01)


@pytest.mark.gpu
def test_a_gpu() -> None:
    found = measure(torch.device("cuda"), torch.bfloat16)
    assert found.bytes_per_s > 1e11 and found.flops_per_s > 1e12
    memory = memory_map(info("cuda:0"))
    assert sum(memory.values()) == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.01)
