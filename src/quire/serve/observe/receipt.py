"""The latency receipt: how one request spent its time, as terms in milliseconds that add up to its total latency.

    read | prepare | submit | queue  transfer  prefill  lost_to_prefills  preempted  recompute  decode | deliver
     server: body, tokens     '------------- engine (core/clocks.py) -----------------------------'   text, JSON

With several choices, the receipt describes the choice that ended last, because all others waited for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from quire.serve.answer.generation import Generation
from quire.serve.api.context import server_of
from quire.serve.api.protocol.fields import SamplingFields
from quire.serve.api.protocol.receipt import PromptReceipt, Receipt

ReceiptMaker = Callable[[], "Receipt | UnsetType"]


def receipt_maker(request: Request, wanted: SamplingFields, generation: Generation) -> ReceiptMaker:
    """Return a function that builds the receipt at the end, or UNSET if neither request nor server enables it."""
    enabled = server_of(request).settings.receipts if wanted.receipt is None else wanted.receipt
    if not enabled:
        return lambda: UNSET
    arrived_s: float = request.scope["arrival_s"]
    return lambda: write_receipt(generation, arrived_s)


def write_receipt(generation: Generation, arrived_s: float) -> Receipt | UnsetType:
    """Build the receipt of a request up to now.

    Args:
        generation: the finished generation.
        arrived_s: when the request's head was received, on the monotonic clock.

    Returns:
        The receipt, or UNSET if the request never reached the engine.
    """
    tracks = generation.tracks
    choice = max(range(len(tracks)), key=lambda index: tracks[index].end_s or 0.0)
    track, timing = tracks[choice], tracks[choice].timing
    if timing is None:
        return UNSET
    now_s = time.monotonic()
    waited_s = dict(timing.waited_s)
    transfer_s = waited_s.pop("loading", 0.0) + waited_s.pop("transfer", 0.0)
    elsewhere_s = waited_s.pop("prefill", 0.0)  # in another engine
    terms_s = {
        "read": track.arrival_s - arrived_s,
        "prepare": track.sent_s - track.arrival_s,
        "submit": timing.arrival_s - track.sent_s,
        "queue": sum(waited_s.values()),
        "transfer": transfer_s,
        "prefill": timing.prefill_s + elsewhere_s,
        "lost_to_prefills": timing.lost_s,
        "preempted": timing.preempted_s,
        "recompute": timing.recompute_s,
        "decode": timing.decode_s,
        "deliver": now_s - timing.until_s,
    }
    return Receipt(
        e2e_ms=_ms(now_s - arrived_s),
        ttft_ms=None if track.first_s is None else _ms(track.first_s - arrived_s),
        predicted_ttft_ms=None if generation.forecast_s is None else _ms(generation.forecast_s),
        terms_ms={name: _ms(seconds) for name, seconds in terms_s.items()},
        queue_ms={name: _ms(seconds) for name, seconds in waited_s.items()},
        prompt_tokens=PromptReceipt(
            total=track.prompt_tokens,
            cached=timing.cached_tokens,
            computed=track.prompt_tokens - timing.cached_tokens,
            cache_ended=timing.prefix_end,
            fetched=timing.fetched_tokens,
        ),
        output_tokens=track.tokens,
        draft_tokens=timing.draft_tokens,
        accepted_tokens=timing.accepted_tokens,
        preemptions=timing.preemptions,
        recomputed_tokens=timing.recomputed_tokens,
        choice=choice,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
