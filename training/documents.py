"""Training documents and evaluation dialogues: each task of the demo model in one function.

A task returns a `Dialogue`. Training renders all of it. Evaluation cuts it before an assistant message and compares
the model's answer with that message. A dialogue depends only on its seed: training seeds are below `EVALUATION_SEED`,
evaluation seeds are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.chat import END_OF_TEXT, READ_WEIGHT, Message, Segment, dump, render
from training.lexicon import ANIMALS, JOBS, Pool
from training.tools import tool_dialogue
from training.world import ABOUT_PERSON, DOES_NOT_SAY, QUESTIONS, Question, Story, Wish, worked_sum

EVALUATION_SEED = 1 << 40
STORY_WEIGHT = 0.4  # stories the assistant writes: free choices, so little to learn per token
COPY_WEIGHT = 0.7

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about stories.",
    "You are Quire's demo model.",
    "Answer briefly and exactly.",
    "You are a careful reader.",
)
SMALL_TALK = (
    (
        ("Hello!", "Hi", "Hello", "Hi there!", "Good morning!", "Hey"),
        "Hello! I can tell stories, answer questions about them, and do small sums.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am Quire's demo model, a very small language model that knows a little world of stories.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help"),
        "I can tell a short story, answer questions about a story, extract facts as JSON, do small sums and call tools.",
    ),
    (("Thank you!", "Thanks", "Thanks a lot!"), "You are welcome!"),
    (("Goodbye!", "Bye", "See you later!"), "Goodbye!"),
    (
        ("How are you?", "How are you today?", "Are you well?"),
        "I am well, thank you. Which story shall we read?",
    ),
    (
        (
            "What is the capital of France?",
            "Who wrote Hamlet?",
            "What is the meaning of life?",
            "What is today's date?",
            "Write a Python program.",
            "Explain quantum physics.",
            "Who is the president?",
            "Translate this to German.",
            "What is the weather like today?",
            "How tall is the Eiffel Tower?",
            "Can you write a poem?",
        ),
        "I do not know that. I only know the stories that you show me, and small sums.",
    ),
)
# Ways for a prompt to join a story and a question about it.
JOINS = (
    "{s}\n\n{q}",
    "{s}\n\n{q}",
    "Story: {s}\n\nQuestion: {q}",
    "Read this story and answer the question.\n\n{s}\n\n{q}",
    "{q}\n\n{s}",
)


@dataclass(slots=True)
class Dialogue:
    task: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def segments(self) -> list[Segment]:
        return [*render(self.messages, self.tools), (END_OF_TEXT, READ_WEIGHT)]

    def cut(self, index: int) -> str:
        """Return the prompt whose correct continuation is assistant message `index`."""
        return "".join(text for text, _ in render(self.messages[:index], self.tools, prompt=True))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, kind: str = "", weight: float = 1.0) -> Message:
    return {"role": "assistant", "content": text, "kind": kind, "weight": weight}


def opening(rng: Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.3 else []


def ask_about(rng: Random, text: str, questions: list[Question]) -> list[Message]:
    """Return a dialogue with the story and the first question, then the other questions as later turns."""
    messages = opening(rng)
    for i, q in enumerate(questions):
        asked = q.text if i else rng.choice(JOINS).format(s=text, q=q.text)
        messages += [user(asked), assistant(q.answer, q.kind)]
    return messages


def story_questions(rng: Random, pool: Pool) -> Dialogue:
    story = Story(rng, pool)
    return Dialogue("story", ask_about(rng, story.text, story.questions(rng.randint(1, 14))))


def long_questions(rng: Random, pool: Pool) -> Dialogue:
    """Return a dialogue with several stories in one prompt, and questions about any of them."""
    stories = [Story(rng, pool, length=rng.randint(3, 6)) for _ in range(rng.randint(3, 11))]
    titled = rng.random() < 0.5
    parts = [f"Story {i}\n{s.text}" if titled else s.text for i, s in enumerate(stories, 1)]
    questions = [
        q
        for s in rng.sample(stories, min(len(stories), 6))
        for q in s.questions(3, nameless=False, unknown=0.06)
    ]
    rng.shuffle(questions)
    return Dialogue("long", ask_about(rng, "\n\n".join(parts), questions))


# -- extraction ------------------------------------------------------------------------------

FIELD_TYPES = {
    "name": "string",
    "age": "integer",
    "job": "string",
    "town": "string",
    "food": "string",
    "pet": "string",
    "animal": "string",
    "friend": "string",
    "feeling": "string",
}
LIST_FIELDS = {
    "finds": {"person": "string", "object": "string", "place": "string"},
    "gifts": {"from": "string", "object": "string", "to": "string"},
    "purchases": {"person": "string", "item": "string", "count": "integer", "price": "integer"},
}
LIST_ASKS = {
    "finds": ("Extract everything that was found as a JSON list", "List all finds as JSON"),
    "gifts": ("Extract every present that was given as a JSON list", "List all gifts as JSON"),
    "purchases": ("Extract every purchase as a JSON list", "List all purchases as JSON"),
}


def object_schema(fields: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {k: {"type": t} for k, t in fields.items()},
        "required": list(fields),
    }


def extraction(rng: Random, pool: Pool) -> Dialogue:
    story = Story(rng, pool)
    form = rng.random()
    filled = [kind for kind, rows in story.lists.items() if rows]
    if form < 0.25 and filled:
        kind = rng.choice(filled) if rng.random() < 0.9 else rng.choice(list(LIST_FIELDS))
        fields = LIST_FIELDS[kind]
        if kind == "gifts":
            keys = fields
        else:
            picked = rng.sample(list(fields), rng.randint(2, len(fields)))
            keys = {k: fields[k] for k in picked}
        rows = [{k: row[k] for k in keys} for row in story.lists[kind]]
        if rng.random() < 0.3:
            ask = f"{rng.choice(LIST_ASKS[kind])} that matches this schema: {dump({'type': 'array', 'items': object_schema(keys)})}"
        else:
            ask = f"{rng.choice(LIST_ASKS[kind])} with the keys {', '.join(keys)}."
        answer: Any = rows
    else:
        p = story.people[0] if rng.random() < 0.6 else rng.choice(story.people)
        record = story.records[p]
        known = [k for k in FIELD_TYPES if k in record and k != "name"]
        missing = [k for k in FIELD_TYPES if k not in record]
        picked = rng.sample(known, rng.randint(min(1, len(known)), len(known)))
        picked += rng.sample(missing, min(len(missing), rng.choice((0, 0, 1, 2))))
        rng.shuffle(picked)
        if rng.random() < 0.8 or not picked:
            picked.insert(0, "name")
        answer = {k: record.get(k) for k in picked}
        listed = ", ".join(picked)
        if form < 0.5:
            ask = rng.choice(
                (f"Extract these facts about {p} as JSON: {listed}.", f"Extract {listed} of {p} as JSON.")
            )
        elif form < 0.7:
            ask = (
                f"Answer with a JSON object about {p} that has the keys {', '.join(dump(k) for k in picked)}."
            )
        elif form < 0.9:
            schema = object_schema({k: FIELD_TYPES[k] for k in picked})
            ask = f"Extract the facts about {p} as JSON that matches this schema: {dump(schema)}"
        else:
            answer = [{"name": q, "age": story.records[q].get("age")} for q in story.people]
            ask = "Extract all people with the keys name, age as a JSON list."
    messages = opening(rng)
    if rng.random() < 0.25 and (questions := story.questions(1)):
        messages = ask_about(rng, story.text, questions)
        messages.append(user(ask))
    else:
        messages.append(user(rng.choice(JOINS[:2] + JOINS[-1:]).format(s=story.text, q=ask)))
    return Dialogue("json", [*messages, assistant(dump(answer), "json")])


# -- writing, copying, sums, talk -----------------------------------------------------------------


def bare_story(rng: Random, pool: Pool) -> list[Segment]:
    pool.common, pool.tidy = (
        1.0,
        True,
    )  # a made-up name after a made-up name comes out the same when decoded greedily
    text = "\n\n".join(Story(rng, pool).text for _ in range(rng.choice((1, 1, 1, 2))))
    return [(text + END_OF_TEXT, READ_WEIGHT * 2)]


def told_story(rng: Random, pool: Pool) -> Dialogue:
    """Return a dialogue with a story on request, and questions about it."""
    wish, parts = Wish(), []
    wish.name = pool.name() if rng.random() < 0.8 else None
    if not pool.new_names:
        pool.common, pool.tidy = 1.0, True  # as in `bare_story`
    if wish.name:
        if rng.random() < 0.3:
            wish.job = rng.choice(JOBS)
        parts.append(f"{_a(wish.job)} called {wish.name}" if wish.job else wish.name)
    wishes = rng.random() < 0.4, rng.random() < 0.3
    if any(wishes):
        wish.place = pool.place()
    if wishes[0]:
        wish.thing = pool.thing(wish.place or "")
        parts.append(_a(" ".join(wish.thing)))
    if wishes[1] and wish.place:
        parts.append(wish.place)
    if rng.random() < 0.15:
        wish.animal = rng.choice(ANIMALS)
        parts.append(_a(wish.animal))
    about = " and ".join(parts) if len(parts) < 3 else ", ".join(parts[:-1]) + " and " + parts[-1]
    story = Story(rng, pool, wish=wish)
    if parts:
        ask = rng.choice(
            (
                "Tell me a story about {x}.",
                "Write a short story about {x}.",
                "Can you tell me a story about {x}?",
                "Please write a story about {x}.",
                "tell me a story about {x}",
            )
        ).format(x=about)
    else:
        ask = rng.choice(
            ("Tell me a story.", "Write a short story.", "Can you tell me a story?", "Tell me a story")
        )
    messages = [*opening(rng), user(ask), assistant(story.text, "write", STORY_WEIGHT)]
    for q in story.questions(rng.choice((0, 1, 2, 3))):
        messages += [user(q.text), assistant(q.answer, q.kind)]
    return Dialogue("write", messages)


def _a(phrase: str | None) -> str:
    assert phrase
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def copy(rng: Random, pool: Pool) -> Dialogue:
    text = Story(rng, pool, length=rng.randint(1, 5)).text
    ask = rng.choice(
        (
            "Repeat this text exactly:\n\n{s}",
            "Copy this story word for word:\n\n{s}",
            "{s}\n\nRepeat the story exactly.",
        )
    )
    return Dialogue("copy", [*opening(rng), user(ask.format(s=text)), assistant(text, "copy", COPY_WEIGHT)])


def sums(rng: Random, pool: Pool) -> Dialogue:
    messages = opening(rng)
    for _ in range(rng.randint(1, 5)):
        count = rng.choice((2, 2, 2, 3))
        total = rng.randint(0, 99)
        terms, spoken = str(total), str(total)
        for _ in range(count - 1):
            plus = rng.random() < 0.5
            n = rng.randint(0, 99) if plus else rng.randint(0, total)
            total += n if plus else -n
            terms += f" {'+' if plus else '-'} {n}"
            spoken += f" {'plus' if plus else 'minus'} {n}"
        ask = rng.choice(
            (
                "What is {t}?",
                "How much is {t}?",
                "{t} =",
                "Calculate {t}.",
                "{t}",
                "What is {w}?",
                "How much is {w}?",
            )
        )
        messages += [user(ask.format(t=terms, w=spoken)), assistant(worked_sum(terms), "sum")]
    return Dialogue("sums", messages)


def small_talk(rng: Random, pool: Pool) -> Dialogue:
    messages = opening(rng)
    for asks, answer in rng.sample(SMALL_TALK, rng.randint(1, 3)):
        messages += [user(rng.choice(asks)), assistant(answer, "talk")]
    if rng.random() < 0.3:  # a question about a story that is not in the dialogue
        way = rng.choice(QUESTIONS[rng.choice(ABOUT_PERSON)][0])
        messages += [user(way.format(p=pool.name())), assistant(SMALL_TALK[-1][1], "talk")]
    return Dialogue("talk", messages)


def tools_task(rng: Random, pool: Pool) -> Dialogue:
    tools, turns = tool_dialogue(rng, pool)
    return Dialogue("tools", [*opening(rng), *turns], tools)


TASKS: dict[str, Callable[[Random, Pool], Dialogue]] = {
    "story": story_questions,
    "long": long_questions,
    "json": extraction,
    "write": told_story,
    "copy": copy,
    "sums": sums,
    "talk": small_talk,
    "tools": tools_task,
}
# Shares of documents, not of tokens: a long document has about eight times a short one's tokens.
MIXTURE = {
    "story": 0.34,
    "long": 0.08,
    "json": 0.19,
    "write": 0.09,
    "copy": 0.04,
    "sums": 0.05,
    "talk": 0.02,
    "tools": 0.12,
    "bare": 0.07,
}


def make_dialogue(task: str, seed: int, new_names: bool = False, new_pairs: bool = False) -> Dialogue:
    rng = Random(seed)
    return TASKS[task](rng, Pool(rng, new_names, new_pairs))


def training_document(seed: int) -> list[Segment]:
    assert seed < EVALUATION_SEED
    rng = Random(seed)
    task = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
    pool = Pool(rng)
    return bare_story(rng, pool) if task == "bare" else TASKS[task](rng, pool).segments()


def parse_json(text: str) -> Any:
    """Return the value of a JSON text, or None if it is invalid."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


__all__ = [
    "DOES_NOT_SAY",
    "EVALUATION_SEED",
    "TASKS",
    "Dialogue",
    "make_dialogue",
    "parse_json",
    "training_document",
]
