"""The generator of the demo model's documents: reproducible by seed, with answers that the text supports."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random

import pytest
from training.chat import CHAT_TEMPLATE, render, text_of
from training.documents import EVALUATION_SEED, TASKS, make_dialogue, training_document
from training.lexicon import NUMBER_WORDS, Pool, held_out
from training.world import DOES_NOT_SAY, Story, worked_sum

SEEDS = range(150)


def story_of(seed: int, **options: bool) -> Story:
    rng = Random(seed)
    return Story(rng, Pool(rng, **options))


def with_digits(text: str) -> str:
    return re.sub(r"\b(" + "|".join(NUMBER_WORDS) + r")\b", lambda m: str(NUMBER_WORDS.index(m[1])), text)


def test_same_seed_same_document() -> None:
    for seed in SEEDS:
        assert training_document(seed) == training_document(seed)
    assert training_document(1) != training_document(2)


@pytest.mark.parametrize("task", list(TASKS))
def test_dialogues_follow_from_the_seed(task: str) -> None:
    for seed in range(20):
        first, second = (make_dialogue(task, EVALUATION_SEED + seed, True, True) for _ in range(2))
        assert first.messages == second.messages and first.tools == second.tools
        assert first.messages[-1]["role"] == "assistant"


def test_training_refuses_evaluation_seeds() -> None:
    with pytest.raises(AssertionError):
        training_document(EVALUATION_SEED)


def test_values_stand_in_the_story() -> None:
    checked = 0
    for seed in SEEDS:
        story = story_of(seed)
        text = with_digits(story.text)
        for q in story.questions(20):
            if q.kind == "unknown":
                assert q.answer == DOES_NOT_SAY
            elif q.kind not in ("people", "left"):  # a list, and a result
                assert q.value in text, (q, story.text)
                assert q.value in q.answer
                checked += 1
    assert checked > 1000


def test_last_holder_by_reading_the_gifts() -> None:
    """Follow 'A gave B the cup' sentences without the generator's records."""
    gift = re.compile(
        r"(\w+) (?:did not need the \w+ \w+, so \w+ )?gave (?:(?P<to>\w+) the (?P<a>\w+)\.|(?:the (?P<b>\w+)|it) to (?P<to2>\w+))"
    )
    checked = 0
    for seed in range(400):
        story = story_of(seed)
        for kind, slots in story.facts:
            if kind != "holder":
                continue
            holder = next(f["person"] for f in story.lists["finds"] if f["object"] == slots["thing"])
            for sentence in re.split(r"(?<=\.)\s+", story.text):
                if slots["noun"] in sentence and (m := gift.search(sentence)):
                    holder = m["to"] or m["to2"]
                    checked += 1
            assert holder == slots["q"], story.text
    assert checked > 100


def test_counts_by_reading_the_numbers() -> None:
    checked = 0
    for seed in range(400):
        story = story_of(seed)
        text = with_digits(story.text)
        for kind, slots in story.facts:
            if kind == "left":
                goods = slots["goods"]
                total = int(slots["count"])
                total -= sum(
                    int(n) for n in re.findall(rf"(?:gave|lost|sold|ate) (\d+) of the {goods}", text)
                )
                total += sum(int(n) for n in re.findall(rf"(\d+) more {goods}", text))
                assert str(total) == slots["left"], text
                checked += 1
    assert checked > 50


def test_extraction_answers_are_json_from_the_story() -> None:
    for seed in SEEDS:
        dialogue = make_dialogue("json", seed)
        value = json.loads(dialogue.messages[-1]["content"])
        story = with_digits(next(m["content"] for m in dialogue.messages if m["role"] == "user"))
        for row in value if isinstance(value, list) else [value]:
            for item in row.values():
                # An object that was found is called by its noun only where it is given on.
                assert item is None or str(item) in story, (item, story)


def test_tool_calls_match_the_listed_tools() -> None:
    for seed in SEEDS:
        dialogue = make_dialogue("tools", seed)
        assert dialogue.tools
        listed = {t["function"]["name"]: set(t["function"]["parameters"]["required"]) for t in dialogue.tools}
        for message in dialogue.messages:
            for call in message.get("tool_calls", []):
                assert set(call["function"]["arguments"]) == listed[call["function"]["name"]]


def test_held_out_names_never_mix() -> None:
    for seed in SEEDS:
        assert not any(held_out(p) for p in story_of(seed).people)
        assert all(held_out(p) for p in story_of(seed, new_names=True, new_pairs=True).people)


def test_told_stories_are_easy_to_tell_apart() -> None:
    gifts = 0
    for seed in SEEDS:
        rng = Random(seed)
        pool = Pool(rng)
        pool.tidy, pool.common = True, 1.0
        story = Story(rng, pool)
        assert len({p[0] for p in story.people}) == len(story.people)
        had: dict[object, set[object]] = {}
        for gift in story.lists["gifts"]:
            before = had.setdefault(gift["object"], {gift["from"]})
            assert gift["to"] not in before, story.text
            before.add(gift["to"])
            gifts += 1
    assert gifts > 50


def test_wishes_come_true() -> None:
    """A requested story has the requested person and object."""
    for seed in SEEDS:
        messages = make_dialogue("write", seed).messages
        asked, told = next((a["content"], b["content"]) for a, b in pairwise(messages) if a["role"] == "user")
        if " about " in asked:
            for name in re.findall(r"\b[A-Z]\w+", asked.split(" about ")[1]):
                assert name in told
            for thing in re.findall(r"\ban? (\w+ \w+)\b(?! called| and)", asked.split(" about ")[1]):
                assert thing in told or "called" in thing


def test_sums_are_right() -> None:
    for terms in ("5 + 3 - 2", "20 - 7", "99 + 99"):
        assert all(eval(side) == eval(terms) for side in worked_sum(terms).split(" = "))


def test_chat_template_writes_what_training_saw() -> None:
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(CHAT_TEMPLATE)
    for task in TASKS:
        for seed in range(10):
            d = make_dialogue(task, seed)
            assert template.render(messages=d.messages, tools=d.tools) == text_of(render(d.messages, d.tools))
            at = len(d.messages) - 1
            assert template.render(
                messages=d.messages[:at], tools=d.tools, add_generation_prompt=True
            ) == d.cut(at)
