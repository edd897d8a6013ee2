"""Every family in the whole engine: chunks, preemption and prefix hits give the tokens of transformers."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

transformers = pytest.importorskip("transformers", reason="transformers makes the reference models")
from recent_cases import RECENT_SPECIAL  # noqa: E402
from test_families import CASES, make_reference, reference_logits  # noqa: E402

from quire.models.config.load import load_spec  # noqa: E402

torch.set_num_threads(1)
COUNT = 9
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
SHARED = [(7 * i + 3) % 97 for i in range(10)]
PROMPTS = [SHARED + [5 + i] * (3 * i + 1) for i in range(5)]
# The first case of every class of transformers, and the special paths of others.
FIRST = list({name: case for case, (name, _) in reversed(CASES.items())}.values())
SPECIAL = ["phi3-partial", "phi3-longrope", "smollm3-window", "gpt-oss-full", *RECENT_SPECIAL]


def reference(model: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Return the greedy tokens and their log-probabilities, by prompt."""
    found = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(COUNT):
            row.append(int(reference_logits(model, row)[-1].argmax()))
        logprobs = reference_logits(model, row).log_softmax(-1)
        new = row[len(prompt) :]
        found.append((new, logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(new)[:, None])[:, 0]))
    return found


@pytest.mark.parametrize("case", [*FIRST, *SPECIAL])
def test_tokens_do_not_depend_on_the_schedule(case: str, tmp_path: Path) -> None:
    expected = reference(make_reference(case, tmp_path))
    spec = load_spec(tmp_path)
    token_bytes = sum(layout.token_bytes for layout in spec.kv_layouts("float32"))
    settings: dict[str, Any] = {
        "kv_cache_memory": (16 if spec.kv_sources else 15) * 4 * token_bytes,
        "block_size": 4,
        "max_num_batched_tokens": 7,
    }
    with LLM(
        str(tmp_path),
        device="cpu",
        max_model_len=48,
        skip_tokenizer_init=True,
        check_invariants=True,
        **settings,
    ) as llm:
        for _ in range(2):
            outs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
            for out, (tokens, logprobs) in zip(outs, expected, strict=True):
                answer = out.outputs[0]
                assert answer.token_ids == tokens
                assert answer.logprobs is not None
                got = torch.tensor([step[token].logprob for step, token in zip(answer.logprobs, tokens)])
                torch.testing.assert_close(got, logprobs, rtol=1e-3, atol=1e-3)
        totals = llm.client.engine.log.totals
        assert totals.cached_tokens
        assert totals.preemptions or any(spec.windows)


def steps(folder: Path, **settings: Any) -> list[list[tuple[int, float]]]:
    """Return the tokens of each prompt's answer with their log-probabilities."""
    with LLM(
        str(folder),
        max_model_len=48,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        kv_cache_memory=64 << 20,
        skip_tokenizer_init=True,
        compile_processes=0,  # tests run side by side already
        **settings,
    ) as llm:
        outs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    answers = [out.outputs[0] for out in outs]
    return [[(t, step[t].logprob) for t, step in zip(a.token_ids, a.logprobs or [])] for a in answers]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "case, dtype, limit",
    [
        *((case, "bfloat16", 0.1) for case in [*FIRST, *SPECIAL]),
        *((case, "float32", 1e-4) for case in FIRST[::8]),
    ],
)
def test_a_gpu_computes_what_a_cpu_does(case: str, dtype: str, limit: float, tmp_path: Path) -> None:
    """Steps are captured while threads read the files, and kernels have other orders of the weights."""
    make_reference(case, tmp_path)
    differences = []
    answers = steps(tmp_path, device="cuda", dtype=dtype), steps(tmp_path, device="cpu", dtype="float32")
    for found, expected in zip(*answers, strict=True):
        same = takewhile(lambda pair: pair[0][0] == pair[1][0], zip(found, expected, strict=True))
        differences += [abs(one[1] - other[1]) for one, other in same]
    # A near tie of experts or of blocks that attention reads changes a few steps much.
    assert len(differences) >= len(PROMPTS) and median(differences) < limit
