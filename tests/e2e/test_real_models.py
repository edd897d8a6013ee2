"""Real checkpoints through the whole engine, in every KV layout."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire import LLM, SamplingParams


@pytest.mark.parametrize("file", ["", "stories260K-F32.gguf"])
@pytest.mark.parametrize("layout", ["paged", "contiguous", "none"])
def test_stories260k_writes_the_reference_text(data: Path, file: str, layout: str) -> None:
    folder = data / "models" / "stories260K"
    with LLM(str(folder / file), dtype="float32", kv_layout=layout) as llm:
        bos = llm.get_tokenizer().bos_id
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        out = llm.generate([{"prompt_token_ids": [bos]}], params, use_tqdm=False)[0]
    text = llm.get_tokenizer().decode([bos, *out.outputs[0].token_ids])
    assert text == (folder / "greedy_200.txt").read_text(encoding="utf-8").rstrip("\n")


def test_stories260k_in_a_crowd(data: Path) -> None:
    """The same text for a request that shares the batch with others and is decoded in chunks."""
    folder = data / "models" / "stories260K"
    whole = (folder / "greedy_200.txt").read_text(encoding="utf-8").rstrip("\n")
    with LLM(str(folder), dtype="float32", max_num_batched_tokens=7, max_num_seqs=5) as llm:
        begin = llm.get_tokenizer().encode(whole[:120])
        prompts = [{"prompt_token_ids": begin[:n]} for n in (2, 9, 17, 30, 33, 34)]
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
            text = llm.get_tokenizer().decode([*prompt["prompt_token_ids"], *out.outputs[0].token_ids])
            assert whole.startswith(text)


def test_gpt_nano_sorts(data: Path) -> None:
    folder = data / "models" / "gpt-nano-sort-85K"
    rng = random.Random(0)
    prompts = [[rng.randrange(3) for _ in range(6)] for _ in range(40)]
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, out in zip(prompts, outs):
        assert out.outputs[0].token_ids[:5] == sorted(prompt)[:5], "six letters in, sorted letters out"
