"""Short stories about a small world, with every question that the story answers.

A `Story` writes sentences and stores the facts that they state, so the answer to each question is known without reading
the text. Within a document no name, place or object occurs in two roles (see `Pool`), which keeps every question
unambiguous. All randomness comes from `rng`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from training.lexicon import (
    ANIMAL_COLOURS,
    ANIMALS,
    DAYS,
    FEELINGS,
    FOODS,
    HIDING,
    JOBS,
    NOT_EATEN,
    WEATHER,
    Pool,
    join_names,
    number_text,
    with_article,
)

DOES_NOT_SAY = "The story does not say."

# kind -> (ways to ask, the answer, the slot that holds the shortest answer)
QUESTIONS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "job": (
        ("What was {p}'s job?", "What did {p} do for a living?", "What work did {p} do?"),
        "{p} was {a_job}.",
        "job",
    ),
    "town": (("Where did {p} live?", "In which town did {p} live?"), "{p} lived in {town}.", "town"),
    "age": (("How old was {p}?", "What was {p}'s age?"), "{p} was {age} years old.", "age"),
    "food": (
        ("What did {p} like to eat?", "What was {p}'s favourite food?", "What food did {p} love?"),
        "{p} loved {food}.",
        "food",
    ),
    "friend": (
        ("Who was {p}'s best friend?", "What was the name of {p}'s best friend?"),
        "{p}'s best friend was {q}.",
        "q",
    ),
    "relation": (
        ("Who was {p}'s {relation}?", "What was the name of {p}'s {relation}?"),
        "{p}'s {relation} was {q}.",
        "q",
    ),
    "pet_name": (
        ("What was {p}'s {animal} called?", "What was the name of {p}'s {animal}?"),
        "{p}'s {animal} was called {pet}.",
        "pet",
    ),
    "pet_kind": (
        ("What kind of animal was {pet}?", "What animal was {pet}?"),
        "{pet} was {a_animal}.",
        "animal",
    ),
    "pet_colour": (
        ("What colour was {pet}?", "What colour was {p}'s {animal}?"),
        "{pet} was {pet_colour}.",
        "pet_colour",
    ),
    "pet_owner": (
        ("Who had {a_animal} called {pet}?", "Whose {animal} was {pet}?"),
        "{p} had {a_animal} called {pet}.",
        "p",
    ),
    "go_where": (
        ("Where did {p} go on {day}?", "On {day}, where did {p} go?"),
        "On {day} {p} went to {place}.",
        "place",
    ),
    "go_day": (
        ("On which day did {p} go to {place}?", "When did {p} go to {place}?"),
        "{p} went to {place} on {day}.",
        "day",
    ),
    "find_what": (
        ("What did {p} find at {place}?", "What did {p} find?"),
        "{p} found {a_thing} at {place}.",
        "thing",
    ),
    "find_where": (
        ("Where did {p} find the {thing}?", "Where did {p} find the {noun}?"),
        "{p} found the {thing} at {place}.",
        "place",
    ),
    "find_who": (("Who found the {thing}?", "Who found {a_thing}?"), "{p} found the {thing}.", "p"),
    "colour": (
        ("What colour was the {noun}?", "What colour was the {noun} that {p} found?"),
        "The {noun} was {colour}.",
        "colour",
    ),
    "give_to": (
        ("Who did {p} give the {thing} to?", "To whom did {p} give the {noun}?"),
        "{p} gave the {thing} to {q}.",
        "q",
    ),
    "give_from": (
        ("Who gave {q} the {thing}?", "Who gave the {noun} to {q}?"),
        "{p} gave the {thing} to {q}.",
        "p",
    ),
    "holder": (
        ("Who had the {thing} at the end?", "At the end, who had the {noun}?"),
        "{q} had the {thing} at the end.",
        "q",
    ),
    "put_where": (
        (
            "Where did {p} put the {thing}?",
            "Where did {p} hide the {noun}?",
            "Where was the {thing} at the end?",
        ),
        "{p} put the {thing} {spot}.",
        "spot",
    ),
    "meet_who": (("Who did {p} meet at {place}?", "Who did {p} meet?"), "{p} met {q} at {place}.", "q"),
    "meet_where": (
        ("Where did {p} meet {q}?", "Where did {p} and {q} meet?"),
        "{p} met {q} at {place}.",
        "place",
    ),
    "buy_count": (("How many {goods} did {p} buy?",), "{p} bought {count} {goods}.", "count"),
    "buy_price": (
        ("How much did {p} pay for the {goods}?", "How many coins did the {goods} cost?"),
        "{p} paid {price} coins for the {goods}.",
        "price",
    ),
    "buy_what": (
        ("What did {p} buy at {place}?", "What did {p} buy?"),
        "{p} bought {count} {goods}.",
        "goods",
    ),
    "left": (
        ("How many {goods} did {p} have at the end?", "At the end, how many {goods} did {p} have?"),
        "{sum}, so {p} had {left} {goods} at the end.",
        "left",
    ),
    "end_place": (
        ("Where was {p} at the end?", "At the end, where was {p}?"),
        "At the end {p} was at {place}.",
        "place",
    ),
    "feel": (
        ("How did {p} feel at the end?", "How did {p} feel?"),
        "{p} felt {feeling} at the end.",
        "feeling",
    ),
    "weather": (
        ("What was the weather like?", "What kind of day was it?"),
        "It was a {weather} day.",
        "weather",
    ),
    "people": (
        ("Who are the people in the story?", "Which people does the story name?"),
        "The people in the story are {people}.",
        "people",
    ),
}
# Questions about a person that need only the name, so they can be asked even if the story says nothing.
ABOUT_PERSON = ("job", "town", "age", "food", "friend", "feel")
# Kinds whose second way to ask names the person alone.
UNPLACED = ("find_what", "buy_what", "meet_who")
# Questions that name nobody make sense only when the document has a single story.
NAMELESS = ("weather", "people")

RELATIONS = ("neighbour", "cousin", "colleague", "flatmate", "classmate", "rival")
OPENINGS = (
    "Once upon a time",
    "One day",
    "Long ago",
    "Many years ago",
    "In a faraway land",
    "Not long ago",
    "Last summer",
    "Last winter",
    "Last spring",
    "Last autumn",
)


@dataclass(slots=True)
class Question:
    kind: str
    text: str
    answer: str
    value: str  # the shortest correct answer


@dataclass(slots=True)
class Wish:
    """The required contents of a requested story; None leaves the choice to the story."""

    name: str | None = None
    place: str | None = None
    thing: tuple[str, str] | None = None
    job: str | None = None
    animal: str | None = None


class Story:
    """A story: its sentences, and the facts that they state."""

    def __init__(self, rng: Random, pool: Pool, length: int | None = None, wish: Wish | None = None) -> None:
        self.rng = rng
        self.pool = pool
        self.wish = wish or Wish()
        self.sentences: list[str] = []
        self.facts: list[tuple[str, dict[str, str]]] = []  # what can be asked, with its slots
        self.records: dict[str, dict[str, object]] = {}  # person -> fields
        self.lists: dict[str, list[dict[str, object]]] = {"finds": [], "gifts": [], "purchases": []}
        self.at: dict[str, str] = {}  # where each person is
        self.open_finds: list[dict[str, str]] = []  # things found that may still change hands
        self.days = rng.sample(DAYS, len(DAYS))
        self.weather: str | None = None
        people = rng.choice((1, 2, 2, 2, 3, 3))
        self.people: list[str] = []
        for i in range(people):
            self.people.append(self.wish.name if i == 0 and self.wish.name else pool.name())
        self.open()
        events = [self.go, self.go, self.find, self.find, self.meet, self.buy, self.pet, self.trait]
        rng.shuffle(events)
        if self.wish.thing or self.wish.place:
            events.insert(0, self.find)
        if self.wish.animal:
            events.remove(self.pet)
            events.insert(0, self.pet)
        events = events[: length or rng.randint(3, 7)]
        if pool.tidy:  # who they are, then what they do
            self.days.sort(key=DAYS.index, reverse=True)
            del self.days[3:]
            events = sorted(events[:6], key=lambda e: e not in (self.trait, self.pet))
        for event in events:
            event()
            if rng.random() < (0.5 if not pool.tidy else 0.8 if event == self.find else 0.2):
                self.hand_over()
        self.close()
        self.text = self.layout()

    # -- helpers ---------------------------------------------------------------------------

    def say(self, *ways: str, **slots: str) -> None:
        text = self.rng.choice(ways).format_map(slots)
        self.sentences.append(text[0].upper() + text[1:])

    def fact(self, kind: str, **slots: str) -> None:
        self.facts.append((kind, slots))

    def person(self) -> str:
        # The first person is the hero and acts most.
        return (
            self.people[0]
            if self.rng.random() < (0.7 if self.pool.tidy else 0.5)
            else self.rng.choice(self.people)
        )

    def record(self, p: str) -> dict[str, object]:
        return self.records.setdefault(p, {"name": p})

    def take_place(self) -> str:
        if self.wish.place:
            place, self.wish.place = self.wish.place, None
            return place
        return self.pool.place()

    # -- parts of a story --------------------------------------------------------------------

    def open(self) -> None:
        rng, p = self.rng, self.people[0]
        job = self.wish.job or rng.choice(JOBS)
        town, a_job = self.pool.town(), with_article(job)
        opening = rng.choice(OPENINGS) if rng.random() < 0.6 else OPENINGS[0]
        form = rng.randrange(4)
        if form == 0:
            self.say(
                "{o} there was {a_job} called {p} who lived in {town}.",
                "{o} {a_job} named {p} lived in {town}.",
                o=opening,
                a_job=a_job,
                p=p,
                town=town,
            )
        elif form == 1:
            self.say(
                "{p} was {a_job} in the town of {town}.",
                "{p} lived in {town} and was {a_job}.",
                "In {town} lived {a_job} called {p}.",
                a_job=a_job,
                p=p,
                town=town,
            )
        elif form == 2:
            self.say(
                "{o} there was a child called {p} who lived in {town}.",
                "{o} {p} lived in {town}.",
                o=opening,
                p=p,
                town=town,
            )
        else:
            self.say(
                "{o} there was {a_job} called {p}.",
                "This is a story about {p}, who was {a_job}.",
                o=opening,
                a_job=a_job,
                p=p,
            )
        if form != 2:
            self.fact("job", p=p, job=job, a_job=a_job)
            self.record(p)["job"] = job
        self.ages = (18, 70) if form != 2 else (5, 14)
        if form != 3:
            self.fact("town", p=p, town=town)
            self.record(p)["town"] = town
        if rng.random() < 0.5:
            self.weather = rng.choice(WEATHER)
            self.say("It was a {w} day.", "The day was {w}.", "It was a {w} morning.", w=self.weather)
            self.fact("weather", weather=self.weather)
        if rng.random() < 0.45:
            self.age(p)
        relations = rng.sample(("best friend", *RELATIONS), 3)
        for q, relation in zip(self.people[1:], relations):
            self.introduce(p, q, relation)

    def introduce(self, p: str, q: str, relation: str) -> None:
        self.say(
            "{p}'s {r} was {q}.",
            "{p} had {a_r} called {q}.",
            "{p}'s {r} was called {q}.",
            p=p,
            q=q,
            r=relation,
            a_r=with_article(relation),
        )
        self.fact("friend" if relation == "best friend" else "relation", p=p, q=q, relation=relation)
        if relation == "best friend":
            self.record(p)["friend"] = q
        if self.rng.random() < 0.45:
            self.age(q)

    def age(self, p: str) -> None:
        age = self.rng.randint(*(self.ages if self.pool.tidy else (4, 80)))
        self.say(
            "{p} was {n} years old.",
            "{p} had just turned {n}.",
            "At that time {p} was {n} years old.",
            p=p,
            n=number_text(self.rng, age),
        )
        self.fact("age", p=p, age=str(age))
        self.record(p)["age"] = age

    def trait(self) -> None:
        p, food = self.person(), self.rng.choice(FOODS)
        if "food" in self.record(p):
            return self.go()
        self.say(
            "{p} loved {f} more than anything else.",
            "{p}'s favourite food was {f}.",
            "Every day {p} ate {f}, because {p} loved {f}.",
            p=p,
            f=food,
        )
        self.fact("food", p=p, food=food)
        self.record(p)["food"] = food

    def pet(self) -> None:
        p, animal, colour = self.person(), self.rng.choice(ANIMALS), self.rng.choice(ANIMAL_COLOURS)
        if "pet" in self.record(p):
            return self.go()
        animal, self.wish.animal = self.wish.animal or animal, None
        pet = self.pool.pet()
        slots = {
            "p": p,
            "animal": animal,
            "a_animal": with_article(animal),
            "pet": pet,
            "pet_colour": colour,
            "a_pet": with_article(f"{colour} {animal}"),
        }
        self.say(
            "{p} had {a_pet} called {pet}.",
            "{p} had {a_animal}. The {animal} was {pet_colour} and was called {pet}.",
            "{p}'s {animal} {pet} was {pet_colour}.",
            **slots,
        )
        for kind in ("pet_name", "pet_kind", "pet_colour", "pet_owner"):
            self.fact(kind, **slots)
        self.record(p).update(pet=pet, animal=animal)

    def go(self) -> None:
        p, place = self.person(), self.pool.place()
        self.at[p] = place
        if not self.days or self.rng.random() < 0.25:
            self.say(
                "Then {p} went to {place}.",
                "After that, {p} walked to {place}.",
                "Later {p} ran to {place}.",
                p=p,
                place=place,
            )
            return
        day = self.days.pop()
        self.say(
            "On {day}, {p} went to {place}.",
            "On {day} {p} walked to {place}.",
            "{p} went to {place} on {day}.",
            p=p,
            place=place,
            day=day,
        )
        self.fact("go_where", p=p, place=place, day=day)
        self.fact("go_day", p=p, place=place, day=day)

    def find(self) -> None:
        p, place = self.person(), self.take_place()
        if self.wish.thing:
            (colour, noun), self.wish.thing = self.wish.thing, None
        else:
            colour, noun = self.pool.thing(place)
        thing = f"{colour} {noun}"
        slots = {
            "p": p,
            "place": place,
            "thing": thing,
            "a_thing": with_article(thing),
            "noun": noun,
            "colour": colour,
        }
        self.at[p] = place
        self.say(
            "{p} went to {place} and found {a_thing} there.",
            "At {place}, {p} found {a_thing}.",
            "{p} found {a_thing} at {place}.",
            "One morning {p} was at {place} and saw {a_thing} on the ground. {p} picked it up.",
            **slots,
        )
        for kind in ("find_what", "find_where", "find_who", "colour"):
            self.fact(kind, **slots)
        self.lists["finds"].append({"person": p, "object": thing, "place": place})
        self.open_finds.append({**slots, "holder": p, "gifts": "0", "had": p})

    def hand_over(self) -> None:
        """Write that a found object is passed on, or put somewhere, after which it does not move again."""
        if not self.open_finds:
            return
        item = self.rng.choice(self.open_finds)
        giver, thing, noun = item["holder"], item["thing"], item["noun"]
        had = item["had"].split() if self.pool.tidy else [giver]  # nothing goes back and forth
        others = [q for q in self.people if q not in had]
        if others and self.rng.random() < 0.75:
            q = self.rng.choice(others)
            self.say(
                "{p} gave the {noun} to {q}.",
                "{p} gave {q} the {noun}.",
                "Then {p} gave the {noun} to {q} as a present.",
                "{p} did not need the {thing}, so {p} gave it to {q}.",
                p=giver,
                q=q,
                noun=noun,
                thing=thing,
            )
            item["holder"], item["gifts"], item["had"] = q, str(int(item["gifts"]) + 1), f"{item['had']} {q}"
            self.lists["gifts"].append({"from": giver, "object": thing, "to": q})
            return
        spot = self.rng.choice(HIDING)
        self.say(
            "{p} put the {noun} {spot}.",
            "{p} hid the {noun} {spot}.",
            "In the evening {p} put the {thing} {spot}.",
            p=giver,
            noun=noun,
            thing=thing,
            spot=spot,
        )
        self.fact("put_where", p=giver, thing=thing, noun=noun, spot=spot)
        self.open_finds.remove(item)

    def meet(self) -> None:
        p, q, place = self.person(), self.pool.name(), self.pool.place()
        self.at[p] = self.at[q] = place
        self.say(
            "At {place}, {p} met {q}.",
            "{p} met {q} at {place}.",
            "{p} went to {place} and met {q} there.",
            p=p,
            q=q,
            place=place,
        )
        self.fact("meet_who", p=p, q=q, place=place)
        self.fact("meet_where", p=p, q=q, place=place)
        self.people.append(q)

    def buy(self) -> None:
        rng, p, goods, place = self.rng, self.person(), self.pool.goods(), self.pool.place()
        count, price = rng.randint(2, 15), rng.randint(2, 20)
        price += self.pool.tidy and price == count
        slots = {"p": p, "goods": goods, "place": place, "count": str(count), "price": str(price)}
        self.at[p] = place
        self.say(
            "{p} went to {place} and bought {n} {goods} for {m} coins.",
            "At {place}, {p} bought {n} {goods} for {m} coins.",
            "{p} bought {n} {goods} at {place} and paid {m} coins.",
            n=number_text(rng, count),
            m=number_text(rng, price),
            **slots,
        )
        for kind in ("buy_count", "buy_price", "buy_what"):
            self.fact(kind, **slots)
        self.lists["purchases"].append({"person": p, "item": goods, "count": count, "price": price})
        total, terms = count, str(count)
        for _ in range(rng.choice((0, 1, 1, 2))):
            if total > 3 and rng.random() < 0.65:
                n = rng.randint(1, total - 2)
                q = rng.choice(self.people)
                ways = ["{p} lost {n} of the {goods}.", "{p} sold {n} of the {goods}."]
                if q != p:
                    ways = ["{p} gave {n} of the {goods} to {q}."]
                elif goods not in NOT_EATEN:
                    ways.append("{p} ate {n} of the {goods}.")
                self.say(*ways, p=p, q=q, n=number_text(rng, n), goods=goods)
                total, terms = total - n, f"{terms} - {n}"
            else:
                n = rng.randint(2, 9)
                self.say(
                    "Then {p} got {n} more {goods}.",
                    "Later {p} found {n} more {goods}.",
                    p=p,
                    n=number_text(rng, n),
                    goods=goods,
                )
                total, terms = total + n, f"{terms} + {n}"
        if terms != str(count):
            self.fact("left", sum=worked_sum(terms), left=str(total), **slots)

    def close(self) -> None:
        rng, p = self.rng, self.people[0]
        for item in self.open_finds:
            self.fact("holder", q=item["holder"], thing=item["thing"], noun=item["noun"])
        gifts = self.lists["gifts"]
        for gift in gifts:
            giver, thing, q = str(gift["from"]), str(gift["object"]), str(gift["to"])
            pair = {"thing": thing, "noun": thing.split()[1], "p": giver, "q": q}
            # A thing may change hands several times: ask only where one answer is right.
            if sum(g["from"] == giver and g["object"] == thing for g in gifts) == 1:
                self.fact("give_to", **pair)
            if sum(g["to"] == q and g["object"] == thing for g in gifts) == 1:
                self.fact("give_from", **pair)
        for q, place in self.at.items():
            self.fact("end_place", p=q, place=place)
        if rng.random() < 0.5:
            feeling = rng.choice(FEELINGS)
            self.say(
                "In the end, {p} was very {f}.",
                "That evening {p} felt {f}.",
                "{p} went to sleep and felt {f}.",
                p=p,
                f=feeling,
            )
            self.fact("feel", p=p, feeling=feeling)
            self.record(p)["feeling"] = feeling
        elif rng.random() < 0.4 or self.pool.tidy:
            self.say(
                "And that is the end of the story.", "It was a day that nobody would forget.", "The end."
            )
        words = re.findall(r"\w+", " ".join(self.sentences))
        self.people = sorted((q for q in self.people if q in words), key=words.index)  # only those who act
        if len(self.people) > 1:
            self.fact("people", people=join_names(self.people))
        for q in self.people:
            self.record(q)

    def layout(self) -> str:
        """Join the sentences to paragraphs."""
        parts = [self.sentences[0]]
        for sentence in self.sentences[1:]:
            parts.append(("\n\n" if self.rng.random() < 0.12 else " ") + sentence)
        return "".join(parts)

    # -- questions ---------------------------------------------------------------------------

    def questions(self, count: int, nameless: bool = True, unknown: float = 0.12) -> list[Question]:
        """Draw up to `count` different questions, of which about the share `unknown` has no answer in the story."""
        rng = self.rng
        candidates = [f for f in self.facts if (nameless or f[0] not in NAMELESS)]
        # Draw kinds evenly, so that rare kinds are practised as often as common ones.
        by_kind: dict[str, list[dict[str, str]]] = {}
        for kind, slots in candidates:
            by_kind.setdefault(kind, []).append(slots)
        kinds = list(by_kind)
        rng.shuffle(kinds)
        chosen = []
        for kind in kinds[:count]:
            if rng.random() < unknown:
                chosen.append(self.unknown_question(nameless))
            else:
                chosen.append(self.ask(kind, rng.choice(by_kind[kind])))
        return chosen

    def ask(self, kind: str, slots: dict[str, str]) -> Question:
        ways, answer, slot = QUESTIONS[kind]
        if not self.once(kind, slots):
            ways = ways[:1]  # the first way names everything that makes the answer unique
        return Question(kind, self.rng.choice(ways).format_map(slots), answer.format_map(slots), slots[slot])

    def once(self, kind: str, slots: dict[str, str]) -> bool:
        """Return whether this person did this kind of thing only once; a meeting counts for both persons."""
        p = slots.get("p")
        return (
            sum(
                k == kind and (s.get("p") == p or (kind == "meet_who" and s["q"] == p)) for k, s in self.facts
            )
            == 1
        )

    def unknown_question(self, nameless: bool) -> Question:
        """Draw a question without an answer in the story, about a person in the story or another one."""
        rng = self.rng
        if nameless and self.weather is None and rng.random() < 0.1:
            return Question("unknown", rng.choice(QUESTIONS["weather"][0]), DOES_NOT_SAY, "")
        options = []
        for p in self.people:
            known = {k for k, s in self.facts if p in (s.get("p"), s.get("q"))}
            options += [(p, kind) for kind in (*ABOUT_PERSON, "pet_name", *UNPLACED) if kind not in known]
            if p not in self.at:
                options.append((p, "end_place"))
            options.append((p, "relation"))
        if rng.random() < 0.3 or not options:
            p, kind = self.pool.name(), rng.choice((*ABOUT_PERSON, "end_place", *UNPLACED))
        else:
            p, kind = rng.choice(options)
        ways = QUESTIONS[kind][0]
        taken = {s["relation"] for k, s in self.facts if k == "relation" and s["p"] == p}
        relation = rng.choice([r for r in RELATIONS if r not in taken])
        way = ways[1] if kind in UNPLACED else rng.choice(ways)
        return Question(
            "unknown", way.format(p=p, animal=rng.choice(ANIMALS), relation=relation), DOES_NOT_SAY, ""
        )


def worked_sum(terms: str) -> str:
    """Solve a sum one operation at a time, left to right: '5 + 3 - 2' -> '5 + 3 - 2 = 8 - 2 = 6'."""
    tokens, steps = terms.split(), [terms]
    while len(tokens) > 1:
        a, operator, b = int(tokens[0]), tokens[1], int(tokens[2])
        tokens = [str(a + b if operator == "+" else a - b), *tokens[3:]]
        steps.append(" ".join(tokens))
    return " = ".join(steps)
