"""`quire generate`: answer a prompt, a file of prompts or standard input, as text or JSON lines."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.flags import (
    DEFAULT_MAX_TOKENS,
    add_flags,
    add_structured_flags,
    engine_settings,
    given,
    given_structured,
    split_model,
)
from quire.cli.loading import open_model
from quire.config import EngineConfig
from quire.types import RequestError, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

_UTF8 = re.compile("utf-?8", re.IGNORECASE)  # an encoding that can write every character


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire generate`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="prompts to answer (default: one per line of standard input); the first word is the model if it is demo, "
        "demo-draft, a folder, a .gguf file or an id such as Qwen/Qwen3-0.6B, and --model is not given",
    )
    parser.add_argument("--file", type=Path, help="file with one prompt per line")
    parser.add_argument(
        "--chat", action="store_true", help="send each prompt as a user message through the chat template"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")
    parser.add_argument(
        "--summary", action="store_true", help="print token counts, speed and start-up time at the end"
    )
    add_flags(parser, "engine", EngineConfig)
    add_structured_flags(parser)
    defaults = {"max_tokens": DEFAULT_MAX_TOKENS}
    add_flags(parser, "sampling", SamplingParams, skip={"detokenize"}, defaults=defaults)


def run(args: argparse.Namespace) -> int:
    """Print the answers and return the exit code."""
    prompts = _prompts(args)
    started = time.perf_counter()
    with open_model(engine_settings(args)) as llm:
        ready_s = time.perf_counter() - started
        wanted = {**given(args, SamplingParams), **given_structured(args)}
        params = llm.default_params(wanted, DEFAULT_MAX_TOKENS)
        inputs = (
            [llm.chat_prompt([{"role": "user", "content": p}]) for p in prompts] if args.chat else prompts
        )
        started = time.perf_counter()
        if len(inputs) == 1 and params.n == 1 and not args.json:
            outputs = [_stream(llm, inputs[0], params, echo=None if args.chat else prompts[0])]
        else:
            outputs = llm.generate(inputs, params, use_tqdm=sys.stderr.isatty())
            _print(outputs, prompts, args.json)
        if args.summary:
            _summary(llm, outputs, ready_s, time.perf_counter() - started)
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = split_model(args.words, args, always=False)
    if args.file:
        try:
            prompts += args.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read {args.file}: {error}") from None
    if not prompts and not args.file:
        if sys.stdin.isatty():
            raise RequestError("no prompt: give one on the command line, with --file, or on standard input")
        try:
            prompts = sys.stdin.buffer.read().decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read standard input: {error}") from None
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise RequestError("no prompt: the input is empty")
    return prompts


def _stream(llm: LLM, prompt: Any, params: SamplingParams, echo: str | None) -> RequestOutput:
    """Print an answer while it is generated, after the prompt `echo` if there is one. Print nothing if it is refused."""
    shown, output = 0, None
    for output in llm.stream(prompt, params):
        text = (echo or "") + output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
    assert output is not None
    return output


def _print(outputs: list[RequestOutput], prompts: list[str], as_json: bool) -> None:
    for output, prompt in zip(outputs, prompts):
        for answer in output.outputs:
            if as_json:
                record = {
                    "prompt": prompt,
                    "index": answer.index,
                    "text": answer.text,
                    "token_ids": answer.token_ids,
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                    "num_prompt_tokens": len(output.prompt_token_ids),
                    "num_cached_tokens": output.num_cached_tokens,
                }
                print(json.dumps(record, ensure_ascii=not _UTF8.fullmatch(sys.stdout.encoding)), flush=True)
            else:
                print(f"> {prompt}\n{answer.text}\n")


def _summary(llm: LLM, outputs: list[RequestOutput], ready_s: float, elapsed_s: float) -> None:
    info = llm.info
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    metrics = outputs[0].metrics
    assert metrics is not None and metrics.first_token_s is not None
    first_s = metrics.first_token_s - metrics.arrival_s
    print()
    print(
        f"model       {info.model}: {info.num_parameters / 1e6:.1f} M parameters, {info.dtype} on {info.device}"
    )
    print(f"tokens      {prompt_tokens} in, {tokens} out")
    if len(outputs) == 1 and tokens > 1 and metrics.finished_s is not None:
        decode_s = metrics.finished_s - metrics.first_token_s
        print(f"speed       {(tokens - 1) / decode_s:.0f} tokens/s after the first")
    print(f"throughput  {tokens / elapsed_s:.0f} tokens/s over all")
    print(f"first token {first_s * 1000:.0f} ms after the request")
    print(f"start-up    {ready_s:.2f} s, of these the engine {info.start_up()}")
