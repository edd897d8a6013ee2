"""The life of a server: start-up, signals, draining, exit code.

start-up         bind the port -> start the engine processes -> load HTTP libraries meanwhile -> engine ready -> listen
first signal     SIGTERM or SIGINT: new requests get 503, open ones may continue for shutdown_timeout seconds
second signal    stop at once
engine death     of the last replica: every open request ends with the cause, /health answers 503, and the exit code is 1
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from quire import __version__
from quire.config import EngineConfig
from quire.frontend.generation_config import default_pooling
from quire.frontend.location import locate_model
from quire.serve.answer.form import AnswerForms
from quire.serve.api.context import ServerContext
from quire.serve.api.templates import ChatTemplates
from quire.serve.async_engine import AsyncEngine
from quire.serve.http.app import build_app
from quire.serve.http.auth import ApiKeys
from quire.serve.http.connection import connections
from quire.serve.http.errors import ApiError
from quire.serve.http.listen import listen
from quire.serve.http.stop import ShutdownSignal
from quire.serve.observe.line_writer import STDERR, LineWriter
from quire.serve.observe.logs import set_up_logging, write_stats
from quire.serve.observe.observer import Observer, RequestLog
from quire.serve.replicas.replica_set import ReplicaSet
from quire.serve.settings import ServeConfig
from quire.types import QuireError

log = logging.getLogger("quire.serve")
_SWITCH_S = 0.0005
_GC_THRESHOLDS = 5000, 20, 1 << 30
_GC_INTERVAL_S, _GC_LATEST_S = 5.0, 600.0
# From the engine's death to the exit: open requests and health checks get their answers.
_LAST_ANSWERS_S = 1.0


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers: this module decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    config: EngineConfig,
    settings: ServeConfig,
    keys: ApiKeys,
    replicas: ReplicaSet,
    sock: socket.socket,
    stop: ShutdownSignal,
    loading: contextlib.AbstractContextManager[None],
) -> int:
    """Serve until a signal or the death of the engine.

    Args:
        config: settings of the engine.
        settings: settings of the server.
        keys: accepted API keys.
        replicas: the engine processes, started already.
        sock: bound socket.
        stop: signals received since the start of the process.
        loading: entered until the engine is ready, to show progress.

    Returns:
        The exit code: 0 after a drain, 1 if the engine died, 128 plus the signal's number after a second signal or a
        signal during start-up.

    Raises:
        ConfigError: if the settings do not fit the model or the machine.
        ModelError: if the model cannot be loaded.
    """
    began_s = time.perf_counter()
    # After each system call the event loop waits this long for a computing thread to release the GIL.
    sys.setswitchinterval(_SWITCH_S)
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # not available on every platform
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve(config, settings, keys, replicas, sock, stop, loading, began_s))


async def _serve(
    config: EngineConfig,
    settings: ServeConfig,
    keys: ApiKeys,
    replicas: ReplicaSet,
    sock: socket.socket,
    stop: ShutdownSignal,
    loading: contextlib.AbstractContextManager[None],
    began_s: float,
) -> int:
    lines = set_up_logging(settings)
    names = list(dict.fromkeys(settings.served_model_name)) or [config.model]
    observers = _observers(settings, names[0])
    engine = AsyncEngine(config, settings, replicas, keys.total_weight)
    templates = ChatTemplates(engine)
    stop.attach()
    ready = False
    try:
        await asyncio.to_thread(templates.read_setting)
        started = asyncio.ensure_future(engine.start())
        with loading:
            await asyncio.wait((started, stop.first), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            return 128 + stop.first.result()
        started.result()
        ready = True
        server = _make_server(engine, names, templates, keys.total_weight, observers, lines)
        web = _Uvicorn(_options(server, keys))
        listen(sock, settings)
        serving = asyncio.ensure_future(web.serve(sockets=[sock]))
        while not web.started and not serving.done():
            await asyncio.sleep(0.001)
        if serving.done():
            serving.result()  # raise the error that prevented the start
        garbage = asyncio.ensure_future(_collect_garbage(engine))
        _announce(server, keys, sock, time.perf_counter() - began_s)
        warming = asyncio.ensure_future(asyncio.to_thread(templates.warm))
        figures = asyncio.ensure_future(write_stats(engine, settings.log_stats_interval))
        code = await _until_the_end(server, stop, serving)
        for task in (figures, garbage, warming):
            task.cancel()
        web.should_exit = True
        server.live.close()
        server.counting.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(serving, 5)
        for observer in (server.bodies, *observers):
            await asyncio.to_thread(observer.close)
        return code
    finally:
        templates.close()
        await engine.close(kill=stop.second.done() or not ready)
        lines.close()


async def _collect_garbage(engine: AsyncEngine) -> None:
    """Run full garbage collections only while no request is open, but at least every ten minutes.

    Otherwise a request for thousands of answers makes the collector traverse all their objects again and again, which
    stops the process for 0.2 s each time.
    """
    gc.collect()
    gc.freeze()  # the objects that exist now live as long as the server
    gc.set_threshold(*_GC_THRESHOLDS)
    collected_s = time.monotonic()
    while True:
        await asyncio.sleep(_GC_INTERVAL_S)
        if not engine.num_open or time.monotonic() - collected_s > _GC_LATEST_S:
            gc.collect()
            collected_s = time.monotonic()


def _make_server(
    engine: AsyncEngine,
    names: list[str],
    templates: ChatTemplates,
    total_weight: float,
    observers: list[Observer],
    lines: LineWriter,
) -> ServerContext:
    """Build the context of the routes around a started engine. Raise ConfigError for wrong settings."""
    settings = engine.settings
    forms = AnswerForms(
        engine.tokenizer,
        settings.tool_call_parser,
        settings.reasoning_parser,
        settings.stream_tool_arguments,
    )
    files = locate_model(engine.config.model, engine.config.revision)
    pooling = settings.pooling if settings.pooling != "auto" else default_pooling(files.path)
    return ServerContext(
        engine, settings, names, forms, templates, files, pooling, total_weight, observers, lines=lines
    )


def _options(server: ServerContext, keys: ApiKeys) -> uvicorn.Config:
    settings = server.settings
    return uvicorn.Config(
        build_app(server, keys),
        log_config=None,  # logs.py configures logging
        log_level=settings.log_level.lower(),
        access_log=False,
        lifespan="off",
        ws="none",
        http=connections(asyncio.get_running_loop()),
        proxy_headers=False,  # client addresses are not used
        server_header=False,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,  # longer than usual for proxies, so that the proxy closes the connection
    )


def _observers(settings: ServeConfig, model: str) -> list[Observer]:
    """Build the observers that the settings enable. Raise ConfigError if tracing is impossible."""
    found: list[Observer] = [RequestLog()] if settings.log_requests else []
    if settings.otlp_endpoint is not None:
        from quire.serve.observe.tracing import make_tracing

        found.append(make_tracing(settings.otlp_endpoint, model))
    return found


async def _until_the_end(server: ServerContext, stop: ShutdownSignal, serving: asyncio.Future[None]) -> int:
    engine = server.engine
    died = asyncio.ensure_future(engine.died.wait())
    await asyncio.wait((stop.first, died, serving), return_when=asyncio.FIRST_COMPLETED)
    if stop.first.done() and not died.done():
        await _drain(server, stop, died)
    died.cancel()
    if engine.cause is not None:
        server.tell(f"quire: {engine.cause}", STDERR)
        await asyncio.sleep(_LAST_ANSWERS_S)
        return 1
    return 0 if not stop.second.done() else 128 + stop.second.result()


async def _drain(server: ServerContext, stop: ShutdownSignal, died: asyncio.Future[Any]) -> None:
    """Wait for open requests up to shutdown_timeout seconds, then end the rest with an error."""
    engine, timeout_s = server.engine, server.settings.shutdown_timeout
    server.draining = True
    engine.admission.draining = "the server is shutting down"
    deadline_s = time.monotonic() + timeout_s
    if engine.num_open:
        server.tell(
            f"quire: stopping; {engine.num_open} open requests may continue for {timeout_s:g} s "
            "(send the signal again to stop now)",
            STDERR,
        )
    while engine.num_open and time.monotonic() < deadline_s and not (stop.second.done() or died.done()):
        await asyncio.wait((stop.second, died), timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    engine.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))


def _formats(server: ServerContext) -> str:
    """Return a line on the formats of calls and reasoning; "" without a chat template. Warn if one is a guess."""
    try:
        template = server.templates.choose(None, True)
    except QuireError:
        return ""
    line, guess = server.forms.report(template)
    if guess and "tools" in template:
        log.warning("%s; name it with --tool-call-parser (docs/TOOLS.md lists the formats)", line)
    return f"{line}\n"


def _announce(server: ServerContext, keys: ApiKeys, sock: socket.socket, took_s: float) -> None:
    settings, info = server.settings, server.engine.info
    port = sock.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.ssl_certfile else "http"
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in info.phases_s.items())
    kind = (
        "dry run, no model"
        if settings.dry_run
        else f"{info.num_parameters / 1e6:.1f} M parameters, {info.dtype}"
    )
    local = settings.host in ("127.0.0.1", "localhost", "::1")
    reach = "this machine only; use --host 0.0.0.0 for others" if local else "open to the network"
    if not local and not len(keys):
        reach += " without a key: use --api-key to require one"
    server.tell(
        f"quire {__version__}: {info.model} ({kind}) on {info.device}, context {info.max_model_len} tokens, "
        f"up to {info.max_num_seqs} concurrent requests\n"
        f"start-up {took_s:.2f} s; engine: {phases}\n"
        f"{_formats(server)}"
        f"serving on {scheme}://{host}:{port} ({reach})"
        + ("; open it in a browser for the playground and the live view" if settings.page else ""),
    )
