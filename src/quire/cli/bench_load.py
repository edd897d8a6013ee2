"""Requests of `quire bench serve`, built from its flags and the model that the server reports."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.bench.load.arrivals import arrival_times, ramp_times
from quire.bench.load.traces import read_trace, replay
from quire.bench.load.workloads import ALL_WORKLOADS, PACED, WARM_REQUESTS, scaled, shifted
from quire.types import ConfigError

if TYPE_CHECKING:
    from quire.bench.load.datasets import BenchRequest
    from quire.bench.load.workloads import Workload
    from quire.bench.server.client import LoadClient
    from quire.frontend.tokenizer.tokenizer import Tokenizer

NUM_PROMPTS = 100  # enough for stable figures in seconds; `vllm bench serve` sends 1000


@dataclass(slots=True)
class ServerCard:
    """Model that the server reports."""

    model: str
    root: str
    max_model_len: int | None
    vocab_size: int | None  # known only from a Quire server


class RequestPlan:
    """Requests that the flags describe."""

    def __init__(
        self,
        args: argparse.Namespace,
        server: ServerCard,
        vocab: int,
        tokenizer: Tokenizer | None,
        is_chat: bool,
    ) -> None:
        self._args, self._server, self._vocab = args, server, vocab
        self._tokenizer, self._is_chat = tokenizer, is_chat
        if tokenizer is None and (is_chat or args.dataset_name == "sharegpt"):
            raise ConfigError("chats and sharegpt need a tokenizer: set --tokenizer FOLDER|ID")

    async def warm_up(self, client: LoadClient) -> None:
        """Send the warm-up requests: as long as the first ones, but without prefixes that later requests could reuse."""
        args = self._args
        count = args.num_warmups or (WARM_REQUESTS if args.workload in PACED else 0)
        if not count:
            return
        if args.workload in PACED:
            work = scaled(PACED[args.workload](self._vocab, count), args.workload_scale)
        else:
            work = self._synthetic(count, seed=args.seed - 1)
        requests = self._to_requests(shifted(work, self._vocab, 1))[:count]
        await client.run(requests, [0.0] * len(requests))

    def requests(self, count: int | None = None, skip: int = 0) -> tuple[list[BenchRequest], list[float]]:
        """Return requests and their arrival times in seconds.

        Args:
            count: number of requests (default: --num-prompts).
            skip: number of requests to leave out at the beginning.
        """
        args = self._args
        if args.dataset_name == "trace":
            longest = self._server.max_model_len or 1 << 62
            work, times, too_long = replay(
                read_trace(args.dataset_path), self._vocab, longest, args.num_prompts, args.trace_scale
            )
            if too_long:
                print(f"Skipped {too_long} requests longer than max_model_len {longest}", file=sys.stderr)
            return self._to_requests(work), times
        requests = self._requests(count if count is not None else args.num_prompts, skip)
        if args.ramp_up_strategy and count is None:
            rates = (args.ramp_up_start_rps, args.ramp_up_end_rps, args.ramp_up_strategy)
            return requests, ramp_times(len(requests), *rates, args.burstiness, args.seed)
        return requests, arrival_times(len(requests), args.request_rate, args.burstiness, args.seed)

    def _requests(self, count: int | None, skip: int) -> list[BenchRequest]:
        from quire.bench.load.datasets import custom, repeated, sharegpt

        args, total = self._args, (count or NUM_PROMPTS) + skip
        if args.dataset_name == "sharegpt":
            assert self._tokenizer is not None
            length = args.output_len or args.sharegpt_output_len
            requests = sharegpt(args.dataset_path, total, self._tokenizer, length, args.seed)
        elif args.dataset_name == "custom":
            length = args.output_len or args.custom_output_len
            requests = custom(args.dataset_path, total, self._tokenizer, length)
        elif args.dataset_name == "workload":
            work = ALL_WORKLOADS[args.workload](self._vocab, total if count else None)
            requests = self._to_requests(scaled(work, args.workload_scale))
        else:
            requests = self._to_requests(self._synthetic(total, args.seed))
        return repeated(requests, count or len(requests) - skip, skip)

    def _synthetic(self, count: int, seed: int) -> Workload:
        from quire.bench.load.datasets import prefix_repetition, random_work

        args = self._args
        if args.dataset_name == "prefix_repetition":
            return prefix_repetition(
                self._vocab,
                count,
                args.prefix_repetition_prefix_len,
                args.input_len or args.prefix_repetition_suffix_len,
                args.prefix_repetition_num_prefixes,
                args.output_len or args.prefix_repetition_output_len,
                seed=seed,
            )
        return random_work(
            self._vocab,
            count,
            args.input_len or args.random_input_len,
            args.output_len or args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=seed,
        )

    def _to_requests(self, work: Workload) -> list[BenchRequest]:
        from quire.bench.load.datasets import to_requests

        return to_requests(work, self._tokenizer if self._is_chat else None)
