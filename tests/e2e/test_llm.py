"""`LLM` as a user calls it: batches, streams, chat, both clients, refusals, interruption."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire.assembly.model
from quire import LLM, EngineConfig, SamplingParams
from quire.host import build_engine
from quire.layers.env import Env
from quire.models.spec import ModelSpec
from quire.types import ConfigError, EngineDead, RequestError, StepPlan
from tiny import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), check_invariants=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def remote(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), engine_process=True) as llm:
        yield llm


def test_result_objects(llm: LLM) -> None:
    (out,) = llm.generate(["Hello there"], GREEDY, use_tqdm=False)
    answer = out.outputs[0]
    assert out.finished and out.prompt == "Hello there" and len(out.prompt_token_ids) == 11
    assert len(answer.token_ids) == 12 and answer.finish_reason == "length" and answer.index == 0
    assert answer.text == llm.get_tokenizer().decode(answer.token_ids)
    assert out.metrics and out.metrics.first_token_s and out.metrics.first_token_s >= out.metrics.arrival_s


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    forms = ["abc", {"prompt": "abc"}, {"prompt_token_ids": ids}, ids]
    texts = {out.outputs[0].text for out in llm.generate(forms, GREEDY, use_tqdm=False)}
    assert len(texts) == 1
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].text in texts
    assert len(llm.generate(ids, GREEDY, use_tqdm=False)) == 1


def test_one_set_of_parameters_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(out.outputs[0].token_ids) for out in outs] == [1, 5]
    with pytest.raises(RequestError, match="sampling_params has 2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params, use_tqdm=False)


def test_both_clients_agree(llm: LLM, remote: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(9)]
    params = SamplingParams(temperature=0.9, max_tokens=20, n=2, seed=5, logprobs=2, stop=["q"])
    here = llm.generate(prompts, params, use_tqdm=False)
    there = remote.generate(prompts, params, use_tqdm=False)
    for a, b in zip(here, there):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        assert [c.text for c in a.outputs] == [c.text for c in b.outputs]
        for x, y in zip(a.outputs, b.outputs):  # batches differ by arrival, and with them the last bits
            assert x.cumulative_logprob == pytest.approx(y.cumulative_logprob, abs=1e-3)


def test_same_seed_same_answer_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=3, ignore_eos=True)
    alone = llm.generate("who", params, use_tqdm=False)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=1.3, max_tokens=9, top_p=0.8) for _ in range(6)]
    crowd = llm.generate(
        ["x", "yy", "who", "z", "w", "v", "u"], [*others[:2], params, *others[2:]], use_tqdm=False
    )
    assert crowd[2].outputs[0].token_ids == alone


def test_prefix_cache_is_seen(llm: LLM) -> None:
    prompt = "a prompt that is long enough for some blocks of sixteen tokens each"
    llm.generate(prompt, GREEDY, use_tqdm=False)
    again = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens == len(prompt) // 16 * 16


def test_stop_strings_do_not_leak(llm: LLM) -> None:
    whole = llm.generate("tell", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = whole.text[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    cut = llm.generate("tell", params, use_tqdm=False)[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert not llm.client.engine.scheduler.requests, "it goes on in the engine"


def test_stream_adds_up(llm: LLM) -> None:
    whole = llm.generate("stream", GREEDY, use_tqdm=False)[0].outputs[0]
    last, texts = None, []
    for last in llm.stream("stream", GREEDY):
        texts.append(last.outputs[0].text)
    assert last is not None and last.finished and last.outputs[0].text == whole.text
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


def test_streams_can_be_read_in_turns(llm: LLM) -> None:
    """Each call gets its complete answer, whichever call runs the engine."""
    prompts = ["first", "second", "third"]
    texts = [out.outputs[0].text for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    first, second = (llm.stream(prompt, GREEDY) for prompt in prompts[:2])
    next(first), next(second)
    between = llm.generate("third", GREEDY, use_tqdm=False)[0]  # meanwhile the other two end
    *_, one = first
    *_, two = second
    assert [out.outputs[0].text for out in (one, two, between)] == texts
    assert one.finished and two.finished and not llm._changed


def test_ctrl_c_in_a_step_leaves_an_engine_that_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals go to the main thread")
    wanted = llm.generate("again", GREEDY, use_tqdm=False)[0].outputs[0].text
    executor = llm.client.engine.executor
    forward, before = executor.forward, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(plan: StepPlan) -> None:
        forward(plan)
        signal.raise_signal(signal.SIGINT)

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(executor, "forward", interrupted)
            llm.generate("interrupted", GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.generate("again", GREEDY, use_tqdm=False)[0].outputs[0].text == wanted


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    stream = llm.stream("stream", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("next", GREEDY, use_tqdm=False)
    scheduler = llm.client.engine.scheduler
    assert not scheduler.requests and scheduler.pool.num_free == scheduler.pool.num_blocks


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    out = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert out.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert out.prompt_token_ids.count(256) == 2  # one token each: the template's markers are special
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_logprobs_are_aligned(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    out = llm.generate("abcdef", params, use_tqdm=False)[0]
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == 6
    for token, entry in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:]):
        assert token in entry
    answer = out.outputs[0]
    for token, entry in zip(answer.token_ids, answer.logprobs):
        assert entry[token].rank == 1 and max(e.logprob for e in entry.values()) == entry[token].logprob
    assert answer.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs))
    )


def test_ids_alone_without_a_tokenizer(folder: Path, llm: LLM) -> None:
    with LLM(str(folder), skip_tokenizer_init=True) as bare:
        out = bare.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)[0].outputs[0]
        assert (
            out.text == ""
            and out.token_ids == llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        )
        with pytest.raises(RequestError, match="without a tokenizer"):
            bare.generate("text", GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "prompt is empty"),
        ([5, 260], "below the vocabulary size 260, got 260"),
        ([5, -1], "must be at least 0"),
        ("x" * 256, "prompt has 256 tokens, but max_model_len is 256"),
        (3.5, "prompt must be a string or a list of token ids"),
        ({"text": "a"}, "must hold"),
    ],
)
@pytest.mark.parametrize("where", ["llm", "remote"])
def test_a_bad_prompt_is_refused_and_others_are_served(request, where: str, prompt, text: str) -> None:
    engine: LLM = request.getfixturevalue(where)
    with pytest.raises(RequestError, match=text):
        engine.generate(["fine", prompt], GREEDY, use_tqdm=False)
    assert len(engine.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize("process", [False, True])
def test_what_never_fits_is_refused_with_the_numbers(folder: Path, process: bool) -> None:
    with LLM(
        str(folder), engine_process=process, max_model_len=200, kv_cache_memory=13 * 16 * 512, max_num_seqs=2
    ) as small:
        assert small.info.num_blocks * small.info.block_size < 220
        small.generate("x" * 100, SamplingParams(max_tokens=50), use_tqdm=False)
        with pytest.raises(RequestError, match="prompt has 230 tokens, but max_model_len is 200"):
            small.generate("x" * 230, GREEDY, use_tqdm=False)


def test_unknown_settings_name_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no field 'max_num_seq'; did you mean max_num_seqs"):
        LLM(str(folder), max_num_seq=3)


def test_the_death_of_the_engine_process_is_told(folder: Path) -> None:
    with LLM(str(folder), engine_process=True) as llm:
        llm.client.process.kill()
        llm.client.process.wait()
        with pytest.raises(EngineDead, match="exit code -9"):
            llm.generate("x", GREEDY, use_tqdm=False)


def test_a_failing_step_ends_the_engine_with_its_cause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder) as llm:

        def fail(plan):
            raise RuntimeError("out of luck")

        monkeypatch.setattr(llm.client.engine.executor, "forward", fail)
        for _ in range(2):
            with pytest.raises(EngineDead, match="out of luck"):
                llm.generate("x", GREEDY, use_tqdm=False)


def test_the_engine_process_does_not_outlive_its_client(folder: Path) -> None:
    code = (
        "import os, signal, threading\n"
        "from quire import LLM, SamplingParams\n"
        f"llm = LLM({str(folder)!r}, engine_process=True)\n"
        "print(llm.client.process.pid, flush=True)\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "while True:\n"
        "    llm.generate(['a'] * 8, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    engine, deadline = int(done.stdout), time.monotonic() + 20
    while Path(f"/proc/{engine}/stat").exists() and time.monotonic() < deadline:
        if " Z " in Path(f"/proc/{engine}/stat").read_text():
            break
        time.sleep(0.2)
    else:
        assert not Path(f"/proc/{engine}").exists(), "the engine process is still there"


def test_prompt_logprobs_do_not_depend_on_chunks_or_preemption(folder: Path) -> None:
    prompts = [f"a prompt of its own, number {i}, that is a little longer than a chunk" for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=50, prompt_logprobs=2, logprobs=1, ignore_eos=True)

    def scores(**settings) -> tuple[list[list[float]], int]:
        with LLM(str(folder), max_model_len=160, **settings) as llm:
            outs = llm.generate(prompts, params, use_tqdm=False)
            found = []
            for out in outs:
                assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == len(
                    out.prompt_token_ids
                )
                pairs = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:])
                found.append([entry[token].logprob for token, entry in pairs])
                assert len(out.outputs[0].logprobs) == 50
            return found, llm.client.engine.log.totals.preemptions

    whole, _ = scores(chunked_prefill=False, max_num_seqs=1)
    for settings in (
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 33, "kv_cache_memory": 11 * 16 * 512},
        {"kv_layout": "none"},
        {"kv_layout": "contiguous", "overlap": False},
    ):
        found, preemptions = scores(**settings)
        for a, b in zip(whole, found):
            assert a == pytest.approx(b, abs=1e-4)
        assert bool(preemptions) == ("kv_cache_memory" in settings)


def test_a_closed_engine_frees_its_model_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects of an engine are frozen, so the collector never frees a cycle of them."""
    build, models = quire.assembly.model.build_model, list[weakref.ref[Any]]()

    def noted(spec: ModelSpec, env: Env) -> Any:
        model = build(spec, env)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(quire.assembly.model, "build_model", noted)
    engine = build_engine(EngineConfig(model="demo-draft", kv_cache_memory=1 << 22, device="cpu"))[0]
    assert models[0]() is not None
    engine.close()
    del engine
    assert models[0]() is None
