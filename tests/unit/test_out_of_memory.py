"""A step that runs out of memory fails its own requests; the engine continues with the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.types import EngineRequest, StepFailed
from quire.worker.memory.out_of_memory import is_out_of_memory
from quire.worker.runner import Runner
from tiny import write_tiny

PROMPT = list(range(5, 45))


def engine_of(llm: LLM) -> Any:
    return llm.client.engine  # type: ignore[attr-defined]


def greedy(name: str, prompt: list[int] = PROMPT, tokens: int = 8) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens=tokens, temperature=0))


def drain(engine: Any) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Run the engine until it is idle; return the tokens and the errors by request."""
    got: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.id, []).extend(output.token_ids)
            if output.error:
                errors[output.id] = output.error.message
    return got, errors


@pytest.fixture(params=["auto", "reference"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    path = str(write_tiny(tmp_path / "tiny"))
    settings = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "check_invariants": True}
    with LLM(path, **settings, attention=request.param) as made:
        yield made


def allocator_error() -> RuntimeError:
    """Return the error that torch raises when the system refuses memory."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize("where", ["forward", "sample", "advance"])
def test_requests_of_the_step_fail_and_others_go_on(
    llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, error = engine_of(llm), allocator_error()
    engine.add(greedy("before"))
    right = drain(engine)[0]["before"]
    runner: Runner = engine.executor.runner
    owner: Any = {"forward": runner.launcher, "sample": runner.sampler, "advance": runner.batcher}[where]
    method = "launch" if where == "forward" else where

    engine.add(greedy("first"))
    engine.step()

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        engine.add(greedy("second", PROMPT[::-1]))
        outputs = engine.step()
    assert {output.id for output in outputs if output.error} == {"first", "second"}
    engine.add(greedy("again"))
    engine.add(greedy("third", PROMPT[::-1]))
    got, errors = drain(engine)
    assert not errors and got["again"] == right
    alone = greedy("alone", PROMPT[::-1])
    alone.cache_salt = "nothing that the failed step may have left in the cache"
    engine.add(alone)
    assert drain(engine)[0]["alone"] == got["third"]


def test_a_program_gets_the_error_and_can_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Runner = engine_of(llm).executor.runner
    params = SamplingParams(max_tokens=4, temperature=0)
    right = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(runner.launcher, "launch", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
        with pytest.raises(StepFailed, match="ran out of memory in this request's step"):
            llm.generate([PROMPT], params, use_tqdm=False)
    assert llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids == right


def test_captured_steps_are_dropped_when_memory_stays_short(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, dropped = engine_of(llm), []
    launcher = engine.executor.runner.launcher
    monkeypatch.setattr(launcher, "drop_graphs", lambda: dropped.append(True))
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "launch", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
        for count in range(2):
            assert len(dropped) == count // 2
            engine.add(greedy(f"r{count}"))
            drain(engine)
    assert len(dropped) == 1


def test_other_errors_still_end_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llm)

    def launch(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner.launcher, "launch", launch)
        engine.add(greedy("r"))
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.step()


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(allocator_error())
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(None)
    second = RuntimeError("operation failed due to a previous error during capture")
    second.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(second)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_a_gpu_without_memory_left(graphs: bool) -> None:
    """The test takes the free memory of the device until a step no longer fits, and then releases it."""
    settings = {"device": "cuda", "kv_cache_memory": 1 << 28, "max_num_batched_tokens": 8192}
    with LLM("demo", cuda_graphs=graphs, **settings) as llm:
        engine = engine_of(llm)
        prompt = [5 + i % 500 for i in range(1500)]
        engine.add(greedy("before", prompt))
        right = drain(engine)[0]["before"]
        taken = []
        torch.cuda.empty_cache()
        for size in (1 << 30, 1 << 26, 1 << 21):
            while True:
                try:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        for index in range(5):
            odd = [7 + index, *prompt[: 1400 + index]]  # not cached
            scored = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=20)  # never in a graph
            engine.add(EngineRequest(f"r{index}", odd, scored))
        _, errors = drain(engine)
        assert errors and all("out of memory" in error for error in errors.values())
        taken.clear()
        torch.cuda.empty_cache()
        engine.add(greedy("after", prompt))
        engine.add(greedy("other", prompt[::-1]))
        got, errors = drain(engine)
        assert not errors and got["after"] == right
        engine.check()


@pytest.mark.gpu
def test_what_is_reserved_covers_what_a_step_takes() -> None:
    """All rows have penalties and log-probabilities, and their prompts are scored."""
    with LLM("demo", device="cuda", max_num_seqs=256, kv_cache_memory=1 << 28) as llm:
        engine = engine_of(llm)
        reserved = llm.client.info.reserved_bytes  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        hard = SamplingParams(
            max_tokens=4,
            logprobs=20,
            prompt_logprobs=20,
            presence_penalty=1.0,
            repetition_penalty=1.2,
            top_p=0.9,
        )
        for index in range(256):
            engine.add(
                EngineRequest(f"r{index}", [5 + (index + i) % 500 for i in range(30)], hard, seed=index)
            )
        assert not drain(engine)[1]
        assert torch.cuda.max_memory_allocated() - before <= reserved
