# ruff: noqa: E402  (imports that must follow a patch)
"""Check that `background_compilation` compiles each kernel once, in threads or other processes, and that only other
threads launch.

test_ahead.py runs this in a separate process, for Hopper, without a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from targets import CountingDriver
from triton.runtime import driver

hopper = CountingDriver(90)
driver.set_active(hopper)
torch.cuda.set_device = lambda device: None

from triton import knobs

from quire.compilers import NO_COMPILERS, Compilers, start_compilers
from quire.kernels import activation, norm
from quire.kernels.ahead import background_compilation

CPU = torch.device("cpu")
x, weight = torch.ones(3, 1234), torch.ones(1234)


def in_threads(*works: Callable[[], object]) -> None:
    """Run all functions at once, in threads with the functions' names."""
    threads = [threading.Thread(target=work, name=work.__name__) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def build(compilers: Compilers = NO_COMPILERS) -> list[str]:
    with background_compilation(CPU, compilers, threads=2) as compilation:
        for _ in range(3):
            assert not norm.rms_norm(x, weight, 1e-6).any()
            assert not norm.add_rms_norm(x, x, weight, 1e-6)[1].any()
        any_missing = compilation.any_missing()
    assert any_missing == bool(compilation.missing), "known before the end of the context"
    return compilation.missing


def generate() -> None:
    norm.rms_norm(x, weight, 1e-6)


# Compiled once, found in memory, found on disk.
found = [len(build()), len(build())]
norm._norm.device_caches.clear()
found.append(len(build()))
print("not on disk", *found)
assert not hopper.launches

# A thread launches what it launches while another is inside, also what the other has begun to compile.
with background_compilation(CPU, threads=2):
    in_threads(generate)
    norm.layer_norm(x, weight, weight, 1e-6)
    in_threads(lambda: norm.layer_norm(x, weight, weight, 1e-6))
    assert not norm.rms_norm(x, weight, 1e-6).any()
print("launches of other threads", hopper.launches.total())

# Several threads inside at once, and then several that launch a kernel for the first time at once.
hopper.launches.clear()
in_threads(build, build, build)
assert not hopper.launches
gate_up = torch.ones(2, 64)
in_threads(*[lambda: activation.gated(gate_up, "silu")] * 4)
print("launches at once", hopper.launches.total())
norm.rms_norm(x, weight, 1e-6)
print("launches behind it", hopper.launches.total() - 4)

# Other processes compile what is not on disk, and this one finds it there. One that ends is replaced by this process.
compiled_here: list[str] = []


def note_compiled(src: object, cache_hit: bool, **about: object) -> None:
    if not cache_hit:
        compiled_here.append(getattr(src, "name", ""))


knobs.compilation.listener = note_compiled
compilers = start_compilers(2)
with background_compilation(CPU, compilers) as compilation:
    norm.layer_norm(x.half(), weight.half(), weight.half(), 1e-6)
    norm.rms_norm(x.half(), weight, 1e-6)
    activation.gated(gate_up.half(), "silu")
print("compiled in other processes", len(compilation.missing), "here", len(compiled_here))
compilers.close()
with background_compilation(CPU, compilers) as compilation:
    norm.layer_norm(x.bfloat16(), weight.bfloat16(), weight.bfloat16(), 1e-6)
print("without them", len(compilation.missing), "here", len(compiled_here))
