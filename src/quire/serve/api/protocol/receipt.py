"""The latency receipt of an answer (serve/observe/receipt.py). Times in milliseconds."""

from __future__ import annotations

import msgspec


class PromptReceipt(msgspec.Struct, kw_only=True):
    """Tokens of the prompt. `cache_ended`: why no more of them were found in the prefix cache."""

    total: int
    cached: int
    computed: int
    cache_ended: str


class Receipt(msgspec.Struct, kw_only=True):
    """`terms_ms` add up to `e2e_ms`; `queue_ms` is its term "queue" by cause."""

    e2e_ms: float
    ttft_ms: float | None
    terms_ms: dict[str, float]
    queue_ms: dict[str, float]
    prompt_tokens: PromptReceipt
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    choice: int
