"""`AsyncEngine`: the event loop's interface to the engine process.

Owns the process, the tokenizer with its threads, and every open generation. Threads turn text into token ids; the
event loop turns outputs into text, in a few microseconds per token. When the engine dies, every open generation ends
with the cause and `died` is set.

    route --prepare()--> threads: template, tokens, checks --submit()--> engine process
      ^                                                                     |
      +-- Generation.wait() <-- OutputAssembler <-- receive_messages(): one message per step
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import frame
from quire.frontend.length import check_room, first_tokens, last_tokens
from quire.frontend.model import processor_of, tokenizer_of
from quire.frontend.output import OutputAssembler, RequestState
from quire.frontend.processor import Prompt
from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.serve.admission import Admission
from quire.serve.answer.generation import Generation
from quire.serve.client_threads import ClientThreads
from quire.serve.engine_heartbeat import Heartbeat, cpu_of
from quire.serve.engine_process_client import EngineProcess
from quire.serve.http.auth import ANYONE, ApiClient
from quire.serve.http.errors import ApiError, as_api_error
from quire.serve.observe.account import RequestAccounts
from quire.serve.settings import ServeConfig
from quire.types import (
    EngineDead,
    EngineInfo,
    EngineLive,
    EngineRequest,
    EngineStats,
    Pooling,
    RequestError,
    SamplingParams,
)

T = TypeVar("T")
_STATS_S = 5.0
_MAX_REQUEST_TOKENS = 1 << 21  # in all prompts of a request; each id takes 36 bytes
_YIELD_S = 0.005  # longest time to process queued outputs before the new tokens are sent to clients


@dataclass(slots=True)
class PromptJob:
    """One prompt as a route submits it, before tokenization."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = True
    keep: int | None = None  # number of prompt tokens to keep; None: all
    echo: bool = False  # return the text of the prompt, even if it was sent as token ids
    pooling: Pooling | None = None  # return the prompt's pooled hidden states
    # Request field that set max_tokens, which must then fit into the context; None: clip it to what fits.
    length_field: str | None = None
    keep_first: bool = False  # keep tokens at the beginning of the prompt, not at its end


@dataclass(slots=True)
class PreparedRequest:
    """A validated prompt, ready to be sent to the engine."""

    state: RequestState
    requests: list[EngineRequest]
    frames: bytes  # the encoded messages that add the requests


class AsyncEngine:
    """An engine process with the tokenizer, admission control and open generations in front of it."""

    def __init__(
        self, config: EngineConfig, settings: ServeConfig, process: EngineProcess, total_weight: float = 1.0
    ) -> None:
        """Prepare an engine around a running process; `total_weight` is the sum of the weights of all clients."""
        self.config, self.settings, self._total_weight = config, settings, total_weight
        self.died = asyncio.Event()
        self.cause: str | None = None
        self._process = process
        self._threads = ClientThreads(settings.tokenizer_threads, settings.max_waiting)
        self._assembler = OutputAssembler()
        self._open: dict[str, Generation] = {}  # by the request id of each state
        self._changed: dict[str, RequestState] = {}  # not handed to their generations yet
        self._ids = itertools.count()
        # Open questions; the engine answers in order.
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._live: deque[asyncio.Future[EngineLive]] = deque()
        self._receiver: asyncio.Future[None] | None = None
        self.heartbeat = Heartbeat(lambda: process.send(msg.Ping()), cpu_of(process.pid))
        self._heartbeat_task: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Load the tokenizer while the engine process builds the engine, and wait for both.

        Raises:
            ConfigError: if the settings do not fit the model or the machine.
            ModelError: if the model cannot be loaded.
            EngineDead: if the process ends.
        """
        tokenizer = asyncio.ensure_future(self.in_thread(ANYONE, tokenizer_of, self.config))
        try:
            self.info: EngineInfo = await self._process.ready()
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
        self._receiver = asyncio.ensure_future(self.receive_messages())
        self._heartbeat_task = asyncio.ensure_future(self.heartbeat.run())

    async def in_thread(self, client: ApiClient, work: Callable[..., T], *args: object) -> T:
        """Return `work(*args)`, run in a tokenizer thread when it is the client's turn."""
        return await self._threads.run(client, work, *args)

    # ------------------------------------------------------------------------------ requests in

    async def generate(
        self,
        client: ApiClient,
        choices: int,
        make_jobs: Callable[[], Sequence[PromptJob]],
        live: bool,
        timeout_s: float | None,
        label: str = "",
    ) -> Generation:
        """Admit a request, tokenize its prompts in a thread and send them to the engine.

        Args:
            client: owner of the request.
            choices: number of answers: prompts times n.
            make_jobs: returns the prompts; runs in the thread, so it may render templates. It raises RequestError or
                ApiError for requests that cannot be served.
            live: whether the answer is streamed.
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
            admission.pass_on(client, choices, sum(len(p.state.prompt_token_ids) for p in prepared))
        except BaseException:
            admission.leave(client, choices)
            raise
        generation = Generation(
            [p.state for p in prepared],
            self.account.open((request for p in prepared for request in p.requests), arrival_s),
            live,
            lambda ended: self._close(ended, client, choices),
        )
        for one in prepared:
            self._open[one.state.request_id] = generation
            self._assembler.add(one.state)
        limits = [t for t in (timeout_s, self.settings.request_timeout) if t is not None]
        if limits:
            generation.give_up_at(arrival_s, min(limits))
        for one in prepared:
            self._process.send_frames(one.frames)
        return generation

    def _prepare(
        self, make_jobs: Callable[[], Sequence[PromptJob]], client: ApiClient, arrival_s: float, label: str
    ) -> list[PreparedRequest]:
        prepared: list[PreparedRequest] = []
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

    def _prepare_one(
        self, job: PromptJob, client: ApiClient, arrival_s: float, label: str
    ) -> PreparedRequest:
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
        requests = [replace(request, client=client.name, weight=client.weight) for request in requests]
        text = prompt if isinstance(prompt, str) else None
        if job.echo and text is None:
            text = self.tokenizer.decode(requests[0].prompt, skip_special_tokens=False)
        frames = b"".join(frame(msg.encode(msg.Add(request))) for request in requests)
        return PreparedRequest(
            RequestState(name, text, requests, self.tokenizer, arrival_s), requests, frames
        )

    def _close(self, generation: Generation, client: ApiClient, choices: int) -> None:
        """Remove an ended generation. Its requests are aborted: slots and blocks are free before the next step."""
        ids = [name for state in generation.states for name in self._assembler.abort(state)]
        for state in generation.states:
            self._open.pop(state.request_id, None)
        if ids and not self.died.is_set():
            self._process.send(msg.Abort(ids))
        self.admission.leave(client, choices)
        self.account.close(generation.states, generation.tracks, client.name, generation.error is None)
        if generation.error is None:
            self.admission.finished(choices)

    # ----------------------------------------------------------------------------- outputs back

    async def receive_messages(self) -> None:
        """Handle the messages of the engine process until it dies. Started by `start`."""
        yielded_s = time.monotonic()
        try:
            while True:
                message = await self._process.receive()
                # receive() does not suspend while messages are queued.
                if time.monotonic() - yielded_s > _YIELD_S:
                    await asyncio.sleep(0)
                    yielded_s = time.monotonic()
                match message:
                    case msg.Outputs(outputs, load, figures):
                        self.admission.report(load)
                        now_s = time.monotonic()
                        applied = self._assembler.apply(outputs, now_s)
                        self.account.apply(outputs, figures, applied.aborts, now_s)
                        if applied.aborts:
                            self._process.send(msg.Abort(applied.aborts))
                        if applied.changed and not self._changed:  # runs after the queued messages
                            self._loop.call_soon(self._notify)
                        self._changed.update((state.request_id, state) for state in applied.changed)
                    case msg.Stats(stats):
                        if not (waits := self._stats.popleft()).done():
                            waits.set_result(stats)
                    case msg.Pong():
                        self.heartbeat.beat()
                    case msg.Live(live):
                        if not (viewer := self._live.popleft()).done():  # it may be cancelled
                            viewer.set_result(live)
        except Exception as error:  # any error must reach the open requests
            self._die(str(error) if isinstance(error, EngineDead) else f"the engine stopped: {error!r}")

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

    def _die(self, cause: str) -> None:
        self.cause = cause
        self._notify()  # deliver answers that were complete before
        self.died.set()
        self.fail_all(as_api_error(EngineDead(cause)))
        questions: list[asyncio.Future[Any]] = [*self._stats, *self._live]
        for future in questions:
            if not future.done():
                future.set_exception(EngineDead(cause))

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
        """Return the engine's current statistics, of one client or (None) of all.

        Raises:
            ApiError: 503 if the engine does not answer within 5 seconds.
        """
        self._raise_if_dead()
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._process.send(msg.AskStats(owner))
        try:
            return await asyncio.wait_for(future, _STATS_S)
        except TimeoutError:
            raise ApiError(503, f"the engine did not answer within {_STATS_S:g} s") from None

    async def live(self, since: int, owner: str | None = None) -> EngineLive:
        """Return the engine's current state and its steps after number `since`, for one client or (None) for all.

        Raises:
            ApiError: 500 if the engine is dead.
        """
        self._raise_if_dead()
        future: asyncio.Future[EngineLive] = asyncio.get_running_loop().create_future()
        self._live.append(future)
        self._process.send(msg.AskLive(since, owner))
        try:
            return await future
        except EngineDead as error:
            raise as_api_error(error) from None

    async def close(self, kill: bool = False) -> None:
        """End open generations with an error and stop the process; `kill` skips its orderly shutdown."""
        if self.cause is None:
            self.cause = "the server was closed"
        self.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        for task in (self._receiver, self._heartbeat_task):
            if task is not None:
                task.cancel()
        await self._process.close(kill)
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
