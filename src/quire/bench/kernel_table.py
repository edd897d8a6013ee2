"""Tables of kernels from a Chrome trace of torch.profiler, with bytes and operations where they can be computed.

A replayed CUDA graph leaves device events without the operators that launched them, so shapes are unknown. Events are
classified by name, and the matrix products of a step by their order, which the model determines. On a CPU the events
are torch's operators and the C kernels, each without the time of nested ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.cost import Cost, Machine, MatrixProduct

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
MATRIX, ATTENTION = "matrix products", "attention"
# The first pattern that matches a kernel's name decides its part.
_PARTS = (
    ("copies", r"memcpy|memset"),
    ("KV write", r"_write_kernel|kv_write|write_kv"),
    (
        ATTENTION,
        r"attention|attend|flash|fmha|_short_kernel|_long_kernel|_latent_kernel|_merge_kernel|::bmm$|baddbmm",
    ),
    (
        MATRIX,
        r"gemm|gemv|nvjet|cutlass|xmma|cublas|::mm$|::addmm$|_linear_pointwise|skinny|matvec|matmul_|split_?k|::product$",
    ),
    ("sampling", r"_best_of|argmax|sample|topk|top_p|softmax|sort|gumbel|logprob"),
    ("norms, rotary, activation", r"norm|rotate|rope|gated|silu|gelu|turn_rows|gate_rows"),
)
_PATTERNS = [(part, re.compile(pattern, re.IGNORECASE)) for part, pattern in _PARTS]
# The reduction of a split product, which belongs to the kernel before it.
_FOLLOWS = re.compile(r"reduce", re.IGNORECASE)
_INNERMOST = re.compile(r"<[^<>]*>|\([^()]*\)")  # template or call arguments


@dataclass(slots=True)
class TraceEvent:
    """An operator or kernel of the trace; `self_us` is its duration without nested events."""

    name: str
    start_us: float
    end_us: float
    self_us: float


@dataclass(slots=True)
class KernelRow:
    """The events of one kind over all profiled steps. `bytes` and `flops` are 0 where they are unknown."""

    name: str
    calls: int = 0
    busy_us: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    least_us: float = 0.0  # on this machine

    def count(self, num_bytes: float, flops: float, machine: Machine) -> None:
        """Add bytes and operations, and the least time that they take."""
        self.bytes += num_bytes
        self.flops += flops
        self.least_us += machine.least_s(num_bytes, flops) * 1e6


class KernelTable(dict[str, KernelRow]):
    """Rows by name, created at their first event."""

    def add(self, name: str, event: TraceEvent) -> KernelRow:
        """Add an event to the row `name` and return the row."""
        row = self.setdefault(name, KernelRow(name))
        row.calls += 1
        row.busy_us += event.self_us
        return row

    def longest_first(self) -> list[KernelRow]:
        return sorted(self.values(), key=lambda row: -row.busy_us)


def part_of(name: str) -> str:
    """Return the part of a step that a kernel belongs to, by its name."""
    return next((part for part, pattern in _PATTERNS if pattern.search(name)), "other")


def events_of(trace: dict[str, Any]) -> list[TraceEvent]:
    """Return the device events of a trace ordered by start, or the CPU's operators if there are none."""
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    device = [_event(e) for e in found if e.get("cat") in _DEVICE]
    operators = [e for e in found if e.get("cat") == "cpu_op" or e["name"].startswith("quire::")]
    return sorted(device or _self_times(operators), key=lambda event: event.start_us)


def _event(e: dict[str, Any]) -> TraceEvent:
    return TraceEvent(e["name"], e["ts"], e["ts"] + e["dur"], e["dur"])


def _self_times(operators: Iterable[dict[str, Any]]) -> list[TraceEvent]:
    """Subtract the time of each operator from the operator that called it; calls nest within a thread."""
    events: list[TraceEvent] = []
    callers: list[tuple[Any, TraceEvent]] = []  # thread and operator, the innermost last
    for e in sorted(operators, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        event = _event(e)
        while callers and (callers[-1][0] != e["tid"] or callers[-1][1].end_us <= event.start_us):
            callers.pop()
        if callers:
            callers[-1][1].self_us -= event.self_us
        callers.append((e["tid"], event))
        events.append(event)
    return events


def busy_and_span_us(events: Sequence[TraceEvent]) -> tuple[float, float]:
    """Return the time in which at least one event ran, and the time from the first start to the last end."""
    busy, end = 0.0, events[0].start_us
    for event in events:
        busy += max(event.end_us - max(event.start_us, end), 0.0)
        end = max(end, event.end_us)
    return busy, end - events[0].start_us


def tables(
    events: Sequence[TraceEvent],
    costs: Sequence[Cost],
    products: Sequence[Sequence[MatrixProduct]],
    machine: Machine,
) -> tuple[list[KernelRow], list[KernelRow], list[KernelRow]]:
    """Return rows by part, by matrix product and by kernel, each with the longest first.

    Products are named only if the events hold exactly one kernel for each of them (and its reductions).

    Args:
        events: the events of the profiled steps, ordered by start.
        costs: the cost of each profiled step.
        products: the matrix products of each profiled step.
        machine: for the least time of each row.
    """
    parts, by_product, kernels = KernelTable(), KernelTable(), KernelTable()
    expected = [product for step in products for product in step]
    firsts = sum(part_of(e.name) == MATRIX and not _FOLLOWS.search(short_name(e.name)) for e in events)
    queue = iter(expected if firsts == len(expected) else ())
    product: MatrixProduct | None = None
    for event in events:
        part = part_of(event.name)
        parts.add(part, event)
        kernel = kernels.add(short_name(event.name), event)
        if part != MATRIX:
            continue
        if not _FOLLOWS.search(kernel.name) and (product := next(queue, None)):
            kernel.count(product.bytes, product.flops, machine)
            by_product.setdefault(product.name, KernelRow(product.name)).count(
                product.bytes, product.flops, machine
            )
        if product:
            by_product.add(product.name, event)
    for cost in costs:
        if MATRIX in parts:
            parts[MATRIX].count(cost.matrix_bytes, cost.matrix_flops, machine)
        if ATTENTION in parts:
            parts[ATTENTION].count(cost.attention_bytes, cost.attention_flops, machine)
    return parts.longest_first(), by_product.longest_first(), kernels.longest_first()


def short_name(name: str) -> str:
    """Return a kernel's name without the arguments, template arguments and return type of C++."""
    before, plain = "", name
    while plain != before:
        before, plain = plain, _INNERMOST.sub("", plain)
    words = plain.replace("::::", "::").split()
    return (words[-1] if "::" in plain or words[0] == "void" else " ".join(words))[-60:]
