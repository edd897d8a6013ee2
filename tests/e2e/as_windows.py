# ruff: noqa: E402  (imports that must follow a patch)
"""Quire without the modules, functions and sockets that Windows lacks, run by test_platforms.py as a script.

They are removed once other packages are loaded, here and in the template helper process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

# Loaded first, because they choose their implementation by the platform.
import jinja2.sandbox  # noqa: F401
import msgspec  # noqa: F401
import psutil  # noqa: F401
import safetensors.torch  # noqa: F401
import starlette.applications  # noqa: F401
import tokenizers  # noqa: F401
import torch
import tqdm.auto  # noqa: F401
import uvicorn  # noqa: F401
from without_unix import remove_unix

remove_unix()
sys.platform = "win32"

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.cli.main import main
from quire.models.checkpoint.reader import Reader, StoredTensor
from quire.types import QuireError


def refusal(work: Callable[[], object]) -> str:
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
