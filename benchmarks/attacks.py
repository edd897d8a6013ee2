"""Attack a server and measure what its other clients notice.

    python benchmarks/attacks.py                                   # every attack, one after the other
    python benchmarks/attacks.py --only templates:sum --json out.json

Starts `quire serve demo` with two API keys. Victims with one key stream completions all the time, `/health` is
polled, and an attacker in a process of its own sends one kind of hostile request with the other key. The table
shows, before and during each attack, the victims' inter-token gaps, their slowest first token, the slowest
`/health`, and the peak memory of the API process. Exits with 1 if a limit is exceeded.

The attacker runs at the lowest priority, because a real one has a machine of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import psutil
from attack_payloads import ATTACKS, Attack

VICTIM, ATTACKER = "victim-key", "attacker-key"
GAP_GROWTH_LIMIT_S = 0.1
HEALTH_LIMIT_S = 0.1
FIRST_TOKEN_LIMIT_S = 1.0
API_LIMIT_MIB = 500
ANSWER_TIMEOUT_S = 60.0


@dataclass
class Watched:
    """What victims and `/health` saw in one interval. Times in seconds."""

    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass
class Outcome:
    """One row of the table."""

    attack: str
    answers: dict[str, int]  # what the attacker got: HTTP status or error -> count
    base_gap_p99_ms: float
    base_gap_max_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    first_token_max_ms: float
    health_max_ms: float
    api_peak_mib: float
    failures: dict[str, int]
    exceeded: list[str]


class Server:
    """`quire serve demo` with a victim's and an attacker's key."""

    def __init__(self, flags: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        keys = Path(self._folder.name) / "keys"
        keys.write_text(f"{VICTIM} name=victim\n{ATTACKER} name=attacker\n")
        command = [sys.executable, "-m", "quire", "serve", "demo", "--port", "0"]
        command += ["--api-key-file", str(keys), "--trust-request-chat-template", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = None
        for line in self._process.stdout:
            if found := re.search(r"http://127.0.0.1:\d+", line):
                break
        if not found:
            raise SystemExit("the server did not start")
        self.url = found[0]

    def reset_peak(self) -> None:
        """Restart the kernel's count of the API process's peak memory."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert match
        return int(match[1]) / 1024

    def close(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
            self._process.kill()
            return self._process.wait()
        finally:
            self._folder.cleanup()


class Watch:
    """Victims that stream and a poll of `/health`, all writing to the current `Watched`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, victims: int) -> None:
        self._url, self._session = url, session
        self.seen = Watched()
        self._tasks = [asyncio.create_task(self._victim(i)) for i in range(victims)]
        self._tasks.append(asyncio.create_task(self._health()))

    async def interval(self, seconds: float) -> Watched:
        """Return what is seen in the next `seconds`."""
        self.seen = Watched()
        await asyncio.sleep(seconds)
        return self.seen

    async def _victim(self, number: int) -> None:
        prompt = f"Once upon a time number {number} there was"
        body = {"prompt": prompt, "max_tokens": 128, "temperature": 0, "ignore_eos": True, "stream": True}
        while True:
            begin = time.perf_counter()
            try:
                await self._stream(body, begin)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                self.seen.failures[type(error).__name__] += 1
                await asyncio.sleep(0.1)

    async def _stream(self, body: dict[str, object], begin: float) -> None:
        headers = {"authorization": f"Bearer {VICTIM}"}
        async with self._session.post(f"{self._url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                self.seen.failures[str(answer.status)] += 1
                await asyncio.sleep(0.1)
                return
            last = None
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if b'"error"' in line:
                    self.seen.failures["error event"] += 1
                if last is None:
                    self.seen.first_s.append(now - begin)
                else:
                    self.seen.gaps_s.append(now - last)
                last = now

    async def _health(self) -> None:
        while True:
            begin = time.perf_counter()
            seen = self.seen
            try:
                async with self._session.get(f"{self._url}/health") as answer:
                    if answer.status != 200:
                        seen.failures[f"health {answer.status}"] += 1
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                seen.failures[f"health {type(error).__name__}"] += 1
            self.seen.health_s.append(time.perf_counter() - begin)
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def percentile_ms(values_s: list[float], share: float) -> float:
    """Return a percentile in milliseconds; without values, infinity: nothing arrived."""
    ordered = sorted(values_s)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3 if ordered else float("inf")


async def measure(server: Server, watch: Watch, attack: Attack, seconds: float) -> Outcome:
    """Watch a quiet interval, then one under attack that lasts until the attacker ends."""
    base = await watch.interval(3)
    server.reset_peak()
    command = [
        sys.executable,
        __file__,
        "--url",
        server.url,
        "--attacker",
        attack.name,
        "--seconds",
        str(seconds),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    watch.seen = Watched()
    output, _ = await process.communicate()
    await asyncio.sleep(1)  # what the attack left behind still counts
    seen = watch.seen
    outcome = Outcome(
        attack.name,
        json.loads(output or b"{}"),
        percentile_ms(base.gaps_s, 0.99),
        percentile_ms(base.gaps_s, 1),
        percentile_ms(seen.gaps_s, 0.99),
        percentile_ms(seen.gaps_s, 1),
        percentile_ms(seen.first_s, 1),
        percentile_ms(seen.health_s, 1),
        server.peak_mib(),
        dict(seen.failures),
        [],
    )
    outcome.exceeded = list(exceeded(outcome))
    return outcome


def exceeded(outcome: Outcome) -> Iterator[str]:
    """Name the limits that the attack broke."""
    growth_ms = GAP_GROWTH_LIMIT_S * 1e3
    if outcome.gap_p99_ms > outcome.base_gap_p99_ms + growth_ms:
        yield "gap p99"
    if outcome.gap_max_ms > outcome.base_gap_max_ms + growth_ms:
        yield "gap max"
    if outcome.first_token_max_ms > FIRST_TOKEN_LIMIT_S * 1e3:
        yield "first token"
    if outcome.health_max_ms > HEALTH_LIMIT_S * 1e3:
        yield "health"
    if outcome.api_peak_mib > API_LIMIT_MIB:
        yield "memory"
    if outcome.failures:
        yield "failures"


def show(outcome: Outcome) -> None:
    answers = ", ".join(f"{count}x {answer}" for answer, count in outcome.answers.items()) or "no answer"
    print(
        f"{outcome.attack:<28} {answers:<34} gap p99 {outcome.base_gap_p99_ms:.0f} -> {outcome.gap_p99_ms:.0f} ms, "
        f"max {outcome.base_gap_max_ms:.0f} -> {outcome.gap_max_ms:.0f} ms, "
        f"first token {outcome.first_token_max_ms:.0f} ms, health {outcome.health_max_ms:.0f} ms, "
        f"API {outcome.api_peak_mib:.0f} MiB"
        + (f"  EXCEEDED: {', '.join(outcome.exceeded)} {outcome.failures or ''}" if outcome.exceeded else ""),
        flush=True,
    )


async def defend(server: Server, attacks: list[Attack], seconds: float, victims: int) -> list[Outcome]:
    """Run all attacks against one server; a server that has died ends the run."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        watch = Watch(server.url, session, victims)
        outcomes = []
        await watch.interval(2)
        for attack in attacks:
            outcomes.append(await measure(server, watch, attack, seconds))
            show(outcomes[-1])
        await watch.close()
    return outcomes


async def attack_server(url: str, attack: Attack, seconds: float) -> Counter[str]:
    """Send the attack's requests, `attack.at_once` at a time, until the time is over. Return the answers."""
    body = attack.body()  # takes seconds for some, so before the clock starts
    end = time.monotonic() + seconds
    answers: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {ATTACKER}", "content-type": "application/json", **attack.headers}
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)

    async def send(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < end:
            try:
                async with session.request(
                    attack.method, url + attack.path, data=body, headers=headers
                ) as answer:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(end - time.monotonic(), 0.1)):
                            await answer.read()
                    answers[str(answer.status)] += 1
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                answers[type(error).__name__] += 1
            await asyncio.sleep(attack.pause_s)

    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(send(session) for _ in range(attack.at_once)))
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of attacks, or their beginnings")
    parser.add_argument("--seconds", type=float, default=8, help="duration of each attack")
    parser.add_argument("--victims", type=int, default=4, help="streams of the other client")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--server", nargs="*", default=[], help="more flags of quire serve, without --")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--attacker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = [a for a in ATTACKS if not args.only or a.name.startswith(tuple(args.only))]
    if args.attacker:
        os.nice(19)
        (attack,) = (a for a in ATTACKS if a.name == args.attacker)
        print(json.dumps(asyncio.run(attack_server(args.url, attack, args.seconds))))
        return 0
    server = Server([f"--{flag}" for flag in args.server])
    try:
        outcomes = asyncio.run(defend(server, chosen, args.seconds, args.victims))
    finally:
        code = server.close()
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    broken = [outcome.attack for outcome in outcomes if outcome.exceeded]
    print(f"{len(outcomes)} attacks, {len(broken)} exceeded a limit; the server ended with exit code {code}")
    return int(bool(broken) or code != 0)


if __name__ == "__main__":
    sys.exit(main())
