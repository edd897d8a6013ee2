"""Endurance test: many clients for a long time, some of which disconnect or read slowly.

    python benchmarks/endurance.py --clients 1 8 32 128 512 --seconds 60

Each client sends one streamed request after the other to `quire serve` on 127.0.0.1. Every request must end exactly
once. One in five clients disconnects during its answer, one in twenty before the first token, and one in ten reads
slowly through a small buffer; the others read to the end and check the stream. After each number of clients the server
must be idle with all blocks free. Prints one line per number of clients. Exits with 1 if anything was lost, arrived
twice or was not released.

    python benchmarks/endurance.py --clients 32 --seconds 1800 --engine-limit-mib 800 --api-limit-mib 500

also prints the resident memory of both processes every 30 seconds, and exits with 1 if one exceeds its limit, or if
the engine process grows by more than 32 MiB from the end of the third minute on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

KINDS = {"reads": 65, "leaves": 20, "leaves at once": 5, "slow": 10}
WORDS = [
    "the",
    "red",
    "gardener",
    "found",
    "a",
    "rabbit",
    "behind",
    "the",
    "old",
    "pond",
    "and",
    "went",
    "to",
    "the",
    "zoo",
    "on",
    "Friday",
    "with",
    "Rosa",
]
GRAMMARS = [
    {"regex": "(red|blue) [a-z ]{8,40}"},
    {"json": {"type": "array", "items": {"enum": WORDS}, "maxItems": 9}},
]
LONG = 0.03  # share of prompts of several hundred words
IDLE_S = 20.0
SAMPLE_S = 30.0  # between two samples of memory
SETTLED_S = 180.0  # after which memory must be flat
MOST_GROWTH_MIB = 32.0


@dataclass
class Level:
    """The results of one number of clients. `wrong` lists the violations."""

    clients: int
    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    rss_mib: list[tuple[float, float]] = field(default_factory=list)  # of the API and the engine process
    rss_at_s: list[float] = field(default_factory=list)  # when

    def sample(self, server: Server, began_s: float) -> None:
        self.rss_at_s.append(time.monotonic() - began_s)
        self.rss_mib.append(server.rss_mib())

    def check_memory(self, api_limit_mib: float, engine_limit_mib: float) -> None:
        """Add a violation for a process above its limit, and for an engine process that grows after settling."""
        for name, number, limit in (("API", 0, api_limit_mib), ("engine", 1, engine_limit_mib)):
            if (most := max(rss[number] for rss in self.rss_mib)) > limit:
                self.wrong.append(f"{name} process at {most:.0f} MiB, limit {limit:.0f}")
        settled = [rss[1] for rss, at_s in zip(self.rss_mib, self.rss_at_s) if at_s >= SETTLED_S]
        if settled and (growth := max(settled) - settled[0]) > MOST_GROWTH_MIB:
            self.wrong.append(f"the engine process grew by {growth:.0f} MiB after {SETTLED_S:.0f} s")

    seconds: float = 0.0


class Server:
    def __init__(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = None
        for line in self._process.stdout:
            if found := re.search(r"http://127.0.0.1:\d+", line):
                break
        assert found, "the server did not start"
        self.url = found[0]
        self._api = psutil.Process(self._process.pid)
        (self._engine,) = (p for p in self._api.children() if "quire.engine_process" in p.cmdline())

    def rss_mib(self) -> tuple[float, float]:
        api, engine = (process.memory_info().rss / 2**20 for process in (self._api, self._engine))
        return api, engine

    def close(self) -> int:
        self._process.terminate()
        return self._process.wait(60)


def small_buffer(address: tuple[Any, ...]) -> socket.socket:
    """Make a socket with a small receive buffer, so that unread data of a slow client reaches the server's buffers."""
    family, kind, proto, _, _ = address
    made = socket.socket(family, kind, proto)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    return made


def request(r: random.Random, kind: str) -> tuple[str, dict[str, Any]]:
    """Return the route and body of a random request."""
    words = r.randint(300, 1200) if r.random() < LONG else r.randint(1, 60)
    text = " ".join(r.choice(WORDS) for _ in range(words))
    body: dict[str, Any] = {
        "max_tokens": r.randint(1, 96),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": r.choice([0, 0.8]),
        "ignore_eos": r.random() < 0.5,
        "n": r.choice([1, 1, 1, 2]),
    }
    if r.random() < 0.15:
        body |= {"structured_outputs": r.choice(GRAMMARS)}
    if r.random() < 0.2:
        body |= {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    if r.random() < 0.5:
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
        more = {"logprobs": True, "top_logprobs": 20}
    else:
        path, asked = "/v1/completions", {"prompt": text}
        more = {"logprobs": 20}
    return path, {**body, **asked, **(more if kind == "slow" else {})}


def check(body: dict[str, Any], data: bytes, level: Level) -> str:
    """Return how a complete stream ended, and add its violations to the level."""
    events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    if not events or events[-1] != b"[DONE]" or events.count(b"[DONE]") != 1:
        level.wrong.append(f"a stream ended with {data[-80:]!r}")
        return "lost"
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return "error"
    reasons = Counter(c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"])
    if reasons != Counter(range(body["n"])):
        level.wrong.append(f"choices ended {dict(reasons)}")
    usage = chunks[-1]["usage"]
    if not body["n"] <= usage["completion_tokens"] <= body["n"] * body["max_tokens"]:
        level.wrong.append(f"{usage} for {body['n']} answers of at most {body['max_tokens']} tokens")
    level.tokens += usage["completion_tokens"]
    return "done"


async def one(sessions: dict[bool, aiohttp.ClientSession], url: str, r: random.Random, level: Level) -> str:
    """Send one request and return how it ended."""
    (kind,) = r.choices(list(KINDS), list(KINDS.values()))
    path, body = request(r, kind)
    patience_s = r.uniform(0, 0.05) if kind == "leaves at once" else 300
    pieces_left = r.randint(1, 20) if kind == "leaves" else -1
    data, began_s = bytearray(), time.perf_counter()
    level.sent += 1
    try:
        async with (
            asyncio.timeout(patience_s),
            sessions[kind == "slow"].post(url + path, json=body) as answer,
        ):
            if answer.status == 503:
                return "refused"
            if answer.status != 200:
                level.wrong.append(f"{answer.status}: {(await answer.text())[:200]}")
                return "wrong"
            while piece := await (answer.content.read(1024) if kind == "slow" else answer.content.readany()):
                if not data:
                    level.first_s.append(time.perf_counter() - began_s)
                data += piece
                pieces_left -= 1
                if pieces_left == 0:
                    answer.close()
                    return "left"
                if kind == "slow" and r.random() < 0.2:
                    await asyncio.sleep(r.uniform(0, 0.05))
    except TimeoutError:
        if kind != "leaves at once":
            level.wrong.append(f"no end after {patience_s} s")
        return "left"
    return check(body, bytes(data), level)


async def client(
    sessions: dict[bool, aiohttp.ClientSession], url: str, seed: int, end_s: float, level: Level
) -> None:
    r = random.Random(seed)
    while time.monotonic() < end_s:
        try:
            how = await one(sessions, url, r, level)
        except Exception as error:
            level.wrong.append(repr(error)[:200])
            how = "wrong"
        level.ended[how] += 1
        if how == "refused":
            await asyncio.sleep(r.uniform(0.2, 1))


async def idle(session: aiohttp.ClientSession, url: str, level: Level) -> dict[str, Any]:
    """Wait until no request is open and return the metrics; add what was not released to the level."""
    deadline_s = time.monotonic() + IDLE_S
    while True:
        async with session.get(url + "/stats") as answer:
            stats: dict[str, Any] = await answer.json()
        requests = stats["requests"]
        if not (requests["active"] or requests["waiting"] or requests["open"]):
            break
        if time.monotonic() > deadline_s:
            level.wrong.append(f"not idle: {requests}")
            break
        await asyncio.sleep(0.1)
    if stats["blocks"]["used"]:
        level.wrong.append(f"{stats['blocks']['used']} blocks are still in use")
    return stats


async def run(
    server: Server,
    counts: list[int],
    seconds: float,
    seed: int = 0,
    api_limit_mib: float = math.inf,
    engine_limit_mib: float = math.inf,
) -> list[Level]:
    """Run each number of clients for `seconds`. Print memory samples if the engine process has a limit."""
    levels = []
    fast = aiohttp.TCPConnector(limit=0)
    slow = aiohttp.TCPConnector(limit=0, socket_factory=small_buffer)
    async with aiohttp.ClientSession(connector=fast) as one, aiohttp.ClientSession(connector=slow) as other:
        for count in counts:
            level = Level(count)
            levels.append(level)
            began_s = time.monotonic()
            clients = [
                client({False: one, True: other}, server.url, seed * 1_000_003 + i, began_s + seconds, level)
                for i in range(count)
            ]
            running = asyncio.gather(*clients)
            watched = engine_limit_mib < math.inf
            while not running.done():
                level.sample(server, began_s)
                if watched:
                    show_memory(level)
                await asyncio.wait([running], timeout=SAMPLE_S if watched else max(seconds / 12, 0.2))
            level.seconds = time.monotonic() - began_s
            await idle(one, server.url, level)
            level.sample(server, began_s)
            level.check_memory(api_limit_mib, engine_limit_mib)
            if sum(level.ended.values()) != level.sent:
                level.wrong.append(f"{level.sent} sent, {sum(level.ended.values())} ended")
            show(level)
    return levels


def show_memory(level: Level) -> None:
    (api_mib, engine_mib), at_s = level.rss_mib[-1], level.rss_at_s[-1]
    print(f"{at_s:6.0f} s: API process {api_mib:.0f} MiB, engine process {engine_mib:.0f} MiB", flush=True)


def show(level: Level) -> None:
    first = sorted(level.first_s) or [0.0]
    ended = ", ".join(f"{count} {how}" for how, count in sorted(level.ended.items()))
    third = level.rss_mib[len(level.rss_mib) // 3]
    print(
        f"{level.clients:>4} clients, {level.seconds:.0f} s: {level.sent} requests ({ended}), "
        f"{level.tokens / level.seconds:.0f} tokens/s to those who read on, first piece after "
        f"{first[len(first) // 2] * 1e3:.0f} ms (99 %: {first[len(first) * 99 // 100] * 1e3:.0f} ms); "
        f"API process {third[0]:.0f} to {level.rss_mib[-1][0]:.0f} MiB, "
        f"engine {third[1]:.0f} to {level.rss_mib[-1][1]:.0f} MiB; "
        + ("all blocks free, nothing lost" if not level.wrong else f"WRONG: {level.wrong[:5]}"),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--api-limit-mib", type=float, default=math.inf, help="memory limit of the API process in MiB"
    )
    parser.add_argument(
        "--engine-limit-mib", type=float, default=math.inf, help="memory limit of the engine process in MiB"
    )
    parser.add_argument(
        "--server", nargs="*", default=["demo"], help="model and flags of quire serve, without --"
    )
    args = parser.parse_args()
    model, *flags = args.server
    server = Server([model, *(f"--{flag}" for flag in flags)])
    try:
        levels = asyncio.run(
            run(server, args.clients, args.seconds, args.seed, args.api_limit_mib, args.engine_limit_mib)
        )
    finally:
        code = server.close()
    print(f"the server ended with exit code {code}")
    return int(code != 0 or any(level.wrong for level in levels))


if __name__ == "__main__":
    sys.exit(main())
