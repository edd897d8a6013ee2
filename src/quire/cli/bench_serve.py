"""`quire bench serve`: send a load to any server with an OpenAI API and report rates and latencies."""

from __future__ import annotations

import argparse
import asyncio
import copy
import math
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.load.workloads import MAX_RANDOM_ID, PACED
from quire.cli.bench_flags import (
    EVERY,
    chosen_figures,
    keep_finished,
    machine_line,
    settle_pace,
)
from quire.cli.bench_load import RequestPlan, ServerCard
from quire.cli.bench_serve_flags import ENDPOINTS, check, pairs, request_fields
from quire.types import ConfigError, DraftCounts

if TYPE_CHECKING:
    from quire.bench.load.datasets import BenchRequest
    from quire.bench.run import Run
    from quire.bench.server.client import LoadClient, ServerTarget
    from quire.frontend.tokenizer.tokenizer import Tokenizer

_PER_USER = 2  # requests of each user in a load test without --num-prompts
_POLL_S = 0.5  # between attempts to reach the server


@dataclass(slots=True)
class LoadTest:
    """The finished levels of a load test, and the server once it has answered."""

    levels: list[dict[str, Any]] = field(default_factory=list)
    server: ServerCard | None = None


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return the exit code."""
    check(args)
    from quire.bench.server.client import run_in_loop

    test = LoadTest()
    # Ctrl-C may reach any callback of the loop, so it is handled outside of it.
    with keep_finished(test.levels) as outcome:
        run_in_loop(_bench(args, test))
    if test.levels and test.server:
        if args.workload == EVERY:
            _save(args, {**_conditions(args, test.server), "workloads": test.levels})
        else:
            _report_users(args, test)
    return outcome.code


async def _bench(args: argparse.Namespace, test: LoadTest) -> None:
    from quire.bench.server.client import LoadClient

    async with LoadClient(_target(args, {})) as probe:
        server = await _find_server(probe, args)
    tokenizer = _tokenizer(args, server)
    vocab = min(_vocab(server, tokenizer), MAX_RANDOM_ID)
    async with LoadClient(_target(args, request_fields(args, server.model))) as client:
        test.server = server
        if args.workload == EVERY:
            for name in PACED:
                one = copy.copy(args)
                one.workload = name
                settle_pace(one)
                load = RequestPlan(one, server, vocab, tokenizer, client.target.is_chat)
                await _run_workload(one, client, load, test)
            return
        settle_pace(args)
        load = RequestPlan(args, server, vocab, tokenizer, client.target.is_chat)
        await load.warm_up(client)
        if args.users is not None:
            return await _run_users(args, client, load, test.levels)
        requests, times = load.requests()
        done = await _serve(args, client, requests, times, args.max_concurrency)
    _report(args, server, requests, done)


def _target(args: argparse.Namespace, fields: dict[str, Any]) -> ServerTarget:
    from quire.bench.server.client import ServerTarget

    headers = pairs(args.header, "header")
    if key := os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    base = args.base_url or f"http://{args.host}:{args.port}"
    endpoint = args.endpoint or ENDPOINTS[args.backend]
    return ServerTarget(
        base.rstrip("/"), "/" + endpoint.lstrip("/"), headers, fields, args.request_id_prefix, args.insecure
    )


async def _find_server(client: LoadClient, args: argparse.Namespace) -> ServerCard:
    """Wait for the server as long as the flags allow, and return the model that it reports."""
    deadline_s = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            found = await client.get("/v1/models")
            break
        except ConfigError:
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(_POLL_S)
    cards = found.get("data") if isinstance(found, dict) else None
    card = cards[0] if cards else {}
    if args.model is None and "id" not in card:
        raise ConfigError(f"{client.target.base_url} names no model at /v1/models: set --model")
    stats = await client.get("/stats")
    engine = stats.get("engine", {}) if isinstance(stats, dict) else {}
    vocab = engine.get("vocab_size") if isinstance(engine, dict) else None
    root = args.model or card.get("root") or card["id"]
    return ServerCard(args.model or card["id"], root, card.get("max_model_len"), vocab)


def _tokenizer(args: argparse.Namespace, server: ServerCard) -> Tokenizer | None:
    """Load the tokenizer if the requests need one and it is named by a flag or found under the model's name."""
    from quire.frontend.location import BUILT_IN, locate_tokenizer
    from quire.frontend.tokenizer.tokenizer import load_tokenizer

    name = args.tokenizer
    if name is None:
        is_chat = _target(args, {}).is_chat
        if server.vocab_size is not None and not is_chat and args.dataset_name not in ("sharegpt", "custom"):
            return None  # prompts are token ids
        if server.root not in BUILT_IN and not Path(server.root).exists():
            return None
        name = server.root
    return load_tokenizer(locate_tokenizer(name))


def _vocab(server: ServerCard, tokenizer: Tokenizer | None) -> int:
    found = server.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if found is None:
        raise ConfigError(f"the vocabulary size of {server.model} is unknown: set --tokenizer FOLDER|ID")
    return found


async def _serve(
    args: argparse.Namespace,
    client: LoadClient,
    requests: list[BenchRequest],
    times_s: list[float],
    max_concurrency: int | None,
) -> Run:
    """Send the requests, and count the drafts that the server verifies meanwhile."""
    before = await _drafts(client, DraftCounts())
    done = await client.run(requests, times_s, max_concurrency, _shows_progress(args))
    done.drafts = (await _drafts(client, before)).since(before)
    return done


async def _drafts(client: LoadClient, unknown: DraftCounts) -> DraftCounts:
    """Return the drafts that the server has counted, or `unknown` if it does not tell."""
    try:
        stats = await client.get("/stats")
        return DraftCounts.of_stats(stats["drafts"])
    except (ConfigError, TypeError, KeyError):  # it has ended, or is another server
        return unknown


async def _run_users(
    args: argparse.Namespace,
    client: LoadClient,
    load: RequestPlan,
    levels: list[dict[str, Any]],
) -> None:
    """Run the load once for each number of users, every time with new requests, and append each result to `levels`."""
    from quire.bench.metrics import serving
    from quire.bench.report import print_users

    _, percentiles = chosen_figures(args)
    skip = 0
    for users in args.users:
        count = args.num_prompts or max(users * _PER_USER, 4)
        requests, times = load.requests(count, skip)
        skip += count
        if _shows_progress(args):
            print(f"{users} users, {count} requests", file=sys.stderr)
        done = await _serve(args, client, requests, times, users)
        wanted = sorted({*percentiles, 99.0})
        found = serving(done, wanted, args.goodput)
        levels.append({"max_concurrency": users, "num_prompts": count, **found})
        _print_errors(done)
        print_users(levels[-1], first=len(levels) == 1)


async def _run_workload(
    args: argparse.Namespace, client: LoadClient, load: RequestPlan, test: LoadTest
) -> None:
    """Run a workload at its own pace, and append its result to the levels."""
    from quire.bench.metrics import serving
    from quire.bench.report import print_workload

    requests, times = load.requests()
    await load.warm_up(client)
    done = await _serve(args, client, requests, times, args.max_concurrency)
    _print_errors(done)
    found = serving(done, sorted({*chosen_figures(args)[1], 99.0}), args.goodput)
    test.levels.append({"workload": args.workload, "num_prompts": len(requests), **found})
    print_workload(test.levels[-1], first=len(test.levels) == 1)


def _report_users(args: argparse.Namespace, test: LoadTest) -> None:
    """Plot and save the levels of a load test."""
    assert test.server is not None
    if args.plot:
        from quire.bench.plots import plot_users

        title = f"{test.server.model}: {_name(args)}, by number of users"
        plot_users(test.levels, f"{title}\n{machine_line()}", args.plot)
    _save(args, {**_conditions(args, test.server), "levels": test.levels})


def _report(args: argparse.Namespace, server: ServerCard, requests: list[BenchRequest], done: Run) -> None:
    from quire.bench.metrics import serving
    from quire.bench.report import details, print_serving

    metrics, percentiles = chosen_figures(args)
    result = {
        **_conditions(args, server),
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy:
        result |= {name: getattr(args, name) for name in vars(args) if name.startswith("ramp_up")}
    _print_errors(done)
    result |= serving(done, percentiles, args.goodput)
    result["client_processor_s"] = done.client_processor_s
    print_serving(result, metrics, percentiles)
    if args.plot:
        from quire.bench.plots import plot_serving

        plot_serving(done, f"{server.model}: {_name(args)}\n{machine_line()}", args.plot)
    _save(args, {**result, **details(done)} if args.save_detailed else result)


def _conditions(args: argparse.Namespace, server: ServerCard) -> dict[str, Any]:
    return {
        **pairs(args.metadata, "metadata"),
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "backend": args.backend,
        "label": args.label,
        "model_id": server.model,
        "tokenizer_id": args.tokenizer or server.root,
        "dataset": _name(args),
    }


def _name(args: argparse.Namespace) -> str:
    return str(args.workload or (args.dataset_path.name if args.dataset_path else args.dataset_name))


def _print_errors(done: Run) -> None:
    failed = [one.error for one in done.served if one.error]
    if failed:
        print(f"quire: {len(failed)} requests failed, the first with {failed[0]}", file=sys.stderr)


def _shows_progress(args: argparse.Namespace) -> bool:
    return not args.disable_tqdm and sys.stderr.isatty()


def _save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from quire.bench.report import result_name, save

    if args.output_json:
        save(args.output_json, result)
    if args.save_result or args.append_result:
        path = args.result_dir / (
            args.result_filename or result_name(result, "serve", stamped=not args.append_result)
        )
        save(path, result, args.append_result)
