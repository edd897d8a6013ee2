"""The routes about the server: models, health, version, statistics."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.serve.api.context import ServerContext, client_of, server_of
from quire.serve.async_engine import AsyncEngine
from quire.serve.http.auth import ApiClient
from quire.serve.http.wire import json_response
from quire.serve.observe.histogram import Histogram
from quire.types import DraftCounts, EngineStats


def _model_card(server: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",  # this field and the next two are Anthropic's
        "display_name": name,
        "created_at": datetime.fromtimestamp(server.started_s, UTC).isoformat(timespec="seconds"),
        "created": int(server.started_s),
        "owned_by": "quire" if server.mode == "model" else f"quire ({server.mode})",
        "root": server.engine.config.model,
        "parent": None,
        "max_model_len": server.engine.info.max_model_len,
    }


async def models(request: Request) -> Response:
    """List the served model under all its names."""
    server = server_of(request)
    names = server.names
    paging = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": [_model_card(server, name) for name in names], **paging})


async def model(request: Request) -> Response:
    """Return the served model by one of its names."""
    server = server_of(request)
    return json_response(_model_card(server, server.check_model(request.path_params["name"])))


async def health(request: Request) -> Response:
    """Return 200 while the server accepts requests, and 503 while it drains or all its engines are silent or dead.

    With several replicas the answer lists them.
    """
    server = server_of(request)
    if server.engine.cause is not None:
        return json_response({"status": "dead", "cause": server.engine.cause}, 503)
    if server.draining:
        return json_response({"status": "draining"}, 503)
    if silent_s := server.engine.replicas.silent_s():
        cause = f"the engine process has not answered for {silent_s:.0f} s"
        return json_response({"status": "stalled", "cause": cause}, 503)
    found: dict[str, Any] = {"status": "ok", "model": server.names[0], "mode": server.mode}
    replicas = server.engine.replicas.replicas
    if len(replicas) > 1:
        found["replicas"] = [{"replica": r.number, "status": r.health, "cause": r.cause} for r in replicas]
    if notes := [note for replica in replicas for note in replica.figures.notes]:
        found["degraded"] = notes  # prefill processes that are not up; their prompts are computed elsewhere
    return json_response(found)


def _replicas(engine: AsyncEngine) -> list[dict[str, Any]]:
    """Describe each replica. Requests and tokens are those of its present and its earlier processes."""
    found = []
    for replica in engine.replicas.replicas:
        totals, load = replica.figures.totals, replica.load
        queried = totals.queried_tokens
        found.append(
            {
                "replica": replica.number,
                "status": replica.health,
                "restarts": replica.restarts,
                "cause": replica.cause,
                "active": load.running,
                "waiting": load.waiting,
                "open": replica.num_open,
                "requests": totals.requests,
                "generated": totals.generated_tokens,
                "hit_rate": round(totals.cached_tokens / queried, 4) if queried else 0.0,
            }
        )
    return found


async def version(request: Request) -> Response:
    """Return the version of Quire."""
    return json_response({"version": __version__, "mode": server_of(request).mode})


def spread(histogram: Histogram, unit: float = 1) -> dict[str, float] | None:
    """Return percentiles of the newest values, and the mean and the count of all, or None without values.

    Percentiles and mean are multiplied by `unit`.
    """
    values = histogram.percentiles(50, 90, 99, 100)
    if values is None:
        return None
    names = ("p50", "p90", "p99", "max")
    found = {name: round(x * unit, 3) for name, x in zip(names, values)}
    mean = round(histogram.sum * unit / histogram.count, 3)
    return {**found, "mean": mean, "count": histogram.count}


def _requests(engine: AsyncEngine, client: ApiClient, engine_stats: EngineStats) -> dict[str, Any]:
    """Count the requests of the client. Those of other clients appear as sums."""
    load, admission, totals = engine_stats.load, engine.admission, engine.account.of(client.sees)
    counts: dict[str, Any] = {
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "wait_reason": engine_stats.wait_reason,
        "active": load.running,
        "open": admission.open_of(client.sees),
        "completed": totals.completed,
        "rejected": admission.rejected_of(client.sees),
        "aborted": engine_stats.totals["aborted"] if client.admin else totals.aborted,
        "not_finite": engine_stats.totals["not_finite"],
    }
    if not client.admin:
        counts["others"] = {"waiting": engine_stats.others.waiting, "active": engine_stats.others.running}
    return counts


def _blocks(engine: AsyncEngine, stats: EngineStats) -> dict[str, Any]:
    totals = stats.totals
    return {
        "total": stats.blocks,
        "used": stats.blocks - stats.free_blocks,
        "free": stats.free_blocks,
        "cached": stats.cached_blocks,
        "tokens_per_block": stats.block_size,
        "bytes_per_block": engine.info.block_bytes,
        "dtype": engine.info.kv_dtype,
        "groups": [{"layers": n, "window": window} for n, window in engine.info.kv_groups],
        "evictions": totals["evictions"],
        "eviction_policy": engine.info.eviction,
        "preemptions": totals["preemptions"],
        "preemptions_for_other_keys": totals["yielded"],
        "pressure_events": totals["pressure"],
    }


def _drafts(method: str, totals: dict[str, Any]) -> dict[str, Any]:
    counts = DraftCounts.of_totals(totals)
    return {
        "method": method,
        **asdict(counts),
        "acceptance": round(counts.acceptance, 4),
        "mean_accepted_length": round(counts.mean_accepted_length, 3),
    }


async def stats(request: Request) -> Response:
    """Return the server's statistics. Sizes are in blocks and tokens, times in seconds unless the name ends in `_ms`.

    A client that is no admin sees its own requests, and the sums of those of other clients.
    """
    server, client = server_of(request), client_of(request)
    engine = server.engine
    engine_stats = await engine.stats(client.sees)
    totals, account = engine_stats.totals, engine.account
    queried = totals["queried_tokens"]
    return json_response(
        {
            "model": server.names[0],
            "mode": server.mode,
            "uptime_s": round(time.time() - server.started_s, 3),
            "requests": _requests(engine, client, engine_stats),
            "blocks": _blocks(engine, engine_stats),
            "transfers": {
                "fetched_tokens": totals["fetched_tokens"],
                "moved_bytes": totals["moved_bytes"],
                "unsaved_blocks": totals["unsaved_blocks"],
            },
            "states": {
                "bytes_per_request": engine.info.state_bytes,
                "snapshot_rows": engine_stats.snapshot_rows,
                "snapshots": engine_stats.snapshots,
                "evictions": totals["snapshot_evictions"],
            },
            "tokens": {
                "prompt": totals["prompt_tokens"],
                "cached": totals["cached_tokens"],
                "computed": totals["computed_tokens"],
                "generated": totals["generated_tokens"],
                "hit_rate": round(totals["cached_tokens"] / queried, 4) if queried else 0.0,
                "by_client": engine_stats.served_tokens,
            },
            "drafts": _drafts(engine.info.spec_method, totals),
            "latency_ms": {
                "ttft": spread(account.ttft_s, 1000),
                "itl": spread(account.itl_s, 1000),
                "e2e": spread(account.e2e_s, 1000),
                "queue": spread(account.queue_s, 1000),
            },
            "batch": {
                "rows": spread(account.step_rows),
                "tokens": spread(account.step_tokens),
                "step_ms": spread(account.step_s, 1000),
            },
            "replicas": _replicas(engine),
            "routing": {"policy": engine.settings.routing, "held": engine.replicas.num_held},
            "last_step": engine_stats.last_step,
            "start_up_s": engine.info.phases_s,
            "engine": asdict(engine.info),
        }
    )
