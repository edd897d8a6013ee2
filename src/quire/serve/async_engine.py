"""`AsyncEngine`: the event loop's interface to the engine processes.

Owns the replicas (replicas/), the tokenizer with its threads, and every open generation. Threads turn text into token
ids; the event loop turns outputs into text, in a few microseconds per token. When the last replica dies, every open
generation ends with the cause and `died` is set.

    route --prepare()--> threads: template, tokens, checks --submit()--> ReplicaSet --> engine processes
      ^                                                                                     |
      +-- Generation.wait() <-- OutputAssembler <-- take_outputs(): once per step  <--------+
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from quire.config import EngineConfig
from quire.frontend.length import check_room, first_tokens, last_tokens
from quire.frontend.model import processor_of, tokenizer_of
from quire.frontend.output import OutputAssembler, RequestState
from quire.frontend.processor import Prompt
from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.serve.admission import Admission
from quire.serve.answer.generation import Generation
from quire.serve.client_threads import ClientThreads
from quire.serve.http.auth import ANYONE, ApiClient
from quire.serve.http.errors import ApiError, as_api_error
from quire.serve.observe.account import RequestAccounts
from quire.serve.replicas.job import EngineJob, encode_requests
from quire.serve.replicas.replica_set import ReplicaSet
from quire.serve.settings import ServeConfig
from quire.types import (
    EngineDead,
    EngineInfo,
    EngineLive,
    EngineOutput,
    EngineStats,
    Figures,
    Pooling,
    RequestError,
    RequestTargets,
    SamplingParams,
)

T = TypeVar("T")
_STATS_S = 5.0
_MAX_REQUEST_TOKENS = 1 << 21  # in all prompts of a request; each id takes 36 bytes


@dataclass(slots=True)
class PromptJob:
    """One prompt as a route submits it, before tokenization."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    targets: RequestTargets = RequestTargets()
    cache_salt: str = ""
    add_special_tokens: bool = True
    keep: int | None = None  # number of prompt tokens to keep; None: all
    echo: bool = False  # return the text of the prompt, even if it was sent as token ids
    pooling: Pooling | None = None  # return the prompt's pooled hidden states
    # Request field that set max_tokens, which must then fit into the context; None: clip it to what fits.
    length_field: str | None = None
    keep_first: bool = False  # keep tokens at the beginning of the prompt, not at its end


class AsyncEngine:
    """The replicas of an engine, with the tokenizer, admission control and open generations in front of them."""

    def __init__(
        self, config: EngineConfig, settings: ServeConfig, replicas: ReplicaSet, total_weight: float = 1.0
    ) -> None:
        """Prepare an engine around running processes; `total_weight` is the sum of the weights of all clients."""
        self.config, self.settings, self._total_weight = config, settings, total_weight
        self.died = asyncio.Event()
        self.cause: str | None = None
        self.replicas = replicas
        self._threads = ClientThreads(settings.tokenizer_threads, settings.max_waiting)
        self._assembler = OutputAssembler()
        self._open: dict[str, Generation] = {}  # by the request id of each state
        self._changed: dict[str, RequestState] = {}  # not handed to their generations yet
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Load the tokenizer while the engine processes build their engines, and wait for all.

        Raises:
            ConfigError: if the settings do not fit the model or the machine.
            ModelError: if the model cannot be loaded.
            EngineDead: if the process ends.
        """
        tokenizer = asyncio.ensure_future(self.in_thread(ANYONE, tokenizer_of, self.config))
        try:
            self.info: EngineInfo = await self.replicas.ready()
        except BaseException:
            tokenizer.cancel()
            raise
        self.tokenizer: Tokenizer = await tokenizer
        self.processor = processor_of(self.config, self.info, self.tokenizer)
        settings = self.settings
        self.admission = Admission(
            settings.max_waiting, settings.max_waiting_tokens, self.info.max_num_seqs, self._total_weight
        )
        self.account = RequestAccounts(self.info.max_model_len)
        self.replicas.listen(self)

    async def in_thread(self, client: ApiClient, work: Callable[..., T], *args: object) -> T:
        """Return `work(*args)`, run in a tokenizer thread when it is the client's turn."""
        return await self._threads.run(client, work, *args)

    # ------------------------------------------------------------------------------ requests in

    async def generate(
        self,
        client: ApiClient,
        choices: int,
        make_jobs: Callable[[], Sequence[PromptJob]],
        interval: int,
        timeout_s: float | None,
        label: str = "",
    ) -> Generation:
        """Admit a request, tokenize its prompts in a thread and send them to the engine.

        Args:
            client: owner of the request.
            choices: number of answers: prompts times n.
            make_jobs: returns the prompts; runs in the thread, so it may render templates. It raises RequestError or
                ApiError for requests that cannot be served.
            interval: new tokens of an answer that make an event of its stream; 0: it is not streamed.
            timeout_s: time limit of the request beside the server's; None for no other limit.
            label: the client's own id of the request, by which the live view names it.

        Raises:
            ApiError: 503 if too many requests wait already, 500 if the engine is dead.
            RequestError: if a prompt or its parameters are invalid.
        """
        self._raise_if_dead()
        admission, arrival_s = self.admission, time.monotonic()
        admission.arrive(client, choices)
        try:
            try:
                prepared = await self.in_thread(client, self._prepare, make_jobs, client, arrival_s, label)
            finally:
                admission.prepared(choices)
            self._raise_if_dead()
            tokens = sum(p.prompt_tokens for p in prepared)
            for one in prepared:
                one.expect_cached(self.replicas.cached_tokens(one.names))
            uncached = sum(p.uncached_tokens for p in prepared)
            forecast_s = admission.pass_on(client, choices, tokens, uncached, self._target_ttft_s(prepared))
        except BaseException:
            admission.leave(client, choices)
            raise
        generation = Generation(
            [p.state for p in prepared],
            self.account.open((request for p in prepared for request in p.requests), arrival_s),
            interval,
            lambda ended: self._close(ended, client, choices),
            forecast_s,
        )
        for one in prepared:
            self._open[one.state.request_id] = generation
            self._assembler.add(one.state)
        limits = [t for t in (timeout_s, self.settings.request_timeout) if t is not None]
        if limits:
            generation.give_up_at(arrival_s, min(limits))
        for one in prepared:
            self.replicas.submit(one)
        return generation

    def _target_ttft_s(self, prepared: Sequence[EngineJob]) -> float:
        """Return the target beyond which a request is refused; infinite for none."""
        if not self.settings.shed:
            return math.inf
        default = RequestTargets.of_ms(None, self.config.target_ttft)
        return min(p.requests[0].targets.over(default).ttft_s for p in prepared)

    def _prepare(
        self, make_jobs: Callable[[], Sequence[PromptJob]], client: ApiClient, arrival_s: float, label: str
    ) -> list[EngineJob]:
        prepared: list[EngineJob] = []
        most, total = max(_MAX_REQUEST_TOKENS, self.info.max_model_len), 0
        for job in make_jobs():
            prepared.append(self._prepare_one(job, client, arrival_s, label))
            total += len(prepared[-1].state.prompt_token_ids)
            if total > most:
                raise RequestError(
                    f"prompt must have at most {most} tokens over all prompts of a request, got {total} so far",
                    param="prompt",
                )
        return prepared

    def _prepare_one(self, job: PromptJob, client: ApiClient, arrival_s: float, label: str) -> EngineJob:
        number = f"{next(self._ids):x}"
        name = f"{label}#{number}" if label else number  # clients may use an id more than once
        prompt = job.prompt
        if job.keep is not None:
            if isinstance(prompt, str):
                cut = first_tokens if job.keep_first else last_tokens
                prompt = cut(self.tokenizer, prompt, job.keep, job.add_special_tokens)
            assert isinstance(prompt, list)
            prompt = prompt[: job.keep] if job.keep_first else prompt[-job.keep :]
        salt = prefix_salt(client, job.cache_salt, self.settings.share_prefix_cache)
        params = _with_server_options(job.params, self.settings)
        requests = self.processor.process(
            name, prompt, params, job.priority, salt, job.add_special_tokens, job.pooling
        )
        grammar = requests[0].grammar
        if self.settings.strict and grammar is not None and grammar.warnings:
            raise RequestError(
                f"{grammar.warnings[0]} (the server runs with --strict)", param="structured_outputs"
            )
        if job.length_field is not None and (max_tokens := job.params.max_tokens) is not None:
            check_room(job.length_field, max_tokens, len(requests[0].prompt), self.info.max_model_len)
        targets = job.targets.over(client.targets)
        names = self.replicas.block_names(requests[0])
        first, later = self.replicas.cached_tokens(names), len(names) * self.info.block_size
        requests = [
            replace(
                request,
                client=client.name,
                weight=client.weight,
                targets=targets,
                likely_cached=later if index else first,
            )
            for index, request in enumerate(requests)
        ]
        text = prompt if isinstance(prompt, str) else None
        if job.echo and text is None:
            text = self.tokenizer.decode(requests[0].prompt, skip_special_tokens=False)
        state = RequestState(name, text, requests, self.tokenizer, arrival_s)
        return EngineJob(state, requests, encode_requests(requests), names)

    def _close(self, generation: Generation, client: ApiClient, choices: int) -> None:
        """Remove an ended generation. Its requests are aborted: slots and blocks are free before the next step."""
        ids = [name for state in generation.states for name in self._assembler.abort(state)]
        for state in generation.states:
            self._open.pop(state.request_id, None)
        if ids and not self.died.is_set():
            self.replicas.abort(ids)
        self.admission.leave(client, choices)
        self.account.close(generation.states, generation.tracks, client.name, generation.error is None)
        if generation.error is None:
            self.admission.finished(choices)

    # ----------------------------------------------------------------------------- outputs back

    def take_outputs(self, outputs: Sequence[EngineOutput], figures: Figures) -> None:
        """Apply the outputs of a step. Generations are notified once the messages in the queue are applied."""
        self.admission.report(self.replicas.load, self.replicas.figures.wait_reason)
        now_s = time.monotonic()
        applied = self._assembler.apply(outputs, now_s)
        self.account.apply(outputs, figures, applied.aborts, now_s)
        if applied.aborts:
            self.replicas.abort(applied.aborts)
        if applied.changed and not self._changed:
            self._loop.call_soon(self._notify)
        self._changed.update((state.request_id, state) for state in applied.changed)

    def _notify(self) -> None:
        """Hand changed states to their generations."""
        changed, self._changed = self._changed, {}
        for name, state in changed.items():
            generation = self._open.get(name)
            if generation is None:
                continue
            if (error := state.error) is not None:
                status = 500 if error.internal else 400
                generation.fail(ApiError(status, error.message, error.param, error.code))
            else:
                generation.changed(state)

    def replicas_died(self, cause: str) -> None:
        """End every open generation with the cause."""
        self.cause = cause
        self._notify()  # deliver answers that were complete before
        self.died.set()
        self.fail_all(as_api_error(EngineDead(cause)))

    def fail_all(self, error: ApiError) -> None:
        """End every open generation with `error`."""
        for generation in list(self._open.values()):
            generation.fail(error)

    def _raise_if_dead(self) -> None:
        if self.cause is not None:
            raise as_api_error(EngineDead(self.cause))

    # ------------------------------------------------------------------------------------ state

    @property
    def num_open(self) -> int:
        """Return the number of unfinished choices, including those whose prompt is being tokenized."""
        return self.admission.num_open

    async def stats(self, owner: str | None = None) -> EngineStats:
        """Return the current statistics of all replicas together, of one client or (None) of all.

        Raises:
            ApiError: 503 if a replica does not answer within 5 seconds, 500 if it dies.
        """
        self._raise_if_dead()
        try:
            return await asyncio.wait_for(self.replicas.stats(owner), _STATS_S)
        except TimeoutError:
            raise ApiError(503, f"the engine did not answer within {_STATS_S:g} s") from None
        except EngineDead as error:
            raise as_api_error(error) from None

    async def live(self, since: int, owner: str | None = None) -> EngineLive:
        """Return the current state and the steps after number `since`, for one client or (None) for all.

        Raises:
            ApiError: 500 if a replica dies meanwhile.
        """
        self._raise_if_dead()
        try:
            return await self.replicas.live(since, owner)
        except EngineDead as error:
            raise as_api_error(error) from None

    async def close(self, kill: bool = False) -> None:
        """End open generations with an error and stop the processes; `kill` skips their orderly shutdown."""
        if self.cause is None:
            self.cause = "the server was closed"
        self.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        await self.replicas.close(kill)
        self._threads.close()


def _with_server_options(params: SamplingParams, settings: ServeConfig) -> SamplingParams:
    """Return `params` with the server's options for schemas where the request names none."""
    structured = params.structured_outputs
    if structured is None or structured.disable_additional_properties is not None:
        return params
    structured = replace(structured, disable_additional_properties=settings.close_objects)
    return replace(params, structured_outputs=structured)


def prefix_salt(client: ApiClient, salt: str, shared: bool) -> str:
    """Return the salt of a request's cached prefixes; requests with different salts share none.

    Args:
        client: owner of the request.
        salt: the request's `cache_salt`.
        shared: whether clients share cached prefixes.
    """
    if shared or client == ANYONE:
        return salt
    return f"{client.name}\n{salt}"  # names contain no line feed
