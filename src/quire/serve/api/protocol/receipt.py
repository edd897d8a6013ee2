"""The latency receipt of an answer (serve/observe/receipt.py). Times are in milliseconds."""

from __future__ import annotations

import msgspec


class PromptReceipt(msgspec.Struct, kw_only=True):
    """Token counts of the prompt.

    `cache_ended` says why the prefix cache held no more of them. `fetched` says how many of the cached ones came from
    host memory, the disk or a prefill engine, by tier.
    """

    total: int
    cached: int
    computed: int
    cache_ended: str
    fetched: dict[str, int] = {}


class Receipt(msgspec.Struct, kw_only=True):
    """The latency of one request by phase. The sum of `terms_ms` is `e2e_ms`; `queue_ms` splits the term `queue`."""

    e2e_ms: float
    ttft_ms: float | None
    predicted_ttft_ms: float | None  # when the request was admitted; null without latency targets
    terms_ms: dict[str, float]
    queue_ms: dict[str, float]
    prompt_tokens: PromptReceipt
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    recomputed_tokens: int
    choice: int
