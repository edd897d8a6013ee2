"""Exact-answer accuracy on held-out worlds, and the agreement of the draft model with the base model.

Every case is a prompt with the correct earlier turns, which ends where the assistant's answer begins. `check` needs
only a function from prompts to texts, so any engine can be evaluated. There are two sets of worlds. "new worlds" never
occur in training: they have other seeds, held-out towns and held-out pairs of words. "new names" also has held-out
names of people and animals.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.chat import TURN_END, call_text
from training.documents import EVALUATION_SEED, make_dialogue, parse_json

Generate = Callable[[list[str]], list[str]]
MAX_TOKENS = 256
LONGEST_PROMPT = 6000  # characters, about 1,850 tokens; the answer must fit too
# task -> dialogues in each set of worlds
SIZES = {
    "story": 400,
    "long": 150,
    "json": 500,
    "sums": 200,
    "tools": 250,
    "write": 100,
    "copy": 100,
    "talk": 50,
}
WORLDS = {"new worlds": (False, True), "new names": (True, True)}
QUESTION_TASKS = ("story", "long", "write")


@dataclass(slots=True)
class Case:
    task: str
    kind: str
    prompt: str
    expected: str


def cases(worlds: str, share: float = 1.0) -> list[Case]:
    new_names, new_pairs = WORLDS[worlds]
    found = []
    for number, (task, size) in enumerate(SIZES.items()):
        for i in range(max(1, round(size * share))):
            seed = EVALUATION_SEED + number * 1_000_000 + i
            dialogue = make_dialogue(task, seed, new_names, new_pairs)
            for at, message in enumerate(dialogue.messages):
                if message["role"] != "assistant" or message["kind"] == "write":
                    continue  # a free story has no single correct text
                calls = [
                    call_text(c["function"]["name"], c["function"]["arguments"])
                    for c in message.get("tool_calls", [])
                ]
                prompt = dialogue.cut(at)
                if len(prompt) <= LONGEST_PROMPT:
                    found.append(Case(task, message["kind"], prompt, message["content"] or "\n".join(calls)))
    return found


def right(case: Case, text: str) -> bool:
    if case.kind == "json":
        return parse_json(text) == json.loads(case.expected)
    return text.strip() == case.expected


def group(case: Case) -> str:
    if case.task in QUESTION_TASKS and case.kind != "json":
        if case.kind == "unknown":
            return "questions without an answer"
        return {
            "story": "questions about a story",
            "long": "questions about one of several stories",
            "write": "questions about an earlier story of its own",
        }[case.task]
    return {
        "json": "JSON correct",
        "sum": "sums",
        "tool_call": "tool calls",
        "tool_answer": "answers from a tool",
        "no_tool": "no tool fits",
        "copy": "copying a story",
        "talk": "small talk",
    }.get(case.kind, "questions about a story")


def check(found: list[Case], texts: list[str]) -> dict[str, Any]:
    good, all_, kinds_good, kinds_all = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    wrong: list[dict[str, str]] = []
    shown = Counter[str]()
    for case, text in zip(found, texts, strict=True):
        names = [group(case)]
        ok = right(case, text)
        all_.update(names)
        good.update(names * ok)
        if case.kind == "json":
            all_["JSON valid"] += 1
            good["JSON valid"] += parse_json(text) is not None
        kinds_all[case.kind] += 1
        kinds_good[case.kind] += ok
        if not ok and shown[case.kind] < 6:
            shown[case.kind] += 1
            wrong.append(
                {
                    "kind": case.kind,
                    "task": case.task,
                    "expected": case.expected,
                    "text": text,
                    "prompt": case.prompt[-1500:],
                }
            )
    return {
        "groups": {
            g: {"right": good[g], "cases": n, "share": round(good[g] / n, 4)} for g, n in sorted(all_.items())
        },
        "kinds": {
            k: {"right": kinds_good[k], "cases": n, "share": round(kinds_good[k] / n, 4)}
            for k, n in sorted(kinds_all.items())
        },
        "wrong": wrong,
    }


def reference_engine(folder: Path, device: str) -> Generate:
    import torch
    from tokenizers import Tokenizer

    from training.export import load_model
    from training.model import greedy

    model = load_model(folder, device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop = set(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])

    def generate(prompts: list[str]) -> list[str]:
        encoded = [e.ids for e in tokenizer.encode_batch_fast(prompts, add_special_tokens=False)]
        tokens = greedy(model, encoded, MAX_TOKENS, stop, batch=512 if device == "cuda" else 16)
        return [tokenizer.decode(t, skip_special_tokens=False) for t in tokens]

    return generate


def quire_engine(folder: Path) -> Generate:
    from quire import LLM, SamplingParams

    llm = LLM(str(folder))

    def generate(prompts: list[str]) -> list[str]:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        return [output.outputs[0].text for output in outputs]

    return generate


def agreement(base: Path, draft: Path, found: list[Case], device: str) -> dict[str, float]:
    """Return the share of the correct answers' tokens at which both models have the same most likely token."""
    import torch
    from tokenizers import Tokenizer

    from training.export import load_model
    from training.model import causal

    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    models = [
        load_model(f, device, torch.bfloat16 if device == "cuda" else torch.float32) for f in (base, draft)
    ]
    same, total = Counter[str](), Counter[str]()
    with torch.no_grad():
        for case in found:
            prompt = tokenizer.encode(case.prompt, add_special_tokens=False).ids
            answer = tokenizer.encode(case.expected + TURN_END, add_special_tokens=False).ids
            if len(prompt) + len(answer) > models[0].shape.context:
                continue
            row = torch.tensor([prompt + answer], device=device)
            first, second = (m.logits(m(row, causal)[:, len(prompt) - 1 : -1]).argmax(-1) for m in models)
            same[case.kind] += int((first == second).sum())
            total[case.kind] += len(answer)
    shares = {kind: round(same[kind] / n, 4) for kind, n in sorted(total.items())}
    return {"all": round(sum(same.values()) / max(1, sum(total.values())), 4), **shares}


SAMPLES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time"},
    {"messages": [{"role": "user", "content": "Tell me a story about a baker called Mira and a red kite."}]},
    {
        "messages": [
            {
                "role": "user",
                "content": "Mira was a baker in the town of Oakford. Mira went to the old mill and found a red kite there. "
                "Mira gave the kite to Tom.\n\nWho had the red kite at the end?",
            }
        ]
    },
    {
        "messages": [
            {
                "role": "user",
                "content": "Mira was a baker in the town of Oakford. Mira was 31 years old. Mira had a black cat called Pico.\n\n"
                "Extract these facts about Mira as JSON: name, age, job, town, pet, animal, food.",
            }
        ]
    },
    {"messages": [{"role": "user", "content": "What is 27 + 45 - 8?"}]},
    {"messages": [{"role": "user", "content": "Who are you?"}]},
    {"messages": [{"role": "user", "content": "What is the capital of Italy?"}]},
    {
        "messages": [{"role": "user", "content": "What's the weather like in Oakford?"}],
        "tools": ["get_weather", "find_object"],
    },
    {
        "messages": [
            {
                "role": "user",
                "content": "Anna had five plums. Anna went to the market and bought 7 plums for 3 coins.\n\nHow many plums did Anna buy?",
            }
        ]
    },
]


def samples(generate: Generate) -> list[dict[str, str]]:
    from training.chat import render, text_of
    from training.tools import TOOLS

    prompts = []
    for s in SAMPLES:
        tools = [tool.schema() for tool in TOOLS if tool.name in s["tools"]] if "tools" in s else None
        prompts.append(s["prompt"] if "prompt" in s else text_of(render(s["messages"], tools, prompt=True)))
    return [{"prompt": p, "text": t} for p, t in zip(prompts, generate(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a demo model on held-out worlds.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="also measure agreement with this draft model")
    parser.add_argument("--engine", choices=("reference", "quire"), default="reference")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=1.0, help="share of the cases to run")
    parser.add_argument("--out", type=Path, help="write the full report here as JSON")
    args = parser.parse_args()
    generate = (
        quire_engine(args.model) if args.engine == "quire" else reference_engine(args.model, args.device)
    )
    report: dict[str, Any] = {"samples": samples(generate)}
    for worlds in WORLDS:
        found = cases(worlds, args.share)
        begun = time.monotonic()
        report[worlds] = check(found, generate([case.prompt for case in found]))
        print(f"{worlds}: {len(found)} cases in {time.monotonic() - begun:.0f} s")
        for name, row in report[worlds]["groups"].items():
            print(f"  {name:45s} {row['right']:5d} of {row['cases']:5d}  {100 * row['share']:6.2f} %")
        if args.draft:
            report[worlds]["agreement"] = agreement(
                args.model, args.draft, found[:: max(1, len(found) // 150)], args.device
            )
            print("  draft agreement", report[worlds]["agreement"]["all"])
        if args.out:
            args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
