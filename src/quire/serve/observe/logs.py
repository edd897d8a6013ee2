"""Logging of the server as text or JSON lines, and the periodic line with its statistics.

A thread writes the lines (line_writer.py), so neither a full disk nor a stalled reader stops the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from quire.serve.async_engine import AsyncEngine
from quire.serve.http.wire import encode
from quire.serve.observe.line_writer import STDERR, STDOUT, LineWriter, dropped_lines
from quire.serve.observe.observer import REQUESTS
from quire.serve.settings import ServeConfig

_TEXT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
_STATS = "quire.stats"


class _ToLines(logging.Handler):
    """A logging handler that passes records to a LineWriter."""

    def __init__(self, lines: LineWriter) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.write(self.format(record), STDERR)
        except Exception:
            self.handleError(record)


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object per record, including the fields of `extra={"figures": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        body = json_record(record.levelname.lower(), record.name, record.getMessage(), record.created)
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        body |= record.__dict__.get("figures", {})
        return encode(body).decode()


def json_record(level: str, logger: str, message: str, at_s: float) -> dict[str, Any]:
    """Return the fields of a JSON line; `at_s` is in seconds since the epoch."""
    time_ = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return {"time": time_, "level": level, "logger": logger, "message": message}


def set_up_logging(settings: ServeConfig) -> LineWriter:
    """Send the records of all loggers to standard error, formatted as configured. Return the writer of the lines."""
    lines = LineWriter(lambda count: "\n".join(_formatted(settings, dropped_lines(count), "warning")))
    handler = _ToLines(lines)
    text = logging.Formatter(_TEXT, "%m-%d %H:%M:%S")
    handler.setFormatter(JsonLines() if settings.log_format == "json" else text)
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    for name in (_STATS, REQUESTS):  # these have separate flags
        logging.getLogger(name).setLevel(logging.INFO)
    return lines


def tell(lines: LineWriter, settings: ServeConfig, text: str, to: int = STDOUT) -> None:
    """Write `text` to the file descriptor `to`, as it is or as one JSON line for each of its lines."""
    lines.write("\n".join(_formatted(settings, text, "info")), to)


def _formatted(settings: ServeConfig, text: str, level: str) -> list[str]:
    if settings.log_format != "json":
        return [text]
    now_s = time.time()
    return [encode(json_record(level, "quire", one, now_s)).decode() for one in text.splitlines()]


class StatsLine:
    """The statistics line in the format of vLLM, with rates since the previous line."""

    def __init__(self, engine: AsyncEngine, now_s: float) -> None:
        self._engine, self._since_s = engine, now_s
        self._before = self._counts()
        self._hit_rate = 0.0
        self._was_busy = False

    def _counts(self) -> tuple[int, int, int, int]:
        account = self._engine.account
        totals = self._engine.replicas.figures.totals
        return account.prompt_tokens, totals.generated_tokens, totals.queried_tokens, totals.cached_tokens

    def figures(self, now_s: float) -> dict[str, float] | None:
        """Return the statistics since the previous call, or None if the server was idle during the last two calls."""
        engine, counts = self._engine, self._counts()
        load, figures, blocks = engine.admission.load, engine.replicas.figures, engine.info.num_blocks
        prompt, generated, queried, cached = (new - old for new, old in zip(counts, self._before))
        passed_s, self._before, self._since_s = now_s - self._since_s, counts, now_s
        if queried:
            self._hit_rate = cached / queried
        busy = bool(load.running or load.waiting or prompt or generated)
        relevant, self._was_busy = busy or self._was_busy, busy
        if not relevant:
            return None
        used = blocks - figures.free_blocks if figures.totals.steps else 0
        return {
            "prompt_tokens_per_s": round(prompt / passed_s, 1),
            "generation_tokens_per_s": round(generated / passed_s, 1),
            "running": load.running,
            "waiting": load.waiting,
            "kv_cache_usage": round(used / blocks, 4),
            "prefix_cache_hit_rate": round(self._hit_rate, 4),
        }


def stats_text(figures: dict[str, float]) -> str:
    """Return the statistics as text in vLLM's wording, which existing log parsers understand."""
    return (
        f"Engine 000: Avg prompt throughput: {figures['prompt_tokens_per_s']:.1f} tokens/s, "
        f"Avg generation throughput: {figures['generation_tokens_per_s']:.1f} tokens/s, "
        f"Running: {figures['running']} reqs, Waiting: {figures['waiting']} reqs, "
        f"GPU KV cache usage: {100 * figures['kv_cache_usage']:.1f}%, "
        f"Prefix cache hit rate: {100 * figures['prefix_cache_hit_rate']:.1f}%"
    )


async def write_stats(engine: AsyncEngine, interval_s: float) -> None:
    """Log a statistics line every `interval_s` seconds unless the server is idle; 0: never."""
    log = logging.getLogger(_STATS)
    stats = StatsLine(engine, time.monotonic())
    while interval_s > 0:
        await asyncio.sleep(interval_s)
        if (figures := stats.figures(time.monotonic())) is not None:
            log.info(stats_text(figures), extra={"figures": figures})
