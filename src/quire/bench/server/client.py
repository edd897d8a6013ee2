"""Load client for servers with OpenAI's API: sends requests at their arrival times and time-stamps the streams.

It uses one event loop, and one connection per open request. Each read from a connection gets one time stamp, so pieces
that arrive together have the same time. Token counts are those that the server reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httptools
import msgspec
from tqdm import tqdm

from quire.bench.load.datasets import BenchRequest
from quire.bench.run import Run, ServedRequest
from quire.bench.server.http import HttpClient
from quire.types import ConfigError

T = TypeVar("T")
_TIMEOUT_S = 6 * 3600.0  # per request, as in vLLM's benchmark
_PATIENCE_S = 10.0  # timeout of routes that do not run the model
_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """The endpoint of a load, and the headers and fields of all its requests."""

    base_url: str
    endpoint: str = "/v1/completions"
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # in every body: model and sampling parameters
    id_prefix: str = ""
    insecure: bool = False  # whether to skip the check of certificates

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def body(self, request: BenchRequest) -> bytes:
        """Encode the body of a request as JSON."""
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.output_len
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.output_len
        return msgspec.json.encode({**body, **self.fields})


class _StreamDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: _StreamDelta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _StreamUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _StreamUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class AnswerReader:
    """The parser of one stream of server-sent events, which fills a `ServedRequest`."""

    def __init__(self, served: ServedRequest, is_chat: bool) -> None:
        self._served, self._is_chat = served, is_chat
        self._rest = b""
        self._text: list[str] = []

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse the data of one read, which happened at `now_s`. Raise msgspec.MsgspecError for an invalid chunk."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                self._chunk(_decode(line[5:]), now_s)

    def _chunk(self, chunk: _Chunk, now_s: float) -> None:
        if chunk.error is not None:
            self._served.error = str(chunk.error)[:_ERROR_CHARS]
        if chunk.choices:
            choice = chunk.choices[0]
            text = choice.text or ""
            if (delta := choice.delta) is not None:
                text = delta.content or delta.reasoning or delta.reasoning_content or ""
            self._text.append(text)
            # The first chunk of a chat holds the role, the last one the finish reason; neither holds a token.
            if not self._is_chat or text or (delta is not None and delta.tool_calls):
                self._served.token_times_s.append(now_s)
        if (usage := chunk.usage) is not None:
            self._served.num_tokens = usage.completion_tokens
            self._served.prompt_len = usage.prompt_tokens or self._served.prompt_len
            details = usage.prompt_tokens_details
            self._served.cached_tokens = (details and details.cached_tokens) or 0

    def finish(self) -> None:
        """Store the text at the end of the stream; a stream without a token is an error."""
        self._served.text = "".join(self._text)
        if not self._served.token_times_s and self._served.error is None:
            self._served.error = "the stream ended without a token"


class LoadClient:
    """A client of one server, which owns its connections. An async context manager."""

    def __init__(self, target: ServerTarget) -> None:
        self.target = target

    async def __aenter__(self) -> LoadClient:
        target = self.target
        try:
            headers = {"Content-Type": "application/json", **target.headers}
            self._http = HttpClient(target.base_url, headers, target.insecure)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.close()

    async def get(self, path: str) -> Any:
        """Return the JSON body of a GET, or None if the server has no such route.

        Raises:
            ConfigError: if no server answers, or it requires an API key.
        """
        base_url = self.target.base_url
        try:
            async with asyncio.timeout(_PATIENCE_S):
                status, body = await self._http.request("GET", path, {})
        except (OSError, httptools.HttpParserError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise ConfigError(f"no server answers at {base_url}: {reason}") from None
        if status in (401, 403):
            raise ConfigError(
                f"{base_url} requires an API key: set OPENAI_API_KEY, or --header Authorization='Bearer KEY'"
            )
        try:
            return msgspec.json.decode(body) if status == 200 else None
        except msgspec.MsgspecError:
            return None

    async def send(self, request: BenchRequest, served: ServedRequest, clock: Callable[[], float]) -> None:
        """Send a request, and read its answer into `served`. An error is stored in `served.error`."""
        target, answer = self.target, AnswerReader(served, self.target.is_chat)
        headers = {"X-Request-Id": f"{target.id_prefix}{request.number}"} if target.id_prefix else {}
        body = target.body(request)
        served.start_s = clock()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, error_body = await self._http.request(
                    "POST", target.endpoint, headers, body, lambda data: answer.feed(data, clock())
                )
        except (OSError, httptools.HttpParserError, msgspec.MsgspecError, ValueError) as error:
            served.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
            return
        if status == 200:
            answer.finish()
        else:
            served.error = f"{status}: {error_body.decode(errors='replace')[:_ERROR_CHARS]}"

    async def run(
        self,
        requests: Sequence[BenchRequest],
        arrivals_s: Sequence[float],
        max_concurrency: int | None = None,
        show_progress: bool = False,
    ) -> Run:
        """Send all requests, and wait for the last answer.

        Args:
            requests: the requests.
            arrivals_s: arrival time of each request in seconds, ascending.
            max_concurrency: limit of open requests; None for no limit.
            show_progress: whether to show a progress bar.
        """
        served = [ServedRequest(request.prompt_len, at) for request, at in zip(requests, arrivals_s)]
        places = asyncio.Semaphore(max_concurrency or len(requests))
        bar = tqdm(
            total=len(requests), desc="Serving", unit="req", disable=not show_progress, dynamic_ncols=True
        )
        done: list[int] = []  # tokens of the finished answers
        begin_s, begin_processor_s = time.perf_counter(), time.process_time()

        def clock() -> float:
            return time.perf_counter() - begin_s

        async def one(request: BenchRequest, result: ServedRequest) -> None:
            try:
                await self.send(request, result, clock)
            finally:
                places.release()
                done.append(result.output_len)
                bar.set_postfix_str(f"{sum(done) / clock():,.0f} tok/s out", refresh=False)
                bar.update()

        with bar:
            async with asyncio.TaskGroup() as tasks:
                for request, result in zip(requests, served):
                    if (early_s := result.start_s - clock()) > 0:
                        await asyncio.sleep(early_s)
                    await places.acquire()
                    tasks.create_task(one(request, result))
        return Run(served, [], begin_s, time.process_time() - begin_processor_s)


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.Runner]:
    """Make an event loop for a client. It is uvloop's if installed, to keep the client's own cost low."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a client's event loop and return its result."""
    with event_loop() as runner:
        return runner.run(work)
