# ruff: noqa: E402  (imports that must follow a patch)
"""Quire without what Windows lacks, run by test_platforms.py in a process of its own: modules, functions and sockets
that only Unix has are taken away once other packages are loaded."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

# Loaded first: they choose what they are by the platform.
import jinja2.sandbox  # noqa: F401
import msgspec  # noqa: F401
import psutil  # noqa: F401
import safetensors.torch  # noqa: F401
import starlette.applications  # noqa: F401
import tokenizers  # noqa: F401
import torch
import tqdm.auto  # noqa: F401
import uvicorn  # noqa: F401

UNIX_MODULES = {"fcntl", "grp", "pwd", "readline", "resource", "termios", "triton", "uvloop"}
UNIX_NAMES: dict[Any, list[str]] = {
    os: ["fork", "getuid", "geteuid", "getgid", "getpgid", "killpg", "pread", "preadv", "setsid", "uname", "sysconf"],
    select: ["poll", "epoll"],
    signal: ["SIGALRM", "SIGHUP", "SIGKILL", "SIGPROF", "SIGUSR1", "SIGUSR2", "setitimer", "alarm", "pthread_sigmask"],
    socket: ["AF_UNIX", "SO_REUSEPORT"],
}  # fmt: skip


for module in [name for name in sys.modules if name.partition(".")[0] in UNIX_MODULES]:
    del sys.modules[module]
sys.modules |= dict.fromkeys(UNIX_MODULES)  # None: it cannot be imported, and is not found
for module, names in UNIX_NAMES.items():
    for name in names:
        vars(module).pop(name, None)
sys.platform = "win32"

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.cli.main import main
from quire.models.checkpoint.reader import Reader, StoredTensor
from quire.types import QuireError


def refusal(work: Any) -> str:
    try:
        work()
    except QuireError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


with LLM("demo", device="cpu", kv_cache_memory=1 << 25) as llm:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    print("generate", len(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids))
    message = {"role": "user", "content": "Tell me a story."}
    print("chat", len(llm.chat([message], params, use_tqdm=False)[0].outputs[0].token_ids))
    choice = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    print("structured", refusal(lambda: llm.generate("Once", choice, use_tqdm=False)))
    print("again", len(llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids))
print("process", refusal(lambda: LLM("demo", engine_process=True)))

# A file with line ends, read in pieces by several threads.
file = Path(sys.argv[1])
read = torch.zeros(1000, dtype=torch.uint8)
reader = Reader(torch.device("cpu"), threads=4, piece_bytes=100)
reader.add(StoredTensor("x", file, 0, (1000,), torch.uint8), slice(None), slice(None), read)
reader.finish()
print("read", bytes(read.tolist()) == file.read_bytes())

flags = ["--device", "cpu", "--kv-cache-memory", str(1 << 25), "--max-tokens", "5"]
print("command", main(["generate", "Once", *flags]))
print("serve", main(["serve", "demo"]), flush=True)
