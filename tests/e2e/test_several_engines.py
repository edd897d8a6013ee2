"""Several LLMs in one process: built, used and interleaved in threads, on one device and on two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

PROMPTS = [[300 + 7 * i + j for j in range(20 + i)] for i in range(4)]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def make(device: str, **settings: Any) -> LLM:
    memory = {"kv_cache_memory": 1 << 26, "max_model_len": 256}
    return LLM("demo", device=device, dtype="float32", max_num_seqs=8, **memory, **settings)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@contextmanager
def generating(llm: LLM) -> Iterator[list[list[list[int]]]]:
    """Have a thread generate all the time; yields its answers, of which there is at least one at the end."""
    found: list[list[list[int]]] = []
    enough = threading.Event()

    def work() -> None:
        while not (enough.is_set() and found):
            found.append(answers(llm))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        try:
            yield found
        finally:
            enough.set()
        running.result()


def build_while_generating(device: str) -> None:
    with closing(make(device)) as first:
        expected = answers(first)
        with generating(first) as found, closing(make(device)) as second:
            assert answers(second) == expected
        assert all(tokens == expected for tokens in found)


def test_an_engine_is_built_while_another_generates_on_a_cpu() -> None:
    build_while_generating("cpu")


@pytest.mark.gpu
def test_an_engine_is_built_while_another_generates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with closing(make("cuda")):
        pass
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that some of its kernels have to be compiled
    build_while_generating("cuda")


@pytest.mark.gpu
def test_two_engines_are_built_at_once_while_another_generates() -> None:
    with closing(make("cuda")) as first:
        expected = answers(first)
        with generating(first) as found, ThreadPoolExecutor(2) as pool:
            others = [pool.submit(make, "cuda") for _ in range(2)]
            for other in others:
                with closing(other.result()) as llm:
                    assert answers(llm) == expected
        assert all(tokens == expected for tokens in found)


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False, "attention": "reference"}])
def test_the_second_gpu_from_another_thread(settings: dict[str, Any]) -> None:
    before = torch.cuda.memory_allocated("cuda:0")
    with closing(make("cuda:1", **settings)) as llm:
        assert torch.cuda.current_device() == 0, "the caller's device was changed"
        expected = answers(llm)
        assert in_thread(lambda: answers(llm)) == expected
    with closing(in_thread(lambda: make("cuda:1", **settings))) as llm:
        assert answers(llm) == expected
    assert torch.cuda.memory_allocated("cuda:0") == before
    with closing(make("cuda:0", **settings)) as llm:
        assert answers(llm) == expected


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_two_gpus_interleaved_and_in_threads() -> None:
    with closing(make("cuda:0")) as first, closing(make("cuda:1")) as second:
        expected = answers(first)
        for llm in (second, first, second):
            assert answers(llm) == expected
        streams = [llm.stream({"prompt_token_ids": PROMPTS[0]}, PARAMS[0]) for llm in (first, second)]
        last = [None, None]
        for outputs in zip(*streams):
            last = [output.outputs[0].token_ids for output in outputs]
        assert last == [expected[0]] * 2
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(lambda llm: [answers(llm) for _ in range(4)], [first, second]):
                assert found == [expected] * 4
