"""Measurement of the start-up time: from the start of a fresh Python process to the first token, by phase.

Run as a program with the settings as JSON, this module is that process. It prints its times after the first token.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

from quire.types import EngineDead, QuireError

_PROMPT = list(range(10, 138))


def start_up(settings: dict[str, Any]) -> dict[str, float]:
    """Start an engine in a fresh process and generate one token.

    Args:
        settings: fields of EngineConfig.

    Returns:
        Seconds: `total`; the engine's phases, the first of which is `import`; and `first_token`, from the finished
        engine to the token.

    Raises:
        EngineDead: if the process fails; its error message is on standard error.
    """
    command = [sys.executable, "-m", "quire.bench.startup", json.dumps(settings)]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            # Skip the output of libraries.
            line = next((line for line in process.stdout if line.startswith("{")), "")
        except BaseException:  # Ctrl-C, which in a terminal reaches the other process too
            process.kill()
            raise
        total = time.perf_counter() - begin
    if not line:
        raise EngineDead(
            f"the new process ended with exit code {process.returncode} before its first token; "
            "its error message is above"
        )
    return {"total": total, **json.loads(line)}


def _main() -> None:
    begin = time.perf_counter()
    from quire.llm import LLM
    from quire.types import SamplingParams

    imported = time.perf_counter()
    with LLM(**json.loads(sys.argv[1])) as llm:
        built = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        llm.generate({"prompt_token_ids": _PROMPT}, params, use_tqdm=False)
        found = {**llm.info.phases_s, "first_token": time.perf_counter() - built}
        found["import"] += imported - begin
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    try:
        _main()
    except QuireError as error:
        sys.exit(f"quire: {error}")
