"""Tool-call dialogues: a request, the call in a `<tool_call>` tag, the response, the answer.

Known tools have natural requests. Random tools (a random verb and noun, random parameters) are requested by name, so
that the model learns to read the list of tools instead of memorizing it.
"""

# ruff: noqa: SIM905 - long word lists read better as text that is split

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.chat import Message, dump
from training.lexicon import GOODS, OBJECTS, WEATHER, Pool

NO_TOOL = "I have no tool for that."


@dataclass(frozen=True, slots=True)
class Use:
    """A request, the tool call for it, the tool's result, and the final answer."""

    ask: str
    arguments: dict[str, Any]
    response: dict[str, Any]
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, str]
    use: Callable[[Random, Pool], Use]

    def schema(self) -> dict[str, Any]:
        properties = {k: {"type": t} for k, t in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def _weather(rng: Random, pool: Pool) -> Use:
    city, sky, degrees = pool.town(), rng.choice(WEATHER), rng.randint(0, 35)
    ask = rng.choice(
        (
            "What is the weather in {c}?",
            "How is the weather in {c}?",
            "What's the weather like in {c} today?",
            "Is it raining in {c}?",
        )
    )
    return Use(
        ask.format(c=city),
        {"city": city},
        {"condition": sky, "temperature": degrees},
        f"The weather in {city} is {sky}, with {degrees} degrees.",
    )


def _time(rng: Random, pool: Pool) -> Use:
    city, clock = pool.town(), f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    ask = rng.choice(("What time is it in {c}?", "Tell me the time in {c}."))
    return Use(ask.format(c=city), {"city": city}, {"time": clock}, f"It is {clock} in {city}.")


def _add(rng: Random, pool: Pool) -> Use:
    a, b = rng.randint(0, 999), rng.randint(0, 999)
    ask = rng.choice(
        (
            "Add {a} and {b}.",
            "What is {a} plus {b}?",
            "What is {a} + {b}?",
            "Use the tool to add {a} and {b}.",
        )
    )
    return Use(ask.format(a=a, b=b), {"a": a, "b": b}, {"result": a + b}, f"{a} + {b} = {a + b}.")


def _multiply(rng: Random, pool: Pool) -> Use:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    ask = rng.choice(("Multiply {a} by {b}.", "What is {a} times {b}?"))
    return Use(ask.format(a=a, b=b), {"a": a, "b": b}, {"result": a * b}, f"{a} times {b} is {a * b}.")


def _find(rng: Random, pool: Pool) -> Use:
    thing, place = " ".join(pool.thing()), pool.place()
    ask = rng.choice(
        ("Where is the {t}?", "Find the {t}.", "I am looking for the {t}.", "Can you find the {t} for me?")
    )
    return Use(ask.format(t=thing), {"object": thing}, {"place": place}, f"The {thing} is at {place}.")


def _person(rng: Random, pool: Pool) -> Use:
    name, town = pool.name(), pool.town()
    ask = rng.choice(("Where does {p} live?", "In which town does {p} live?", "Look up {p}."))
    return Use(ask.format(p=name), {"name": name}, {"town": town}, f"{name} lives in {town}.")


def _price(rng: Random, pool: Pool) -> Use:
    goods, price = rng.choice(GOODS), rng.randint(1, 50)
    ask = rng.choice(("How much do {g} cost?", "What is the price of {g}?"))
    return Use(
        ask.format(g=goods), {"item": goods}, {"price": price}, f"The price of {goods} is {price} coins."
    )


def _message(rng: Random, pool: Pool) -> Use:
    name, text = (
        pool.name(),
        rng.choice(
            (
                "see you soon",
                "dinner is ready",
                "I am late",
                "happy birthday",
                "please call me",
                "meet me at " + pool.place(),
            )
        ),
    )
    ask = rng.choice(("Send a message to {p}: {t}", "Tell {p}: {t}", "Write to {p}: {t}"))
    return Use(
        ask.format(p=name, t=text),
        {"to": name, "text": text},
        {"status": "sent"},
        f"I sent your message to {name}.",
    )


def _alarm(rng: Random, pool: Pool) -> Use:
    clock = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    ask = rng.choice(("Wake me at {t}.", "Set an alarm for {t}.", "Please set the alarm to {t}."))
    return Use(ask.format(t=clock), {"time": clock}, {"status": "ok"}, f"The alarm is set for {clock}.")


def _timer(rng: Random, pool: Pool) -> Use:
    n = rng.randint(2, 90)
    ask = rng.choice(
        ("Set a timer for {n} minutes.", "Start a timer of {n} minutes.", "Remind me in {n} minutes.")
    )
    return Use(ask.format(n=n), {"minutes": n}, {"status": "ok"}, f"The timer is set for {n} minutes.")


def _table(rng: Random, pool: Pool) -> Use:
    place, n = pool.place(), rng.randint(2, 12)
    ask = rng.choice(("Book a table for {n} at {p}.", "I need a table for {n} people at {p}."))
    return Use(
        ask.format(n=n, p=place),
        {"place": place, "people": n},
        {"status": "booked"},
        f"I booked a table for {n} people at {place}.",
    )


def _stock(rng: Random, pool: Pool) -> Use:
    goods, place, n = rng.choice(GOODS), pool.place(), rng.randint(0, 99)
    ask = rng.choice(("How many {g} are there at {p}?", "Count the {g} at {p}."))
    return Use(
        ask.format(g=goods, p=place),
        {"item": goods, "place": place},
        {"count": n},
        f"There are {n} {goods} at {place}.",
    )


TOOLS = (
    Tool("get_weather", "Get the current weather in a city.", {"city": "string"}, _weather),
    Tool("get_time", "Get the current time in a city.", {"city": "string"}, _time),
    Tool("add", "Add two numbers.", {"a": "integer", "b": "integer"}, _add),
    Tool("multiply", "Multiply two numbers.", {"a": "integer", "b": "integer"}, _multiply),
    Tool("find_object", "Find out where an object is.", {"object": "string"}, _find),
    Tool("find_person", "Find out where a person lives.", {"name": "string"}, _person),
    Tool("get_price", "Get the price of an item.", {"item": "string"}, _price),
    Tool("send_message", "Send a message to a person.", {"to": "string", "text": "string"}, _message),
    Tool("set_alarm", "Set an alarm.", {"time": "string"}, _alarm),
    Tool("set_timer", "Start a timer.", {"minutes": "integer"}, _timer),
    Tool("book_table", "Book a table.", {"place": "string", "people": "integer"}, _table),
    Tool("count_items", "Count the items at a place.", {"item": "string", "place": "string"}, _stock),
)
VERBS = (
    "get set find open close check start stop make move load save read write count sort draw paint".split()
)
NOUNS = "door light room file list record song page track letter route score level team garden report photo ticket".split()
PARAMETERS = {
    "name": "string",
    "city": "string",
    "object": "string",
    "place": "string",
    "number": "integer",
    "count": "integer",
    "size": "integer",
    "title": "string",
    "level": "integer",
}


def made_up(rng: Random) -> Tool:
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    names = rng.sample(list(PARAMETERS), rng.randint(1, 3))

    def use(rng: Random, pool: Pool) -> Use:
        draw: dict[str, Callable[[], Any]] = {
            "name": pool.name,
            "city": pool.town,
            "object": lambda: " ".join(pool.thing()),
            "place": pool.place,
            "title": lambda: rng.choice(OBJECTS),
        }
        arguments = {k: draw[k]() if k in draw else rng.randint(0, 99) for k in names}
        told = " and ".join(f"{k} {v}" for k, v in arguments.items())
        ask = rng.choice(
            (
                f"Use {verb}_{noun} with {told}.",
                f"Call {verb}_{noun} with {told}.",
                f"{verb.capitalize()} the {noun} with {told}.",
            )
        )
        result: Any = rng.choice((rng.randint(0, 999), "done", pool.name()))
        return Use(ask, arguments, {"result": result}, f"The result is {result}.")

    return Tool(f"{verb}_{noun}", f"{verb.capitalize()} the {noun}.", {k: PARAMETERS[k] for k in names}, use)


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool_dialogue(rng: Random, pool: Pool) -> tuple[list[dict[str, Any]], list[Message]]:
    offered = rng.sample(TOOLS, rng.randint(1, 4))
    if rng.random() < 0.4:
        offered += [made_up(rng) for _ in range(rng.randint(1, 2))]
    offered = list({tool.name: tool for tool in offered}.values())
    rng.shuffle(offered)
    names = {tool.name for tool in offered}
    messages: list[Message] = []
    for _ in range(rng.choice((1, 1, 2))):
        form = rng.random()
        if form < 0.12:
            other = rng.choice(
                [tool for tool in TOOLS if tool.name not in names and tool.name not in ("add", "multiply")]
            )
            messages += [
                {"role": "user", "content": other.use(rng, pool).ask},
                {"role": "assistant", "content": NO_TOOL, "kind": "no_tool"},
            ]
            continue
        uses = [(tool, tool.use(rng, pool)) for tool in [rng.choice(offered)]]
        if form < 0.25:  # two calls in one turn
            tool = rng.choice(offered)
            uses.append((tool, tool.use(rng, pool)))
        messages.append({"role": "user", "content": " ".join(_sentence(use.ask) for _, use in uses)})
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "kind": "tool_call",
                "tool_calls": [call(tool.name, use.arguments) for tool, use in uses],
            }
        )
        messages += [{"role": "tool", "content": dump(use.response)} for _, use in uses]
        messages.append(
            {"role": "assistant", "content": " ".join(use.answer for _, use in uses), "kind": "tool_answer"}
        )
    return [tool.schema() for tool in offered], messages


def _sentence(text: str) -> str:
    return text if text[-1] in ".?!" else text + "."
